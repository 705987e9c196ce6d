"""Measures recall and precision of `audit` on planted wrong labels.

`python -m bench.label_issues` replaces 5 % of the labels of each data set by another class, once
for each seed. It runs the stages from `clean` to `audit` in folders of their own under tmp/, and
prints and writes one table. CIFAR-10 is read from ../shared/data; the table says so if it is
missing.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.conditions import conditions
from slipway.system import files
from tests.planted_labels import (
    NO_CHANGES,
    STAGES,
    TABM,
    Found,
    cancer,
    count_found,
    digits,
    plant,
    run_stage,
    write_project,
)

ROOT = Path.cwd()
CIFAR10 = ROOT.parent / "shared" / "data" / "cifar10" / "train.parquet"
CIFAR10_ROWS = 10_000
SCRATCH = ROOT / "tmp" / "bench" / "label_issues"
RESULT = ROOT / "bench/results/label_issues.md"
COLUMNS = (
    "Data",
    "Seed",
    "Rows audited",
    "Network, folds, epochs",
    "Accuracy out of fold",
    "Planted",
    "Candidates",
    "Precision",
    "Recall",
    "True label suggested",
    "Audit",
)


@dataclass(frozen=True)
class DataSet:
    """The source of the rows, and the params that a user would change for them."""

    name: str
    table: Callable[[], pa.Table]
    params: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]


def cifar10() -> pa.Table:
    """Return a fixed part of the 50,000 training images."""
    table = pq.read_table(CIFAR10)
    return table.take(
        np.sort(np.random.default_rng(0).choice(table.num_rows, CIFAR10_ROWS, replace=False))
    )


IMAGES: dict[str, Any] = {"data": {"task": "image_classification"}}
CANCER: dict[str, Any] = {
    "data": {"task": "table_classification", "target_column": "label"},
    "augment": NO_CHANGES,
    "train": TABM,
}
PHOTOGRAPHS: dict[str, Any] = {
    "precompute": {"image_size_px": 32, "channels": 3},
    "augment": {
        **NO_CHANGES,
        "crop_padding_px": 4,
        "horizontal_flip": 0.5,
        "forbid": ["vertical_flip"],
    },
    "train": {"batch_size": 64},
}
SETS = (
    DataSet("digits", digits, {**IMAGES, "audit": {"folds": 5}}, (4, 5, 6)),
    DataSet("breast cancer, a table", cancer, {**CANCER, "audit": {"folds": 5}}, (4, 5, 6)),
    DataSet(
        f"CIFAR-10, {CIFAR10_ROWS:,} images",
        cifar10,
        {**IMAGES, **PHOTOGRAPHS, "audit": {"folds": 3, "epochs": 15}},
        (4,),
    ),
)


def run(data_set: DataSet, seed: int) -> list[str]:
    """Return one line of the table."""
    folder = SCRATCH / f"{data_set.name.split(',')[0].replace(' ', '_')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    table, truth = plant(data_set.table(), seed)
    write_project(folder, table, data_set.params)
    for stage in STAGES:
        begin = time.perf_counter()
        run_stage(folder, stage)
    seconds = time.perf_counter() - begin
    found, report = (
        count_found(folder, truth),
        json.loads((folder / "reports/label_issues.json").read_text()),
    )
    network = data_set.params.get("train", {}).get("network", "small_resnet")
    return [
        data_set.name,
        str(seed),
        f"{found.rows:,}",
        f"{network}, {report['folds']}, {report['epochs']}",
        *_figures(found, report["accuracy"]),
        f"{seconds:.0f} s",
    ]


def _figures(found: Found, accuracy: float) -> list[str]:
    counts = [str(found.planted), str(found.candidates)]
    return [
        f"{accuracy:.4f}",
        *counts,
        f"{found.precision:.3f}",
        f"{found.recall:.3f}",
        f"{found.suggested} of {found.right}",
    ]


def main() -> None:
    """Run every seed of the data sets named on the command line, by default of all."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for data_set in SETS:
        if sys.argv[1:] and data_set.name.split(",")[0] not in sys.argv[1:]:
            continue
        if data_set.table is cifar10 and not CIFAR10.exists():
            lines.append(
                "| "
                + " | ".join(
                    [
                        data_set.name,
                        "not run: the data is not beside this checkout",
                        *[""] * (len(COLUMNS) - 2),
                    ]
                )
                + " |"
            )
            continue
        for seed in data_set.seeds:
            lines.append("| " + " | ".join(run(data_set, seed)) + " |")
            print(lines[-1], flush=True)
    note = (
        "5 % of the labels replaced by another class, drawn again for each seed; the networks "
        "learn from them, too. Accuracy is against "
        f"these labels, so 0.95 is the most. {conditions('torch', 'pytorch-lightning', 'cleanlab')}"
    )
    text = "\n".join(lines)
    print(text)
    files.write_text(RESULT, f"# Planted wrong labels\n\n{text}\n\n{note}\n")


if __name__ == "__main__":
    main()
