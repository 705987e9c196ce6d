"""Small tables on disk as the precompute stage packs them.

The columns are fitted on the training rows and encoded by `slipway.inputs.columns`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.rows import PACKED_ROWS
from slipway.data.store import packed
from slipway.data.store.packed import PackedManifest, TargetScale
from slipway.inputs.columns import Cell, Column, ColumnContract, encode
from slipway.kinds.registry import Task, kind_of
from slipway.system import files
from tests.packed_rows import packed_rows

CLASSES = ["high", "low"]
Cells = Mapping[str, Sequence[Cell]]


def fit_column(name: str, cells: Sequence[Cell], num_quantiles: int = 48) -> Column:
    """Fit a column: text is a category, `b_...` a boolean, everything else a number."""
    has_missing = any(cell is None for cell in cells)
    present = [cell for cell in cells if cell is not None]
    facts: dict[str, Any] = {
        "name": name,
        "required": False,
        "min": None,
        "max": None,
        "has_missing": has_missing,
    }
    if isinstance(present[0], str):
        categories = sorted({str(cell) for cell in present})
        return Column(
            **facts,
            kind="category",
            categories=categories,
            mean=0.0,
            std=1.0,
            fill=0.0,
            quantiles=[],
        )
    numbers = np.array(present, dtype=np.float64)
    is_boolean = name.startswith("b_")
    quantiles = (
        []
        if is_boolean
        else np.unique(np.quantile(numbers, np.linspace(0, 1, num_quantiles + 1))).tolist()
    )
    return Column(
        **facts,
        kind="boolean" if is_boolean else "number",
        categories=[],
        mean=float(numbers.mean()),
        std=float(numbers.std()) or 1.0,
        fill=float(np.median(numbers)),
        quantiles=quantiles,
    )


def fit_contract(columns: Cells, num_quantiles: int = 48) -> ColumnContract:
    return ColumnContract(
        kind="columns",
        columns=[fit_column(name, cells, num_quantiles) for name, cells in columns.items()],
    )


def table(num_rows: int, seed: int = 0) -> tuple[dict[str, list[Cell]], NDArray[np.float64]]:
    """Numbers (one with missing values, one long-tailed), a category, a boolean, and a target.

    The category has missing values; the target is around 100,000.
    """
    generator = np.random.default_rng(seed)
    size, age, tail = (
        generator.normal(3, 1, num_rows),
        generator.uniform(0, 50, num_rows),
        np.exp(generator.normal(0, 2, num_rows)),
    )
    place = generator.integers(0, 4, num_rows)
    garden = generator.random(num_rows) < 0.3
    value = (
        100_000
        + 30_000 * (size - 3)
        - 800 * age
        + 15_000 * place
        + 10_000 * garden
        + 4_000 * np.log(tail)
    )
    columns: dict[str, list[Cell]] = {
        "size": size.tolist(),
        "age": [
            None if gap else float(number)
            for number, gap in zip(age, generator.random(num_rows) < 0.1, strict=True)
        ],
        "tail": tail.tolist(),
        "place": [None if index == 3 else f"place {index}" for index in place],
        "b_garden": garden.astype(float).tolist(),
    }
    return columns, value


def write_packed_table(
    root: Path, task: Task, num_rows: Mapping[str, int], weight: float = 1.0
) -> PackedManifest:
    """A packed store of `table`; the two classes are split at the median of the training rows."""
    columns, values = table(sum(num_rows.values()))
    num_train = num_rows["train"]
    contract = fit_contract({name: cells[:num_train] for name, cells in columns.items()})
    targets = (
        (values < np.median(values[:num_train])).astype(np.float64)
        if kind_of(task).target.has_classes
        else values
    )
    return write_packed(root, task, contract, encode(columns, contract), targets, num_rows, weight)


def write_packed(
    root: Path,
    task: Task,
    contract: ColumnContract,
    inputs: NDArray[np.float32],
    targets: NDArray[np.float64],
    num_rows: Mapping[str, int],
    weight: float = 1.0,
) -> PackedManifest:
    splits, start = {}, 0
    for name, size in num_rows.items():
        rows = slice(start, start + size)
        (root / name).mkdir(parents=True)
        np.save(root / name / "inputs.npy", inputs[rows])
        ids = [files.sha256_bytes(str(row).encode())[:32] for row in range(start, start + size)]
        sources = [str(row) for row in range(start, start + size)]
        written = packed_rows(ids, sources, targets[rows])
        written = written.set_column(
            3, PACKED_ROWS.field("weight"), pa.array(np.full(size, weight))
        )
        splits[name] = packed.write_split(root / name, written, inputs.shape[1:])
        start += size
    train = targets[: num_rows["train"]]
    manifest = PackedManifest(
        format_version=3,
        task=task,
        input=contract,
        classes=CLASSES if kind_of(task).target.has_classes else [],
        mean=[],
        std=[],
        target_scale=None
        if kind_of(task).target.has_classes
        else TargetScale(mean=float(train.mean()), std=float(train.std())),
        splits=splits,
    )
    packed.write_manifest(root, manifest)
    return manifest
