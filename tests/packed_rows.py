"""Rows of a packed store for tests (weight 1, not leaked) and the split rows they come from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from slipway.data.engine.rows import PACKED_ROWS, SPLIT_ROWS, read_table, write_table
from slipway.data.store.packed import PackedSplit


def packed_rows(ids: Sequence[str], sources: Sequence[str], targets: ArrayLike) -> pa.Table:
    """`rows.PACKED_ROWS`."""
    columns = {
        "id": list(ids),
        "source": list(sources),
        "target": np.asarray(targets, dtype=np.float64),
    }
    return pa.table(
        columns | {"weight": np.ones(len(ids)), "leaked": np.zeros(len(ids), dtype=bool)},
        schema=PACKED_ROWS,
    )


def packed_split(
    inputs: Any, targets: ArrayLike, ids: Sequence[str], sources: Sequence[str]
) -> PackedSplit:
    """A split in memory."""
    numbers = np.asarray(targets, dtype=np.float64)
    return PackedSplit(
        inputs, numbers, list(ids), list(sources), np.ones(len(ids)), np.zeros(len(ids), dtype=bool)
    )


def write_split_rows(data: Path) -> None:
    """`data/split/rows.parquet` for the store in `data/packed`, without images, groups or flags."""
    rows = []
    for split in ("train", "val", "test"):
        packed = read_table(data / "packed" / split / "rows.parquet", PACKED_ROWS).to_pylist()
        facts = {"bytes": 1, "flags": [], "corrections": [], "split": split, "leaked": False}
        rows += [
            {"id": row["id"], "source": row["source"], "sha256": row["id"] * 2, **facts}
            for row in packed
        ]
    write_table(
        data / "split/rows.parquet", pa.Table.from_pylist(rows, schema=SPLIT_ROWS), SPLIT_ROWS
    )
