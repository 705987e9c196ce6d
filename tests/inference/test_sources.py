import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.text_format import TextFormat
from slipway.inference.sources import (
    FileSource,
    ImageFiles,
    Piece,
    TableFile,
    TextFile,
    TextFiles,
    text_source,
)
from slipway.inputs.texts import TextContract, decode_row
from slipway.system.errors import DataError
from tests.serving.bundles import COLUMNS, CONTRACT, picture, table_row
from tests.tokens import token_contract

UTF8 = TextFormat()


def used(pieces: Iterator[Piece]) -> Iterator[tuple[list[int], dict[int, tuple[str, str]]]]:
    """The positions with inputs and the faults of each piece."""
    for piece in pieces:
        positions = [position for part, inputs in piece.batches for position in part]
        yield positions, dict(piece.faults)


def frame(num_rows: int) -> pa.Table:
    schema = pa.table({name: [value] for name, value in table_row(1).items()}).schema
    return pa.Table.from_pylist([table_row(number) for number in range(num_rows)], schema)


def write_csv(path: Path, table: pa.Table, **changes: str) -> Path:
    lines = [",".join(table.column_names)]
    lines += [",".join("" if v is None else str(v) for v in r.values()) for r in table.to_pylist()]
    path.write_text("\n".join(lines) + "\n", **changes)
    return path


def write_parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path, row_group_size=7)
    return path


def write_jsonl(path: Path, table: pa.Table) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    return path


def write_shards(path: Path, table: pa.Table) -> Path:
    path = path.with_suffix("")
    path.mkdir()
    for number, begin in enumerate(range(0, table.num_rows, 11)):
        pq.write_table(table.slice(begin, 11), path / f"part-{number:03d}.parquet")
    return path


def write_xlsx(path: Path, table: pa.Table) -> Path:
    book = openpyxl.Workbook()
    book.active.append(table.column_names)
    for row in table.to_pylist():
        book.active.append([*row.values()])
    book.save(path)
    return path


def write_csv_shards(path: Path, table: pa.Table) -> Path:
    path = path.with_suffix("")
    path.mkdir()
    for number, begin in enumerate(range(0, table.num_rows, 11)):
        write_csv(path / f"part-{number:03d}.csv", table.slice(begin, 11))
    return path


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_csv, "t.csv"),
        (write_parquet, "t.parquet"),
        (write_jsonl, "t.jsonl"),
        (write_shards, "t.parquet"),
        (write_csv_shards, "t.csv"),
        (write_xlsx, "t.xlsx"),
    ],
)
def test_each_format_of_a_table_gives_the_same_inputs_in_pieces(
    tmp_path: Path, write: Callable[[Path, pa.Table], Path], name: str
) -> None:
    table = frame(50)
    source: FileSource = TableFile(COLUMNS, write(tmp_path / name, table), UTF8)
    pieces = list(source.pieces(0, 20, 8))
    assert [piece.carried.num_rows for piece in pieces] == [20, 20, 10]
    inputs = [inputs for piece in pieces for _, inputs in piece.batches]
    assert [len(batch) for batch in inputs] == [8, 8, 4, 8, 8, 4, 8, 2]
    expected = TableFile(COLUMNS, write_parquet(tmp_path / "e.parquet", table), UTF8)
    reference = [batch for piece in expected.pieces(0, 50, 50) for _, batch in piece.batches]
    assert (np.concatenate(inputs) == reference[0]).all()
    rest = list(source.pieces(40, 20, 8))
    assert [piece.carried.to_pylist() for piece in rest] == [pieces[2].carried.to_pylist()]


def test_a_workbook_is_read_at_the_sheet_of_the_training_data_or_else_at_its_first(
    tmp_path: Path,
) -> None:
    path = write_xlsx(tmp_path / "t.xlsx", frame(3))
    book = openpyxl.load_workbook(path)
    rows = [*book.active.values]
    other = book.create_sheet("Data")
    for row in rows[:2]:
        other.append(row)
    book.save(path)
    for sheet, num_rows in (("Data", 1), ("Elsewhere", 3), (None, 3)):
        source = TableFile(COLUMNS, path, TextFormat(sheet=sheet))
        assert source.num_rows == num_rows


def test_a_workbook_without_a_column_of_the_model_is_refused_by_its_own_name(
    tmp_path: Path,
) -> None:
    path = write_xlsx(tmp_path / "t.xlsx", pa.table({"other": [1]}))
    with pytest.raises(DataError, match="has no column"):
        TableFile(COLUMNS, path, UTF8)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"t\.xlsx"):
        TableFile(COLUMNS, path, UTF8)


def test_malformed_rows_of_a_csv_keep_their_place(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", frame(12))
    lines = path.read_text().splitlines()
    for number in (0, 5, 6, 11):
        lines[1 + number] = "1,2"
    path.write_text("# a comment\n" + "\n".join([*lines[:4], "", *lines[4:]]))
    source = TableFile(COLUMNS, path, UTF8)
    found = list(used(source.pieces(0, 4, 4)))
    assert [positions for positions, _ in found] == [[1, 2, 3], [0, 3], [0, 1, 2]]
    faults = [
        (4 * number + position, *fault)
        for number, (_, faults) in enumerate(found)
        for position, fault in faults.items()
    ]
    assert [fault[:2] for fault in faults] == [(n, "malformed_row") for n in (0, 5, 6, 11)]
    assert faults[0][2] == "2 cells, the header names 6"


def test_malformed_rows_keep_their_place_in_a_folder_of_csv_files(tmp_path: Path) -> None:
    folder = write_csv_shards(tmp_path / "t.csv", frame(22))
    for number, bad in enumerate([(2, 10), (0, 10)]):
        path = folder / f"part-00{number}.csv"
        lines = path.read_text().splitlines()
        for row in bad:
            lines[1 + row] = "1,2"
        path.write_text("\n".join(lines))
    source = TableFile(COLUMNS, folder, UTF8)
    pieces = list(source.pieces(0, 8, 8))
    found = [8 * number + place for number, piece in enumerate(pieces) for place in piece.faults]
    assert sorted(found) == [2, 10, 11, 21]
    assert [piece.carried.num_rows for piece in pieces] == [8, 8, 6]


def test_shards_whose_types_differ_are_predicted_as_one_table(tmp_path: Path) -> None:
    table = frame(22)
    folder = tmp_path / "shards"
    folder.mkdir()
    name = next(column.name for column in COLUMNS.columns if column.kind == "category")
    place = table.schema.get_field_index(name)
    other = table.slice(11).set_column(place, name, table[name].slice(11).dictionary_encode())
    write_parquet(folder / "a.parquet", table.slice(0, 11))
    write_parquet(folder / "b.parquet", other)
    write_parquet(folder / "c.parquet", pa.table({n: pa.nulls(0) for n in table.column_names}))
    source = TableFile(COLUMNS, folder, UTF8)
    pieces = list(source.pieces(0, 50, 50))
    assert pa.concat_tables(piece.carried for piece in pieces).to_pylist() == table.to_pylist()
    assert [used_rows for used_rows, faults in used(source.pieces(0, 50, 50))] == [[*range(22)]]


def test_malformed_rows_far_into_a_csv_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.inference.sources._BLOCK_BYTES", 2000)
    lines = write_csv(tmp_path / "t.csv", frame(3000)).read_text().splitlines()
    bad = sorted(np.random.default_rng(0).choice(3000, 200, replace=False).tolist())
    for number in bad:
        lines[1 + number] = "x"
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = TableFile(COLUMNS, tmp_path / "t.csv", UTF8)
    pieces = list(source.pieces(0, 128, 64))
    found = [128 * number + place for number, piece in enumerate(pieces) for place in piece.faults]
    assert sorted(found) == bad
    ages = pa.concat_tables(piece.carried for piece in pieces)["age"].to_pylist()
    assert ages == [None if n in bad else str(n % 120) for n in range(3000)]


def test_the_encoding_and_the_words_for_missing_values_are_those_of_training(
    tmp_path: Path,
) -> None:
    path = write_csv(tmp_path / "t.csv", frame(3), encoding="windows-1252")
    path.write_bytes(path.read_bytes().replace(b"20000.5", b"unknown"))
    source = TableFile(COLUMNS, path, TextFormat("windows-1252", ("unknown",)))
    (piece,) = source.pieces(0, 10, 10)
    assert piece.carried["city"].to_pylist() == ["", "Zürich", "Zürich"]
    assert [positions for positions, _ in piece.batches] == [[0, 1, 2]]
    with pytest.raises(DataError, match=r"is not UTF-8. If it is windows-1252, set"):
        list(TableFile(COLUMNS, path, UTF8).pieces(0, 10, 10))


def test_lines_that_are_not_json_objects_are_bad_rows(tmp_path: Path) -> None:
    good = json.dumps(table_row(1))
    (tmp_path / "t.jsonl").write_bytes(f"{good}\n\n[1]\n{good[:-3]}\n{good}\n".encode() + b"\xff")
    source = TableFile(COLUMNS, tmp_path / "t.jsonl", UTF8)
    ((positions, faults),) = used(source.pieces(0, 10, 10))
    assert positions == [0, 3]
    assert {place: code for place, (code, _) in faults.items()} == dict.fromkeys(
        (1, 2, 4), "malformed_row"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.docx", b"x", "is not a table, expected a .csv, .parquet or .jsonl file"),
        ("t.csv", b"", "is empty, expected a header and rows"),
        ("t.csv", b'age,colour\n1,"red\n', "an unclosed quotation mark"),
        ("t.csv", b"age,Colour\n1,red\n", r"no column 'income', 'colour' \(there is 'Colour'\)"),
        ("t.parquet", b"PAR1", "is not a readable Parquet file"),
        ("t.jsonl", b'{"age": 1}\n', "the table has no column 'income'"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_as_a_whole(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(TableFile(COLUMNS, tmp_path / name, UTF8).pieces(0, 10, 10))


def test_identity_of_a_source_changes_with_its_content(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", frame(3))
    before = TableFile(COLUMNS, path, UTF8).identity
    assert TableFile(COLUMNS, path, UTF8).identity == before
    path.write_text(path.read_text().replace("green", "blue"))
    assert TableFile(COLUMNS, path, UTF8).identity != before


def test_image_folder_is_read_by_name_with_faults_for_bad_files(
    tmp_path: Path,
) -> None:
    for number, name in enumerate(["b.png", "a/2.png", "a/10.png", "a/x/1.png"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture(number))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").write_text("")
    source = ImageFiles(CONTRACT, tmp_path, UTF8)
    assert source.num_rows == 5
    pieces = list(source.pieces(0, 3, 2))
    found = list(used(iter(pieces)))
    names = [piece.carried["file"].to_pylist() for piece in pieces]
    assert names == [["b.png", "notes.txt", "a/10.png"], ["a/2.png", "a/x/1.png"]]
    assert [positions for positions, _ in found] == [[0, 2], [0, 1]]
    assert found[0][1][1][0] == "undecodable"
    source.close()


def test_single_image_is_a_source_and_an_image_model_refuses_a_table(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(picture(1))
    source = ImageFiles(CONTRACT, tmp_path / "one.png", UTF8)
    (piece,) = source.pieces(0, 9, 9)
    assert [len(inputs) for _, inputs in piece.batches] == [1]
    source.close()
    for path, message in [
        (tmp_path / "t.csv", "is a table, and this model takes images"),
        (tmp_path / "absent", "does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            ImageFiles(CONTRACT, path, UTF8)


TEXTS = TextContract(kind="texts", columns=["text"], max_bytes=32, max_characters=20)


def test_each_text_file_is_a_row_and_the_bad_ones_are_named(tmp_path: Path) -> None:
    for name, content in {
        "a/1.txt": b"hello",
        "a/2.txt": b" \n",
        "b/3.txt": b"a\0b",
        "b/4": b"longer than twenty characters",
        "b/5": "cr\xe8me".encode("latin-1"),
        ".hidden": b"no row",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = text_source(TEXTS, tmp_path, TextFormat("latin-1"))
    assert isinstance(source, TextFiles)
    assert source.num_rows == 5
    (piece,) = source.pieces(0, 100, 2)
    texts = {
        position: decode_row(row, TEXTS)
        for positions, rows in piece.batches
        for position, row in zip(positions, rows, strict=True)
    }
    assert piece.carried["file"].to_pylist() == ["a/1.txt", "a/2.txt", "b/3.txt", "b/4", "b/5"]
    assert texts == {0: "hello", 4: "cr\xe8me"}
    codes = {position: fault.code for position, fault in piece.faults.items()}
    assert codes == {1: "missing_value", 2: "unreadable", 3: "out_of_range"}
    assert "NUL bytes" in piece.faults[2].message


def test_a_changed_text_file_changes_the_identity_and_pieces_resume(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    source = text_source(TEXTS, tmp_path, UTF8)
    rest = [piece.carried["file"].to_pylist() for piece in source.pieces(2, 2, 8)]
    assert rest == [["2.txt", "3.txt"], ["4.txt"]]
    (tmp_path / "0.txt").write_text("another text")
    assert text_source(TEXTS, tmp_path, UTF8).identity != source.identity


def test_a_text_model_takes_one_file_a_table_or_a_folder_of_shards(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("hello")
    (piece,) = text_source(TEXTS, tmp_path / "1.txt", UTF8).pieces(0, 8, 8)
    assert piece.carried["file"].to_pylist() == ["1.txt"]
    shards = write_shards(tmp_path / "t.parquet", pa.table({"text": ["a", "b"]}))
    assert isinstance(text_source(TEXTS, shards, UTF8), TextFile)
    pair = TEXTS.model_copy(update={"columns": ["a", "b"]})
    with pytest.raises(DataError, match="takes a and b of each row: name a table"):
        text_source(pair, tmp_path / "1.txt", UTF8)


def test_texts_of_similar_length_share_a_batch_of_tokens(tmp_path: Path) -> None:
    contract = token_contract()
    table = pa.table({"text": ["soup " * (1 + number * 7 % 10) for number in range(20)]})
    source = TextFile(contract, write_csv(tmp_path / "t.csv", table), UTF8)
    (piece,) = source.pieces(0, 100, 5)
    batches = list(piece.batches)
    longest = [int(np.count_nonzero(inputs, axis=1).max()) for _, inputs in batches]
    assert longest == sorted(longest)
    assert sorted(position for positions, _ in batches for position in positions) == [*range(20)]
    for positions, inputs in batches:
        texts = [decode_row(row, contract).split() for row in inputs]
        assert [len(text) for text in texts] == [1 + place * 7 % 10 for place in positions]
