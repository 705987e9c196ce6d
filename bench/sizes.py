"""Measures time and disk of the data stages on real data, and predicts the training's costs.

`python -m bench.sizes [NAME ...]` makes a project for each data set as `slipway init` proposes it,
runs the stages before `train`, and predicts memory and time of the training by `slipway.planning`.
It prints and writes one table, without data sets that are missing below ../shared/data.
"""

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.conditions import conditions
from slipway.config.params import load_params
from slipway.planning.resource_plan import ResourcePlan, make_plan
from slipway.planning.step_memory import parameter_counts
from slipway.project.creation import create
from slipway.project.inspection import inspect
from slipway.project.pretrained import find_weights
from slipway.project.proposal import propose
from slipway.reports.console import size
from slipway.system import files
from slipway.training.distributed.placement import this_host
from slipway.training.job import PROJECT_PATHS
from slipway.training.telemetry.costs import folder_bytes

ROOT = Path.cwd()
SHARED = ROOT.parent / "shared" / "data"
SCRATCH = ROOT / "tmp" / "bench" / "sizes"
RESULT = ROOT / "bench/results/sizes.md"
TIMING_SECONDS = 20.0
COLUMNS = (
    "Data",
    "Rows",
    "Input",
    "Network",
    "Clean to augment",
    "Packed store",
    "Memory of training",
    "Training",
    "Disk of training",
)


@dataclass(frozen=True)
class Case:
    """A data set, and its changes to the proposal of `slipway init`."""

    name: str
    path: Path
    target: str | None = None
    task: str | None = None
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


_RESNET18: dict[str, dict[str, Any]] = {
    "precompute": {"image_size_px": 224},
    "train": {"network": "timm/resnet18.a1_in1k", "network_arguments": {}},
}
CASES = (
    Case("wines", ROOT / "data/demo/wine.csv", "cultivar", "table_classification"),
    Case("California housing", SHARED / "housing/housing.csv", "median_house_value"),
    Case("digits", ROOT / "data/demo/digits.parquet"),
    Case("CIFAR-10", SHARED / "cifar10/train.parquet"),
    Case("blood cells", SHARED / "bccd", "red_cells", "image_regression"),
    Case("blood cells, 224 px", SHARED / "bccd", "red_cells", "image_regression", _RESNET18),
)


def measure(case: Case) -> list[str]:
    """Measure one case; return its row."""
    folder = SCRATCH / case.name.replace(" ", "_").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    summary = inspect(case.path)
    search = None if summary.images is None else find_weights(folder)
    proposal = propose(summary, case.task, case.target, search=search)
    content = dict(proposal.params)
    for section, values in case.changes.items():
        content[section] = {**content[section], **values}
    create(folder, dataclasses.replace(proposal, params=content))
    begin = time.monotonic()
    subprocess.run([sys.executable, "-m", "dvc", "repro", "augment"], cwd=folder, check=True)
    seconds = time.monotonic() - begin
    with contextlib.chdir(folder):
        params = load_params()
        plan = make_plan(params, PROJECT_PATHS, this_host(), TIMING_SECONDS)
        store = folder_bytes(PROJECT_PATHS.packed)
    return [case.name, *_cells(plan, params.train.epochs, seconds, store)]


def _cells(plan: ResourcePlan, epochs: int, data_seconds: float, store: int) -> list[str]:
    assert plan.data
    assert plan.network
    assert plan.memory
    assert plan.seconds
    assert plan.steps_per_epoch
    spec = plan.network.spec
    epoch = plan.seconds.step * plan.steps_per_epoch + plan.seconds.validation
    rows = sum(split.rows for split in plan.data.manifest.splits.values())
    return [
        f"{rows:,}",
        "x".join(map(str, spec.input.shape)),
        f"{spec.name}, {sum(parameter_counts(plan.network)):,} parameters",
        f"{data_seconds:.0f} s",
        size(store),
        size(plan.memory.process_bytes),
        f"{epoch * epochs:.0f} s, {epochs} epochs",
        size(sum(plan.disk[name] for name in ("checkpoints", "model", "TensorBoard"))),
    ]


def main() -> None:
    """Measure the cases of the command line, or all, and write the table."""
    names = sys.argv[1:] or [case.name for case in CASES]
    cases = [case for case in CASES if case.name in names and case.path.exists()]
    # A process for each: the memory of a training is predicted from that of this process.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        rows = processes.map(measure, cases, chunksize=1)
    lines = [f"| {' | '.join(row)} |" for row in (list(COLUMNS), ["---"] * len(COLUMNS), *rows)]
    text = "\n".join(
        [
            "# Sizes of real projects",
            "",
            *lines,
            "",
            "Data stages and store are measured, training is predicted by `slipway.planning`, on "
            "the CPU; memory is that of the process.",
            conditions("torch", "timm"),
            "",
        ]
    )
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
