"""Tests of the selection of rows from several splits: order, size, and reading on access."""

import numpy as np
import pytest

from slipway.data.augmentation.draws import unchanged
from slipway.training.augmentation.host import StoredRows, changed_images
from slipway.training.batches.row_selection import select
from tests.data.pictures import pixels
from tests.packed_rows import packed_split


def images(start: int, num_rows: int, size_px: int = 8):  # type: ignore[no-untyped-def]
    inputs = np.stack([pixels(start + row, size_px) for row in range(num_rows)])
    names = [f"{start + row:032x}" for row in range(num_rows)]
    return packed_split(inputs, np.arange(start, start + num_rows), names, names)


TRAIN, VAL = images(0, 5), images(5, 3)
ROWS = np.array([6, 0, 4, 5, 7])
SHAPE = (8, 8, 3)


def test_selected_rows_are_numbered_across_splits_and_keep_the_requested_order() -> None:
    chosen = select([TRAIN, VAL], ROWS, SHAPE)
    assert chosen.targets.tolist() == ROWS.tolist()
    assert [int(name, 16) for name in chosen.ids] == ROWS.tolist()
    assert chosen.sources == chosen.ids
    assert len(chosen) == len(chosen.inputs) == 5
    assert chosen.inputs.shape == (5, *SHAPE)


@pytest.mark.parametrize(
    "asked", [3, slice(1, 4), slice(None), np.array([4, 0]), np.array([], np.int64)]
)
def test_selected_inputs_can_be_indexed_like_an_array(asked: object) -> None:
    expected = np.concatenate([TRAIN.inputs[:], VAL.inputs[:]])[ROWS]
    assert np.array_equal(select([TRAIN, VAL], ROWS, SHAPE).inputs[asked], expected[asked])


def test_row_selection_shrinks_larger_stored_images_as_training_does() -> None:
    large = images(0, 5, size_px=12)
    chosen = select([large, VAL], ROWS, SHAPE)
    shrunk = changed_images(StoredRows([large.inputs]), np.array([0, 4]), unchanged(2), 8)
    assert np.array_equal(chosen.inputs[1:3], shrunk)
    assert np.array_equal(chosen.inputs[2], shrunk[1])
    assert np.array_equal(chosen.inputs[0], VAL.inputs[1])


def test_rows_of_a_table_are_selected_like_images() -> None:
    names = [f"{row:032x}" for row in range(4)]
    table = packed_split(np.arange(12, dtype=np.float32).reshape(4, 3), np.zeros(4), names, names)
    chosen = select([table], np.array([2, 1]), (3,))
    assert chosen.inputs[:].tolist() == [[6, 7, 8], [3, 4, 5]]
    assert chosen.inputs.dtype == np.float32
