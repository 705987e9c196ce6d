"""Tables in files without names: what goes in comes back, in any order, and little of it stays in memory."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.engine import scratch_tables
from slipway.data.engine.scratch_tables import (
    first_bytes,
    gathered,
    numbers,
    scratch_array,
    stored,
    stored_array,
)

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


def test_batches_come_back_as_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = stored(iter(batches(40_000)), SCHEMA)
    assert table.equals(pa.Table.from_batches(batches(40_000)))
    assert table["name"].num_chunks == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "the file has no name"
    assert stored(iter([]), SCHEMA).equals(SCHEMA.empty_table())


def test_rows_with_large_cells_are_written_before_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scratch_tables, "_BATCH_BYTES", 100_000)
    rows = [{"name": chr(97 + row) * 40_000} for row in range(10)]
    schema = pa.schema([("name", pa.string())])
    table = stored((pa.RecordBatch.from_pylist([row], schema) for row in rows), schema)
    assert table.to_pylist() == rows
    assert table["name"].num_chunks == 4  # of three rows, three, three and one


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see what is open")
def test_however_many_arrays_there_are_no_file_stays_open_and_each_goes_with_its_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def num_open() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(list(Path("/proc/self/fd").iterdir())), sum(
            str(tmp_path) in line for line in maps
        )

    files, _ = num_open()
    arrays = [scratch_array((1 << 17,), np.int64) for _ in range(30)]
    tables = [stored_array(pa.array(np.arange(1 << 17) + number)) for number in range(30)]
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
def test_rows_are_gathered_in_the_order_that_is_asked_for(
    rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = stored(batches(40_000), SCHEMA)
    assert gathered(table, np.array(rows, np.int64))["name"].to_pylist() == [
        f"row {row}" for row in rows
    ]


def test_columns_of_bytes_and_numbers_become_arrays() -> None:
    table = pa.Table.from_batches([batch(0, 10).slice(4), batch(0, 10).slice(0, 3)])
    assert first_bytes(table["digest"], 4)[:, 3].tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert first_bytes(table["digest"], 2).shape == (9, 2)
    assert numbers(table["number"]).tolist() == [4, 5, 0, 7, 8, 0, 0, 1, 2]


MEMORY = """
import sys
import numpy as np
from pathlib import Path
from slipway.data.engine.scratch_tables import scratch_array, stored
from tests.data.engine.test_scratch_tables import SCHEMA, batch
import pyarrow as pa
def held():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
def made(count):
    one = batch(0, 5000)
    return (one for _ in range(count // 5000))
stored(made(100_000), SCHEMA)
before = held()
if sys.argv[1] == "file":
    table = stored(made(2_000_000), SCHEMA)
    array = scratch_array((2_000_000, 4), np.uint64)
    array[:] = 1
else:
    table = pa.Table.from_batches(list(made(2_000_000))).combine_chunks()
print((held() - before) / 2_000_000)
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see memory")
def test_what_is_stored_holds_next_to_no_memory(tmp_path: Path, root: Path) -> None:
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
