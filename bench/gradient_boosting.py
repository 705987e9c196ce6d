"""Compares the trained network with gradient boosting on the same rows.

`python -m bench.gradient_boosting [PROJECT]` reads the packed store and the metrics of a finished
run on a table with a numeric target: this checkout's, or PROJECT's. It fits scikit-learn's
HistGradientBoostingRegressor on the same training rows, and prints and writes one table. It fits
two models: with default settings, and the best of a small grid, chosen on the validation rows like
the network's epoch. Trees choose their own splits, so their input is the encoded columns: missing
numbers as NaN, codes as categories.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from bench.conditions import conditions
from slipway.artifacts.bundle import Metric
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.inputs.columns import ColumnContract
from slipway.metrics.scores import Resampling, measure
from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import read_metrics
from slipway.system import files

RESULT = Path.cwd() / "bench/results/gradient_boosting.md"
GRID: dict[str, list[Any]] = {
    "learning_rate": [0.05, 0.1],
    "max_leaf_nodes": [31, 63],
    "min_samples_leaf": [10, 20],
    "max_iter": [300, 1000],
}
RESAMPLING = Resampling(seed=7, num_samples=1000, confidence=0.95)
COLUMNS = (
    "Model",
    "Chosen by",
    "RMSE on the validation rows",
    "RMSE on the test rows (95 %)",
    "R2 (95 %)",
    "Fitting",
)


def features(split: PackedSplit, contract: ColumnContract) -> NDArray[np.float64]:
    """Return values, then codes from 0, (N, columns); NaN if missing or an unknown category."""
    rows = np.asarray(split.inputs[:], np.float64)
    num_values, num_codes = len(contract.numeric), len(contract.categorical)
    values, codes = rows[:, :num_values], rows[:, rows.shape[1] - num_codes :]
    for index, column in enumerate(contract.indicated):
        place = contract.numeric.index(column)
        values[:, place] = np.where(rows[:, num_values + index] == 1, np.nan, values[:, place])
    return np.concatenate([values, np.where(codes == 0, np.nan, codes - 1)], axis=1)


def fit(
    settings: dict[str, Any],
    inputs: NDArray[np.float64],
    split: PackedSplit,
    contract: ColumnContract,
) -> HistGradientBoostingRegressor:
    """Fit one model to the training rows."""
    first_code = len(contract.numeric)
    categorical = [
        first_code + index
        for index, column in enumerate(contract.categorical)
        if len(column.categories) <= 255
    ]  # its limit
    model = HistGradientBoostingRegressor(
        categorical_features=categorical, early_stopping=False, random_state=7, **settings
    )
    return model.fit(inputs, split.targets, sample_weight=split.weights)


def rmse(
    model: HistGradientBoostingRegressor, inputs: NDArray[np.float64], split: PackedSplit
) -> float:
    """Return the root mean squared error of the model's answers."""
    return float(np.sqrt(np.mean((model.predict(inputs) - split.targets) ** 2)))


def compare(project: Path) -> list[list[str]]:
    """Return a row for each model."""
    packed = project / "data/packed"
    manifest: PackedManifest = read_manifest(packed)
    contract = manifest.input
    if not isinstance(contract, ColumnContract) or manifest.target_scale is None:
        raise SystemExit(f"{packed} holds {manifest.task}, expected table_regression")
    splits = {
        name: open_split(packed, manifest, name, verify=True) for name in ("train", "val", "test")
    }
    inputs = {name: features(split, contract) for name, split in splits.items()}
    rows = [_network(project)]
    settings = [
        dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())
    ]
    for name, candidates in (("as it comes", [{}]), (f"best of {len(settings)}", settings)):
        begin = time.perf_counter()
        models = [
            fit(candidate, inputs["train"], splits["train"], contract) for candidate in candidates
        ]
        seconds = time.perf_counter() - begin
        losses = [rmse(model, inputs["val"], splits["val"]) for model in models]
        best = int(np.argmin(losses))
        metrics = measure(
            "table_regression",
            splits["test"].targets,
            models[best].predict(inputs["test"]),
            RESAMPLING,
        )
        rows.append(
            [
                f"HistGradientBoosting, {name}",
                _settings(candidates[best]),
                number(losses[best]),
                *_shown(metrics),
                f"{seconds:.0f} s",
            ]
        )
    return rows


def _network(project: Path) -> list[str]:
    model = json.loads((project / "artifacts/model/model.json").read_text())
    metrics = read_metrics(project / "metrics/evaluate.json")
    return [
        model["network"]["name"],
        "the validation loss",
        "",
        *_shown(metrics),
        "see metrics/train.json",
    ]


def _shown(metrics: dict[str, Metric]) -> list[str]:
    return [f"{number(metrics[name].value)} ({interval(metrics[name])})" for name in ("rmse", "r2")]


def _settings(chosen: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in chosen.items()) or "nothing to choose"


def main() -> None:
    """Write the table of one project."""
    project = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    manifest = read_manifest(project / "data/packed")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in compare(project)]
    text = "\n".join(lines)
    print(text)
    sizes = ", ".join(f"{manifest.splits[name].rows:,} {name}" for name in ("train", "val", "test"))
    note = (
        f"One split ({sizes} rows), one run of each. {conditions('scikit-learn', 'torch', 'tabm')}"
    )
    files.write_text(
        RESULT, f"# A network and gradient boosting on one split\n\n{text}\n\n{note}\n"
    )


if __name__ == "__main__":
    main()
