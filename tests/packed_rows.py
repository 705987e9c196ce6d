"""Rows of a packed store for tests: weight 1 and not leaked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from slipway.data.packed import PackedSplit
from slipway.data.rows import PACKED_ROWS


def packed_rows(ids: Sequence[str], sources: Sequence[str], targets: ArrayLike) -> pa.Table:
    """`rows.PACKED_ROWS`."""
    columns = {"id": list(ids), "source": list(sources), "target": np.asarray(targets, dtype=np.float64)}
    return pa.table(columns | {"weight": np.ones(len(ids)), "leaked": np.zeros(len(ids), dtype=bool)}, schema=PACKED_ROWS)


def packed_split(inputs: Any, targets: ArrayLike, ids: Sequence[str], sources: Sequence[str]) -> PackedSplit:
    """A split in memory."""
    numbers = np.asarray(targets, dtype=np.float64)
    return PackedSplit(inputs, numbers, list(ids), list(sources), np.ones(len(ids)), np.zeros(len(ids), dtype=bool))
