"""The rows of the training data in a bundle, with which explanations compare."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.store.packed import PackedSplit, open_split, read_manifest
from slipway.export.background import background_note, decoded_rows, with_background
from slipway.inputs.columns import ColumnContract, encode, encode_rows, read_row
from tests.packed_tables import fit_contract, write_packed_table

pytestmark = pytest.mark.unit


@pytest.fixture
def train(tmp_path: Path) -> tuple[ColumnContract, PackedSplit]:
    write_packed_table(tmp_path, "table_classification", {"train": 300, "val": 50})
    manifest = read_manifest(tmp_path)
    assert isinstance(manifest.input, ColumnContract)
    return manifest.input, open_split(tmp_path, manifest, "train", verify=True)


def test_every_training_row_is_decoded_to_one_that_is_encoded_equally(
    train: tuple[ColumnContract, PackedSplit],
) -> None:
    contract, split = train
    inputs = np.array(split.inputs[:], np.float32)
    rows = [read_row(row, contract) for row in decoded_rows(inputs, contract)]
    assert np.array_equal(encode_rows(rows, contract), inputs)


@pytest.mark.parametrize(
    "cells",
    [
        [0, 0, 0, 1, 2],
        [7.8958, 512.3292, 0, 26],
        [0.001, 0.25, -3.5],
        [1234567.25, 2000000, 5],
        [1e-20, 3e-20, 0],
        [3.5e12, -1e12, 7e11],
    ],
)
def test_numbers_of_training_rows_are_shown_as_they_were_written(cells: list[float]) -> None:
    contract = fit_contract({"n": cells})
    inputs = encode({"n": cells}, contract)
    assert decoded_rows(inputs, contract) == [{"n": cell} for cell in cells]


def answer(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    first = 1 / (1 + np.exp(-inputs[:, :2].sum(axis=1)))
    return np.stack([first, 1 - first], axis=1)


def test_background_rows_are_training_rows_whose_mean_answer_is_that_of_all_rows(
    train: tuple[ColumnContract, PackedSplit],
) -> None:
    contract, split = train
    rows = with_background(contract, split, 20, 7, answer).background
    encoded = encode_rows([read_row(row, contract) for row in rows], contract)
    inputs = np.array(split.inputs[:], np.float32)
    found = [int(np.flatnonzero((inputs == row).all(axis=1))[0]) for row in encoded]
    assert len(set(found)) == 20
    assert answer(encoded)[:, 0].mean() == pytest.approx(answer(inputs)[:, 0].mean(), abs=0.01)
    assert with_background(contract, split, 20, 7, answer).background == rows


def test_the_first_background_row_is_the_one_most_like_the_others(
    train: tuple[ColumnContract, PackedSplit],
) -> None:
    contract, split = train
    rows = with_background(contract, split, 40, 7, answer).background
    encoded = encode_rows([read_row(row, contract) for row in rows], contract)
    distances = np.abs(encoded - encoded[:, np.newaxis]).clip(max=1).sum(axis=(1, 2))
    assert distances.argmin() == 0


def test_no_row_of_the_training_data_is_kept_if_none_is_wanted(
    train: tuple[ColumnContract, PackedSplit],
) -> None:
    contract, split = train
    without = with_background(contract, split, 0, 7, answer)
    assert without == contract
    assert background_note(without) == ""
    note = background_note(with_background(contract, split, 3, 7, answer))
    assert note.startswith("holds     3 rows of")
