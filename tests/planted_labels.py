"""Data sets with planted wrong labels, and the number of them that `audit` finds.

Each stage from `clean` to `audit` runs in its own process.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from ruamel.yaml import YAML
from sklearn.datasets import load_breast_cancer

from slipway.data.engine.rows import read_table
from slipway.reports.evaluation.label_issues import LABEL_ISSUES
from tests import warm_starts
from tests.conftest import ROOT
from tests.project_params import of_kind

STAGES = ("clean", "split", "precompute", "augment", "audit")
SHARE = 0.05  # of the labels that are planted wrong
NO_CHANGES: dict[str, Any] = {
    "rotation_deg": 0.0,
    "scale": [1.0, 1.0],
    "crop_padding_px": 0,
    "forbid": [],
}
TABM: dict[str, Any] = {
    "network": "tabm",
    "network_arguments": {
        "num_submodels": 8,
        "num_blocks": 2,
        "width": 64,
        "dropout": 0.1,
        "embedding_size": 16,
        "num_bins": 24,
    },
    "batch_size": 32,
    "learning_rate": 0.006,
}
NGRAMS: dict[str, Any] = {
    "network": "hashed_ngrams",
    "network_arguments": {
        "buckets": 32768,
        "width": 16,
        "word_ngrams": 2,
        "byte_ngrams": [3, 4, 5],
        "lowercase": True,
        "dropout": 0.0,
    },
    "batch_size": 32,
    "learning_rate": 0.01,
}


@dataclass(frozen=True)
class Found:
    """The planted labels that an audit found among the rows it checked."""

    rows: int
    planted: int
    candidates: int
    right: int  # candidates that were planted
    suggested: int  # of these, how many times the suggestion is the label that was replaced

    @property
    def precision(self) -> float:
        return self.right / max(self.candidates, 1)

    @property
    def recall(self) -> float:
        return self.right / self.planted


def digits() -> pa.Table:
    """The embedded digits."""
    return pq.read_table(ROOT / "data/demo/digits.parquet")


def cancer() -> pa.Table:
    """scikit-learn's copy of Wolberg, Street and Mangasarian (1995): 569 rows, two classes."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    labels = [str(data.target_names[target]) for target in data.target]
    return pa.table(
        {**{name: data.data[:, index] for index, name in enumerate(names)}, "label": labels}
    )


def messages() -> pa.Table:
    """The embedded messages."""
    return pyarrow.csv.read_csv(ROOT / "data/demo/messages.csv")


def plant(table: pa.Table, seed: int) -> tuple[pa.Table, dict[int, str]]:
    """Return the table with 5 % wrong values in `label`, and the true labels by row number."""
    labels = table["label"].to_pylist()
    classes, generator = sorted(set(labels)), np.random.default_rng(seed)
    rows = generator.choice(len(labels), round(SHARE * len(labels)), replace=False)
    truth = {row: labels[row] for row in rows.tolist()}
    for row in rows.tolist():
        labels[row] = generator.choice([name for name in classes if name != labels[row]])
    return table.set_column(
        table.column_names.index("label"), "label", pa.array(labels, pa.string())
    ), truth


def write_project(folder: Path, table: pa.Table, params: dict[str, dict[str, Any]]) -> None:
    """Make a folder in which the stages run on `table`."""
    folder.mkdir(parents=True, exist_ok=True)
    yaml = YAML(typ="safe", pure=True)
    content = of_kind(yaml.load(ROOT / "params.yaml"), params["data"]["task"])
    is_csv = not params["data"]["task"].startswith("image")
    name = "rows.csv" if is_csv else "rows.parquet"
    if is_csv:
        pyarrow.csv.write_csv(table, folder / name)
    else:
        pq.write_table(table, folder / name)
    for section, values in params.items():
        content[section].update(values)
    content["data"]["path"] = name
    yaml.dump(content, folder / "params.yaml")


def run_stage(folder: Path, stage: str) -> str:
    """Run a stage and return its output. Raises RuntimeError if it fails."""
    done = warm_starts.run(
        [f"slipway.stages.{stage}"], folder, {**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{stage} in {folder} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def row_number(source: str) -> int:
    """Return the row number of a source: "17", or "17:name" if the image has a name."""
    return int(source.partition(":")[0])


def count_found(folder: Path, truth: dict[int, str]) -> Found:
    """Count in `reports/label_issues.parquet` the rows of `truth`: true labels by row number."""
    issues = read_table(folder / "reports/label_issues.parquet", LABEL_ISSUES).to_pylist()
    candidates = [issue for issue in issues if issue["is_candidate"]]
    right = [issue for issue in candidates if row_number(issue["source"]) in truth]
    return Found(
        rows=len(issues),
        planted=sum(row_number(issue["source"]) in truth for issue in issues),
        candidates=len(candidates),
        right=len(right),
        suggested=sum(
            issue["suggested_label"] == truth[row_number(issue["source"])] for issue in right
        ),
    )


def found_of(is_candidate: NDArray[np.bool_], planted: Sequence[int]) -> tuple[float, float]:
    """Compute precision and recall of candidates (N,) for the planted rows."""
    right = int(is_candidate[list(planted)].sum())
    return right / max(int(is_candidate.sum()), 1), right / len(planted)
