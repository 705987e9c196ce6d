"""Runs the whole pipeline, from raw files to a certified service, on real data.

`python -m bench.data_sets [NAME ...]` copies this checkout once for each data set (by default the
demo and those under ../shared/data), changes its params, runs `dvc repro`, and prints and writes
one table. Only params.yaml differs between data sets. Rows of data sets that are not named stay in
the table.
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.conditions import conditions
from slipway.artifacts.certificate import read_certificate
from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import read_metrics
from slipway.system import files
from tests.end_to_end.project import Project, copy_checkout

ROOT = Path.cwd()
SHARED = ROOT.parent / "shared" / "data"
SCRATCH = ROOT / "tmp" / "bench" / "data_sets"
RESULT = ROOT / "bench/results/data_sets.md"
COLUMNS = (
    "Data",
    "Rows kept of read",
    "Network, epochs, precision",
    "Metric on test rows",
    "Certificate",
    "Backends",
    "Clean to augment",
    "Train",
    "Rest",
    "Measured",
)


@dataclass(frozen=True)
class DataSet:
    """A data set below `SHARED`, and the params that a user would change for it."""

    name: str
    path: str  # "" for the data of params.yaml
    params: dict[str, dict[str, Any]]


def fast_precision() -> str:
    """Return bf16-mixed on a CPU with AMX, which is twice as fast as fp32; else the project's."""
    information = Path("/proc/cpuinfo")
    return (
        "bf16-mixed" if information.exists() and "amx_bf16" in information.read_text() else "auto"
    )


DIGITS = DataSet("Digits", "", {})
CIFAR10 = DataSet(
    "CIFAR-10",
    "cifar10/train.parquet",
    {
        "precompute": {"image_size_px": 32, "channels": 3},
        "augment": {
            "rotation_deg": 0.0,
            "scale": [1.0, 1.0],
            "crop_padding_px": 4,
            "horizontal_flip": 0.5,
            "forbid": ["vertical_flip"],
        },
        "train": {
            "epochs": 20,
            "batch_size": 128,
            "learning_rate": 0.004,
            "warmup_epochs": 2.0,
            "ema_decay": 0.998,
            "precision": fast_precision(),
        },
        "evaluate": {"gates": {"accuracy": {"min": 0.8, "max": None}}},
    },
)
# Predicting the mean count of red cells for every image has an RMSE of 4.3.
BLOOD_CELLS = DataSet(
    "BCCD, red cells",
    "bccd",
    {
        "data": {"task": "image_regression", "target_column": "red_cells"},
        "precompute": {"image_size_px": 64, "channels": 3},
        "augment": {
            "rotation_deg": 0.0,
            "scale": [1.0, 1.0],
            "crop_padding_px": 0,
            "horizontal_flip": 0.5,
            "vertical_flip": 0.5,
            "forbid": [],
        },
        "train": {"epochs": 40, "batch_size": 32, "learning_rate": 0.002},
        "evaluate": {"gates": {"rmse": {"min": None, "max": 4.3}}},
        "verify": {
            "max_metric_loss": {
                "fp16": 0.01,
                "int8": 0.05,
                "int8_dynamic": 0.05,
                "int8_tensorrt": 0.05,
            }
        },
    },
)

NO_AUGMENTATION: dict[str, Any] = {
    "rotation_deg": 0.0,
    "scale": [1.0, 1.0],
    "crop_padding_px": 0,
    "forbid": [],
}
# docs/explanation/training.md has this block for tables.
TABM: dict[str, Any] = {
    "network": "tabm",
    "network_arguments": {
        "num_submodels": 16,
        "num_blocks": 2,
        "width": 128,
        "dropout": 0.1,
        "embedding_size": 32,
        "num_bins": 48,
    },
    "epochs": 40,
    "batch_size": 128,
    "learning_rate": 0.006,
    "weight_decay": 0.0003,
    "label_smoothing": 0.0,
    "warmup_epochs": 1.0,
}
HOUSING = DataSet(
    "California housing",
    "housing/housing.csv",
    {
        "data": {"task": "table_regression", "target_column": "median_house_value"},
        "augment": NO_AUGMENTATION,
        "train": TABM,
        "evaluate": {"gates": {"rmse": {"min": None, "max": 50000.0}}},
    },
)

DATA_SETS = {one.name: one for one in (DIGITS, HOUSING, BLOOD_CELLS, CIFAR10)}


def run(data_set: DataSet) -> list[str]:
    """Run the whole pipeline of one data set; return its row of the table."""
    folder = SCRATCH / (data_set.path.partition("/")[0] or "demo")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = copy_checkout(folder)
    if data_set.path:
        project.set_params({"data": {"path": str(SHARED / data_set.path)}})
    project.set_params(data_set.params)
    seconds = [_timed(project, stages) for stages in ("augment", "train", "")]
    versions = conditions("torch", "pytorch-lightning", "onnxruntime-gpu", "bentoml")
    times = (f"{value:.0f} s" for value in seconds)
    return [data_set.name, *_figures(project), *times, versions]


def _timed(project: Project, stages: str) -> float:
    begin = time.perf_counter()
    print(project.shell(f"dvc repro {stages}", timeout_s=7200), flush=True)
    return time.perf_counter() - begin


def _figures(project: Project) -> list[str]:
    clean = json.loads((project.path / "reports/clean.json").read_text())
    model = json.loads((project.path / "artifacts/model/model.json").read_text())
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    metric = read_metrics(project.path / "metrics/evaluate.json")[certificate.metric]
    executed = [one for one in certificate.hops if one.actual is not None]
    agreeing = sum(one.status == "agrees" for one in executed)
    return [
        f"{clean['kept']:,} of {clean['read']:,}",
        f"{model['network']['name']}, {model['epochs']}, {model['actual']['precision']}",
        f"{certificate.metric} {number(metric.value)} ({interval(metric)}), n = {metric.rows:,}",
        f"{certificate.status}, gates {certificate.gates}",
        (
            f"{agreeing} of {len(executed)} agree, {len(certificate.hops) - len(executed)} not "
            "executed"
        ),
    ]


def main() -> None:
    """Run the data sets of the command line, or all, one after the other."""
    names = sys.argv[1:] or list(DATA_SETS)
    old = [line for line in RESULT.read_text().splitlines() if line.startswith("| ")][1:]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in old}
    for name in names:
        if DATA_SETS[name].path and not (SHARED / DATA_SETS[name].path).exists():
            raise SystemExit(f"{name}: {SHARED / DATA_SETS[name].path} is not there")
        rows[name] = "| " + " | ".join(run(DATA_SETS[name])) + " |"
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    table = "\n".join([*head, *(rows[name] for name in DATA_SETS if name in rows)])
    title = "# Real data, from files to a certified service"
    files.write_text(RESULT, f"{title}\n\n{table}\n\nOne run each, on the CPU.\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
