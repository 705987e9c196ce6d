"""Choosing and sorting rows in files gives what NumPy gives in memory, wherever a chunk ends."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.engine.scratch_arrays import ScratchSet, order_of, rows_where, taken, uncut
from slipway.data.engine.scratch_tables import scratch_file

COUNT = 200_000  # of rows, in several chunks


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keys_of(kind: str) -> NDArray[np.uint64]:
    random = np.random.default_rng(0)
    if kind == "few":
        return random.integers(0, 5, COUNT, dtype=np.uint64) << np.uint64(40)
    if kind == "one":
        return np.full(COUNT, 7, np.uint64)
    if kind == "lower halves":
        return random.integers(0, 1000, COUNT, dtype=np.uint64)
    return random.integers(0, 1 << 64, COUNT, dtype=np.uint64)


@pytest.mark.parametrize("kind", ["any", "few", "one", "lower halves"])
def test_rows_are_ordered_by_key_and_number(kind: str) -> None:
    keys, more = keys_of(kind), keys_of("lower halves")[::-1].copy()
    assert np.array_equal(order_of(keys), np.argsort(keys, kind="stable"))
    assert np.array_equal(order_of(keys, more), np.lexsort([more, keys]))
    assert len(order_of(keys[:0])) == 0


@pytest.mark.parametrize("kind", ["few", "one", "lower halves"])
def test_no_slice_ends_between_equal_keys(kind: str) -> None:
    keys = np.sort(keys_of(kind))
    slices = list(uncut(COUNT, lambda part: keys[part]))
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == COUNT
    assert all(keys[part.stop - 1] != keys[part.stop] for part in slices[:-1])


def test_rows_are_chosen_and_taken() -> None:
    keys = keys_of("any").reshape(-1, 2)
    rows = rows_where(keys[:, 0] % np.uint64(3) == 0)
    assert np.array_equal(rows, np.flatnonzero(keys[:, 0] % np.uint64(3) == 0))
    assert np.array_equal(taken(keys, rows), keys[rows])


@pytest.mark.parametrize("kind", ["any", "few", "one", "lower halves"])
def test_a_set_has_each_number_once(kind: str) -> None:
    numbers = keys_of(kind)
    with scratch_file() as file:
        found = ScratchSet(file)
        for piece in np.array_split(numbers, 7):
            found.add(piece)
        assert np.array_equal(found.rising(), np.unique(numbers))
    with scratch_file() as file:
        assert len(ScratchSet(file).rising()) == 0
