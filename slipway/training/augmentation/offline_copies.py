"""Offline copies: augmented training images stored on disk, which enlarge each epoch.

Only training rows are copied. They are not mixed, because training mixes images itself. A copy is
stored in the size of its source. It has its own id, so its order and online augmentation differ
from the original's.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.augmentation.draws import draw
from slipway.data.augmentation.plan import AugmentPlan
from slipway.data.engine.randomness import id_keys
from slipway.data.engine.rows import PACKED_ROWS
from slipway.data.store.packed import PackedSplit, PackedSplitManifest, write_labels, write_split
from slipway.system import files
from slipway.training.augmentation.host import StoredRows, changed_images

_ROWS_AT_A_TIME = 1024


def copy_id(sample_id: str, copy: int) -> str:
    """Return the id of copy number `copy` (from 1) of a row: 32 hexadecimal digits."""
    return hashlib.sha256(f"{sample_id}/{copy}".encode()).hexdigest()[:32]


def write_copies(
    train: PackedSplit, plan: AugmentPlan, num_copies: int, size_px: int, root: Path
) -> PackedSplitManifest:
    """Write `num_copies` augmented copies of each row of `train` into the new folder `root`.

    The first copies of all rows precede the second copies. `size_px` is the input size of the
    network, to which lengths in the plan refer.
    """
    root.mkdir()
    ids = [copy_id(sample_id, copy) for copy in range(1, num_copies + 1) for sample_id in train.ids]
    images = np.lib.format.open_memmap(
        root / "inputs.npy", mode="w+", dtype=np.uint8, shape=(len(ids), *train.inputs.shape[1:])
    )
    files.claim_space(root / "inputs.npy")
    stored = StoredRows([train.inputs])
    for copy in range(1, num_copies + 1):
        for rows in _slices(len(train)):
            begin = (copy - 1) * len(train) + rows.start
            part = slice(begin, begin + rows.stop - rows.start)
            images[part] = _augmented(
                stored, np.arange(rows.start, rows.stop), plan, size_px, copy, ids[part]
            )
    images.flush()
    targets = np.concatenate([train.targets] * num_copies)
    write_labels(root, targets)
    columns = {
        "id": ids,
        "source": train.sources * num_copies,
        "target": targets if targets.ndim == 1 else targets.sum(axis=1, dtype=np.float64),
        "weight": np.tile(train.weights, num_copies),
        "leaked": np.tile(train.leaked, num_copies),
    }
    return write_split(root, pa.table(columns, schema=PACKED_ROWS), images.shape[1:])


def original_rows(num_train: int, num_copied: int) -> NDArray[np.int64]:
    """Return the position of each copy's original row in the training split, (num_copied,)."""
    return np.arange(num_copied) % num_train


def _slices(total: int) -> Iterator[slice]:
    for begin in range(0, total, _ROWS_AT_A_TIME):
        yield slice(begin, min(total, begin + _ROWS_AT_A_TIME))


def _augmented(
    stored: StoredRows,
    rows: NDArray[np.int64],
    plan: AugmentPlan,
    size_px: int,
    copy: int,
    ids: list[str],
) -> NDArray[np.uint8]:
    # Training counts epochs from 0. Negative ones are free, so no change is drawn twice for a copy.
    change = draw(plan, -copy, id_keys(ids))
    if stored.shape[0] != size_px:
        change = change._replace(
            shift=change.shift + change.shift_px / size_px, shift_px=np.zeros_like(change.shift_px)
        )
    return changed_images(stored, rows, change, stored.shape[0])
