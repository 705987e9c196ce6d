"""Presents selected rows of several splits as one split, with images in the network's size.

Rows are copied only when they are read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.augmentation.draws import unchanged
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.training.augmentation.host import StoredRows, changed_images


class _SelectedInputs:
    """Selected rows (M, ...) of several `Inputs`, presented as one `Inputs`."""

    def __init__(self, inputs: Sequence[Inputs], rows: NDArray[np.int64]) -> None:
        self._stored, self._rows = StoredRows(inputs), rows
        self.shape, self.dtype = (len(rows), *inputs[0].shape[1:]), inputs[0].dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        selected = self._rows[rows]
        return self._stored[int(selected)] if selected.ndim == 0 else self._stored.gather(selected)


class _ShrunkInputs:
    """Stored images shrunk to (N, size_px, size_px, C) uint8 when read, presented as `Inputs`."""

    def __init__(self, inputs: Inputs, size_px: int) -> None:
        self._stored, self._size_px = StoredRows([inputs]), size_px
        self.shape, self.dtype = (len(inputs), size_px, size_px, inputs.shape[3]), inputs.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[np.uint8]:
        numbers = np.arange(len(self))[rows]
        images = changed_images(
            self._stored, numbers.reshape(-1), unchanged(numbers.size), self._size_px
        )
        return images.reshape(*numbers.shape, *self.shape[1:])


def select(
    splits: Sequence[PackedSplit], rows: NDArray[np.int64], row_shape: tuple[int, ...]
) -> PackedSplit:
    """Return the selected rows as one split; `rows` (M,) are positions in the joined `splits`.

    `row_shape` is the input shape of the network. Training images are stored larger to allow crops,
    so they are shrunk to it.
    """
    inputs = [
        split.inputs
        if tuple(split.inputs.shape[1:]) == row_shape
        else _ShrunkInputs(split.inputs, row_shape[0])
        for split in splits
    ]
    ids, sources = (
        [value for split in splits for value in getattr(split, name)] for name in ("ids", "sources")
    )
    targets, weights, leaked = (
        np.concatenate([getattr(split, name) for split in splits])[rows]
        for name in ("targets", "weights", "leaked")
    )
    features = [split.features for split in splits if split.features is not None]
    return PackedSplit(
        _SelectedInputs(inputs, rows),
        targets,
        [ids[row] for row in rows],
        [sources[row] for row in rows],
        weights,
        leaked,
        _SelectedInputs(features, rows) if features else None,
    )
