import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from slipway.data.sources import raw_tables, shards
from slipway.data.sources.formats import json_lines
from slipway.data.sources.raw_tables import RawColumn, read_raw_table
from slipway.data.sources.text_format import TextFormat
from slipway.system.errors import DataError
from tests.data.raw_files import write_csv


def cells(column: RawColumn) -> list[object]:
    return [None if code < 0 else column.values[int(code)].as_py() for code in column.codes]


def test_a_csv_is_read_as_distinct_cells_and_a_code_for_each_row(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", "a,b\n1, x \n2,y\n1,x\n"))
    assert cells(table.columns["a"]) == ["1", "2", "1"]
    assert cells(table.columns["b"]) == ["x", "y", "x"]
    assert len(table.columns["a"].values) == 2


def test_stripped_column_names_must_be_unique(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", " a , b b ,\ty\n1, 2,3\n"))
    assert (
        list(table.columns)
        == [column.name for column in table.columns.values()]
        == ["a", "b b", "y"]
    )
    assert cells(table.columns["b b"]) == ["2"]
    with pytest.raises(DataError, match="'a' 2 times"):
        read_raw_table(write_csv(tmp_path / "t.csv", "a, a\n1,2\n"))


def test_csv_rows_of_a_wrong_length_are_reported_and_the_others_are_read(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", 'a,b\n"1\n1",2\n3\n\n4,5\n6,7,8\n9,10\n'))
    assert table.malformed == [
        (1, "1 cells, the header names 2"),
        (3, "3 cells, the header names 2"),
    ]
    assert table.numbers.tolist() == [0, 2, 4]
    assert cells(table.columns["b"]) == ["2", "5", "10"]
    assert table.num_read == 5


def test_a_byte_order_mark_and_a_missing_final_newline_are_ignored(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", b"\xef\xbb\xbfa,b\n1,2"))
    assert list(table.columns) == ["a", "b"]
    assert cells(table.columns["b"]) == ["2"]


def test_bytes_that_are_not_utf8_affect_only_their_cell(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", b"a,b\n1,\xff\n2,x\n"))
    assert cells(table.columns["b"]) == ["\ufffd", "x"]


def test_a_malformed_row_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", b"a,b\n1,\xff,3\n2,x\n"))
    assert table.malformed == [(0, "3 cells, the header names 2")]
    assert table.numbers.tolist() == [1]


def test_a_row_longer_than_a_block_is_read(tmp_path: Path) -> None:
    long = "x" * 9_000_000
    table = read_raw_table(write_csv(tmp_path / "t.csv", f"a,b\n1,2\n{long},3\n4,5\n"))
    assert cells(table.columns["a"]) == ["1", long, "4"]


def test_an_unclosed_quote_in_a_csv_is_an_error_and_hides_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not closed"):
        read_raw_table(write_csv(tmp_path / "t.csv", 'a,b\n1,"2\n3,4\n5,6\n'))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a,a\n1,2\n", "'a' 2 times"),
        (b"\xff,b\n1,2\n", "header that is not UTF-8"),
    ],
)
def test_a_file_that_is_not_a_csv_is_a_data_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_raw_table(write_csv(tmp_path / "t.csv", content))


def test_a_table_that_is_not_parquet_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_raw_table(write_csv(tmp_path / "t.parquet", b"PAR1 nonsense PAR1"))


def test_parquet_types_become_text_numbers_and_booleans(tmp_path: Path) -> None:
    moment = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
    columns = {
        "int": pa.array([1, None], pa.int32()),
        "float": pa.array([1.5, None], pa.float32()),
        "decimal": pa.array([Decimal("2.5"), None]),
        "bool": pa.array([True, None]),
        "text": pa.array(["x", None]),
        "dictionary": pa.array(["x", None]).dictionary_encode(),
        "date": pa.array([date(2026, 11, 20), None]),
        "naive": pa.array([moment.replace(tzinfo=None), None], pa.timestamp("ns")),
        "zoned": pa.array([moment, None], pa.timestamp("ms", "Europe/Berlin")),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = {
        name: cells(column)[0]
        for name, column in read_raw_table(tmp_path / "t.parquet").columns.items()
    }
    times = {name: datetime.fromisoformat(str(found.pop(name))) for name in ("naive", "zoned")}
    assert times["naive"] == moment.replace(tzinfo=None)
    assert times["zoned"].replace(tzinfo=UTC) == moment
    expected = {
        "int": 1.0,
        "float": 1.5,
        "decimal": 2.5,
        "bool": True,
        "text": "x",
        "dictionary": "x",
        "date": "2026-11-20",
    }
    assert found == expected
    assert all(
        cells(column)[1] is None
        for column in read_raw_table(tmp_path / "t.parquet").columns.values()
    )


def test_a_parquet_type_without_a_kind_is_stored_as_other(tmp_path: Path) -> None:
    pq.write_table(pa.table({"list": [[1], [2]]}), tmp_path / "t.parquet")
    column = read_raw_table(tmp_path / "t.parquet").columns["list"]
    assert column.stored == "other"
    assert np.array_equal(column.codes, [-1, -1])


def test_error_for_a_file_that_is_not_parquet_has_single_full_stops(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing that is Parquet")
    with pytest.raises(DataError, match="is not a readable Parquet file") as refused:
        read_raw_table(path)
    assert ".." not in str(refused.value).replace(str(path), "")


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_column_stored_in_scratch_files_is_read_like_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where its scratch files are
    texts = [f" {row % 2000} " + "long text " * 200 for row in range(3000)]
    labels = ["ab"[row % 2] for row in range(3000)]
    tables = []
    for count in (30, 3000):
        path = tmp_path / f"{count}.{ending}"
        table = pa.table({"text": texts[:count], "label": labels[:count]})
        if ending == "parquet":
            pq.write_table(table, path)
        elif ending == "csv":
            pyarrow.csv.write_csv(table, path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        tables.append(read_raw_table(path))
    few, many = (table.columns["text"] for table in tables)
    assert len(many.values) == 2000
    assert (many.stored, many.arrow_type) == (few.stored, few.arrow_type)
    assert cells(many) == [text.strip() for text in texts]
    assert cells(few) == cells(many)[:30]
    assert cells(tables[1].columns["label"]) == labels


@pytest.mark.parametrize("in_lists", [False, True])
def test_json_lines_read_in_several_blocks_equal_those_read_in_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_lists: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    both: dict[str, list[object]] = {
        "numbers": [1, 2, 3, 4.5],
        "large": [2**53 + 1, 2, 3, 4.5],
        "larger": [2**70, 2, 3, 4],
        "mixed": [1, 2, "a", True],
        "empty": [None, None, None, None],
        "late": [None, None, " b ", "b"],
        "flags": [True, False, None, None],
        "lists": [["a"], ["b", "c"], "d", None],
        "more": [[1], [], [2.5], None],
        "objects": [{"a": 1}, {}, {"b": 2}, None],
    }
    lines = [
        json.dumps(dict(zip(both, cells, strict=True)))
        for cells in zip(*both.values(), strict=True)
    ]
    lines.insert(1, "[no object]")
    (tmp_path / "t.jsonl").write_text("\n\n".join(lines))
    written = TextFormat(list_columns=None if in_lists else frozenset())
    whole = read_raw_table(tmp_path / "t.jsonl", written=written)
    monkeypatch.setattr(json_lines, "_BLOCK_LINES", 2)
    parts = read_raw_table(tmp_path / "t.jsonl", written=written)
    assert list(parts.columns) == list(whole.columns) == [*both]
    for name, column in whole.columns.items():
        other = parts.columns[name]
        assert (other.stored, other.arrow_type) == (column.stored, column.arrow_type), name
        assert cells(other) == cells(column), name
    assert (
        parts.malformed == whole.malformed == [(1, "the line is not a JSON object of UTF-8 text")]
    )
    assert parts.numbers.tolist() == whole.numbers.tolist() == [0, 2, 3, 4]
    assert cells(parts.columns["large"])[:2] == ["9007199254740993", "2"]
    assert read_raw_table(tmp_path / "t.jsonl", ["late"]).columns.keys() == {"late"}


def test_a_parquet_file_of_many_row_groups_gives_the_same_columns_as_one_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [None if row % 7 == 0 else f" word {row % 50} " for row in range(400)]
    table = pa.table(
        {
            "large": pa.array(words, pa.large_string()),
            "view": pa.array(words, pa.string_view()),
            "coded": pa.array(words).dictionary_encode(),
            "number": range(400),
            "lists": [["a"] * (row % 3) for row in range(400)],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=30)
    written = TextFormat(list_columns=frozenset(["lists"]))
    small = read_raw_table(tmp_path / "t.parquet", written=written)
    for module in (raw_tables, shards):
        monkeypatch.setattr(module, "_BLOCK_BYTES", 500)
    large = read_raw_table(tmp_path / "t.parquet", written=written)
    for name, column in small.columns.items():
        assert cells(large.columns[name]) == cells(column), name
        assert large.columns[name].stored == column.stored
    assert cells(large.columns["view"])[:2] == [None, "word 1"]
    assert cells(large.columns["lists"])[:2] == ["[]", '["a"]']


def test_invalid_text_in_a_later_row_group_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "_BLOCK_BYTES", 500)
    texts = pa.array([b"good text"] * 200 + [b"bad \xff"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet", row_group_size=50)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_raw_table(tmp_path / "t.parquet")
