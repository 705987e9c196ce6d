"""Tests of scratch files: content, order, sorting as in NumPy, and little memory."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from slipway.data.engine import scratch
from slipway.data.engine.scratch import (
    ScratchSet,
    ScratchTable,
    distinct_texts,
    each_true,
    first_bytes,
    key_slices,
    numbers_of,
    order_by,
    scratch_array,
    scratch_file,
    store_array,
    store_bytes,
    store_table,
    take,
    take_rows,
    true_rows,
)


@pytest.fixture(autouse=True)
def _scratch_files_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SCHEMA = pa.schema(
    [
        ("number", pa.int32()),
        ("name", pa.string()),
        ("digest", pa.binary(4)),
        ("flags", pa.list_(pa.string())),
    ]
)


def batch(begin: int, end: int) -> pa.RecordBatch:
    rows = range(begin, end)
    columns = [
        [row if row % 3 else None for row in rows],
        [f"row {row}" for row in rows],
        [row.to_bytes(4) for row in rows],
    ]
    return pa.RecordBatch.from_arrays(
        [
            pa.array(column, field.type)
            for column, field in zip(
                [*columns, [["a"] * (row % 3) for row in rows]], SCHEMA, strict=True
            )
        ],
        schema=SCHEMA,
    )


def batches(count: int) -> list[pa.RecordBatch]:
    return [batch(begin, min(begin + 700, count)) for begin in range(0, count, 700)]


def test_store_table_returns_the_batches_as_one_table_without_leaving_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = store_table(iter(batches(40_000)), SCHEMA)
    assert table.equals(pa.Table.from_batches(batches(40_000)))
    assert table["name"].num_chunks == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "the file has no name"
    assert store_table(iter([]), SCHEMA).equals(SCHEMA.empty_table())


def test_store_table_splits_batches_of_large_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_BATCH_BYTES", 100_000)
    rows = [{"name": chr(97 + row) * 40_000} for row in range(10)]
    schema = pa.schema([("name", pa.string())])
    table = store_table((pa.RecordBatch.from_pylist([row], schema) for row in rows), schema)
    assert table.to_pylist() == rows
    assert table["name"].num_chunks == 4  # of three rows, three, three and one


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see what is open")
def test_scratch_arrays_hold_no_file_descriptor_and_unmap_with_their_last_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_open() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(list(Path("/proc/self/fd").iterdir())), sum(
            str(tmp_path) in line for line in maps
        )

    files, _ = num_open()
    arrays = [scratch_array((1 << 17,), np.int64) for _ in range(30)]
    tables = [store_array(pa.array(np.arange(1 << 17) + number)) for number in range(30)]
    for number, array in enumerate(arrays):
        array[:] = number
    views = [array[5:7] for array in arrays]
    del array, arrays
    assert num_open()[0] == files
    assert num_open()[1] > 0
    assert [view.tolist() for view in views] == [[number, number] for number in range(30)], (
        "a view keeps the whole"
    )
    assert [table[7].as_py() for table in tables] == list(range(7, 37))
    del views, tables
    assert num_open() == (files, 0)


@pytest.mark.parametrize(
    "rows",
    [[5, 39_999, 0, 33_000, 5], [], list(range(39_999, -1, -1))],
    ids=["some", "none", "all"],
)
def test_take_rows_returns_the_rows_in_the_requested_order(
    rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = store_table(batches(40_000), SCHEMA)
    assert take_rows(table, np.array(rows, np.int64))["name"].to_pylist() == [
        f"row {row}" for row in rows
    ]


def test_first_bytes_reads_sliced_chunks_of_a_binary_column() -> None:
    table = pa.Table.from_batches([batch(0, 10).slice(4), batch(0, 10).slice(0, 3)])
    assert first_bytes(table["digest"], 4)[:, 3].tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert first_bytes(table["digest"], 2).shape == (9, 2)


COUNT = 200_000  # of rows, in several chunks


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
def test_order_by_sorts_like_numpy_with_ties_by_row(kind: str) -> None:
    keys, more = keys_of(kind), keys_of("lower halves")[::-1].copy()
    assert np.array_equal(order_by(keys), np.argsort(keys, kind="stable"))
    assert np.array_equal(order_by(keys, more), np.lexsort([more, keys]))
    assert len(order_by(keys[:0])) == 0


@pytest.mark.parametrize("kind", ["few", "one", "lower halves"])
def test_key_slices_never_end_between_equal_keys(kind: str) -> None:
    keys = np.sort(keys_of(kind))
    slices = list(key_slices(COUNT, lambda part: keys[part]))
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == COUNT
    assert all(keys[part.stop - 1] != keys[part.stop] for part in slices[:-1])


def test_take_returns_the_requested_rows_of_a_wide_array() -> None:
    keys = keys_of("any").reshape(-1, 2)
    rows = np.flatnonzero(keys[:, 0] % np.uint64(3) == 0)
    assert np.array_equal(take(keys, rows), keys[rows])


@pytest.mark.parametrize("kind", ["any", "few", "one", "lower halves"])
def test_scratch_set_returns_each_number_once_in_ascending_order(kind: str) -> None:
    numbers = keys_of(kind)
    with scratch_file() as file:
        found = ScratchSet(file)
        for piece in np.array_split(numbers, 7):
            found.add(piece)
        assert np.array_equal(found.ascending(), np.unique(numbers))
    with scratch_file() as file:
        assert len(ScratchSet(file).ascending()) == 0


def test_distinct_texts_equal_those_of_arrow_in_order_of_appearance() -> None:
    random = np.random.default_rng(1)
    cells: list[str | None] = [f"text {n} \u00e9" for n in random.integers(0, 500, 2000)]
    cells[3:9:2] = ["", None, ""]
    chunks = [pa.array(cells[:1200], pa.string()), pa.array(cells[1200:], pa.string())]
    values, codes = distinct_texts([chunks[0].slice(0, 700), chunks[0].slice(700), chunks[1]])
    expected = pa.array(cells, pa.string()).dictionary_encode()
    values.validate(full=True)
    assert values.equals(expected.dictionary)
    assert codes.tolist() == expected.indices.fill_null(-1).to_pylist()
    none, no_codes = distinct_texts([])
    assert (len(none), len(no_codes)) == (0, 0)


@pytest.mark.parametrize("count", [3, 3 << 10])
def test_a_scratch_file_holds_its_blocks_one_after_the_other(count: int) -> None:
    blocks = [bytes([index % 256]) * 1000 for index in range(count)]
    assert store_bytes(blocks).to_pybytes() == b"".join(blocks)


@pytest.mark.parametrize("count", [0, 5, 9000])
def test_a_scratch_table_can_be_read_while_rows_are_added(count: int) -> None:
    growing = ScratchTable(pa.schema([("row", pa.int64()), ("text", pa.string())]))
    for row in range(count):
        growing.add(row, f"{row}")
    assert growing.table()["text"].to_pylist() == [f"{row}" for row in range(count)]
    growing.add(-1, "last")
    found = growing.table()
    assert found.num_rows == count + 1
    assert found["row"][-1].as_py() == -1


MEMORY = """
import sys
import numpy as np
from pathlib import Path
from slipway.data.engine.scratch import scratch_array, store_table
from tests.data.engine.test_scratch import SCHEMA, batch
import pyarrow as pa
def held():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
def made(count):
    one = batch(0, 5000)
    return (one for _ in range(count // 5000))
store_table(made(100_000), SCHEMA)
before = held()
if sys.argv[1] == "file":
    table = store_table(made(2_000_000), SCHEMA)
    array = scratch_array((2_000_000, 4), np.uint64)
    array[:] = 1
else:
    table = pa.Table.from_batches(list(made(2_000_000))).combine_chunks()
print((held() - before) / 2_000_000)
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see memory")
def test_stored_tables_and_scratch_arrays_hold_hardly_any_memory(
    tmp_path: Path, root: Path
) -> None:
    def bytes_a_row(kind: str) -> float:
        command = [sys.executable, "-c", MEMORY, kind]
        return float(
            subprocess.run(
                command,
                cwd=tmp_path,
                env={"PYTHONPATH": str(root)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )

    assert bytes_a_row("file") < 4
    assert bytes_a_row("memory") > 20, "the twin"


def test_true_rows_over_several_slices_equal_numpys_flatnonzero() -> None:
    flags = np.random.default_rng(3).random(150_000) < 0.3
    rows = np.flatnonzero(flags)
    assert np.array_equal(true_rows(flags), rows)
    assert list(each_true(flags)) == rows.tolist()
    column = pa.chunked_array([pa.array(flags[:70_000]), pa.array(flags[70_000:])])
    assert np.array_equal(numbers_of(column, np.bool_), flags)
    assert len(true_rows(flags[:0])) == 0
