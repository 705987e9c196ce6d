"""Offline copies: augmented training images written to disk, for data whose epochs should be larger.

Only training rows are copied. A copy keeps its source and gets an id of its own, so that online augmentation and
order draw other numbers for it than for the original.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from slipway.data.augmentation import AugmentPlan, matrices
from slipway.data.packed import PackedSplit, PackedSplitManifest, write_split
from slipway.data.randomness import id_keys
from slipway.data.rows import PACKED_ROWS
from slipway.training.augmentation import augment_batch

_ROWS_AT_A_TIME = 1024


def copy_id(sample_id: str, copy: int) -> str:
    """The id of the copy number `copy` (from 1) of a sample: 32 hex digits."""
    return hashlib.sha256(f"{sample_id}/{copy}".encode()).hexdigest()[:32]


def write_copies(train: PackedSplit, plan: AugmentPlan, num_copies: int, root: Path) -> PackedSplitManifest:
    """Write `num_copies` augmented copies of each row of `train` into the new folder `root`, first all first copies."""
    root.mkdir()
    ids = [copy_id(sample_id, copy) for copy in range(1, num_copies + 1) for sample_id in train.ids]
    images = np.lib.format.open_memmap(root / "inputs.npy", mode="w+", dtype=np.uint8, shape=(len(ids), *train.inputs.shape[1:]))
    for copy in range(1, num_copies + 1):
        for rows in _slices(len(train)):
            begin = (copy - 1) * len(train) + rows.start
            part = slice(begin, begin + rows.stop - rows.start)
            images[part] = _augmented(train.inputs[rows], plan, copy, ids[part])
    images.flush()
    columns = {
        "id": ids,
        "source": train.sources * num_copies,
        "target": np.tile(train.targets, num_copies),
        "weight": np.tile(train.weights, num_copies),
        "leaked": np.tile(train.leaked, num_copies),
    }
    return write_split(root, pa.table(columns, schema=PACKED_ROWS), images.shape[1:])


def _slices(total: int) -> Iterator[slice]:
    for begin in range(0, total, _ROWS_AT_A_TIME):
        yield slice(begin, min(total, begin + _ROWS_AT_A_TIME))


def _augmented(images: NDArray[np.uint8], plan: AugmentPlan, copy: int, ids: list[str]) -> NDArray[np.uint8]:
    # Training counts epochs from 0: the negative ones are free, so a copy never gets the same change twice.
    changes = matrices(plan, -copy, id_keys(ids), images.shape[1])
    copies: NDArray[np.uint8] = augment_batch(torch.from_numpy(np.array(images)), torch.from_numpy(changes)).numpy()
    return copies
