import os
import shutil
import time
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.engine.rows import content_of
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.joined import origin_of, source_names
from slipway.data.sources.sources import count_samples, read_samples
from slipway.data.tables.cells import is_missing
from slipway.data.tables.cleaning import clean_table
from slipway.data.tables.column_types import infer
from slipway.data.tables.source import columns_of, read_json_rows, read_table_of
from slipway.inputs.columns import ColumnType
from slipway.system.errors import DataError
from tests.data.pictures import data_params as image_params
from tests.data.pictures import picture, write_folder
from tests.data.raw_files import data_params as table_params
from tests.data.raw_files import numbered_csv
from tests.project_params import clean_params


@pytest.fixture(name="raw")
def _raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw" / "2024").mkdir(parents=True)
    return Path("raw")


def joined(raw: Path, *sources: str, **changes: Any) -> DataParams:
    return table_params(raw, sources=list(sources), **changes)


def write_three(raw: Path) -> None:
    (raw / "b.csv").write_text("x,kind,target\n1,a,0\n2,,1\nbad\n")
    (raw / "2024/may.csv").write_text("kind;x;target\nb;3;0\n")
    (raw / "2024/april.csv").write_text("x,kind,target\n4,a,1\n")


def test_tables_are_joined_in_order_and_each_row_knows_its_source(raw: Path) -> None:
    write_three(raw)
    data = joined(raw, "b.csv", "2024/*.csv")
    table = read_table_of(data)
    assert columns_of(data) == list(table.columns) == ["x", "kind", "target"]
    cells = {
        name: [column.values[code].as_py() if code >= 0 else None for code in column.codes.tolist()]
        for name, column in table.columns.items()
    }
    assert cells == {"x": ["1", "2", "4", "3"], "kind": ["a", "", "a", "b"], "target": [*"0110"]}
    assert table.columns["kind"].values.to_pylist() == ["a", "", "b"]
    assert list(map(table.source, table.numbers.tolist())) == [
        "0:b.csv",
        "1:b.csv",
        "3:2024/april.csv",
        "4:2024/may.csv",
    ]
    assert [table.source(number) for number, _ in table.malformed] == ["2:b.csv"]
    types = [ColumnType(name="x", kind="number", required=False, min=None, max=None)]
    rows = list(read_json_rows(data, types, {"4:2024/may.csv", "0:b.csv"}))
    assert [(source, row) for source, _, row in rows] == [
        ("0:b.csv", {"x": 1.0}),
        ("4:2024/may.csv", {"x": 3.0}),
    ]


def test_clean_and_later_stages_give_joined_rows_equal_sources_and_digests(raw: Path) -> None:
    for number, name in enumerate("ab"):
        numbered_csv(raw / f"{name}.csv", 30, **{f"a_{4 + number}": "x"})
    with (raw / "a.csv").open("a") as file:
        file.write("1,2\n")
    data = joined(raw, "a.csv", "b.csv")
    table = read_table_of(data)
    cleaned = clean_table(table, data, clean_params()).cleaned
    sources = cleaned.rows["source"].to_pylist()
    refused = cleaned.quarantine["source"].to_pylist()
    assert {origin_of(source, ["a.csv", "b.csv"]) for source in sources} == {"a.csv", "b.csv"}
    assert {"30:a.csv", "4:a.csv", "36:b.csv"} == set(refused)
    assert len(sources) + len(refused) == 61
    types = [ColumnType(name="b", kind="number", required=False, min=None, max=None)]
    found = {source: digest for source, digest, _ in read_json_rows(data, types, sources)}
    ids = cleaned.rows["id"].to_pylist()
    assert len(set(ids)) == len(ids) > len(set(found.values()))  # the rows of both files are equal
    assert found == dict(zip(sources, map(content_of, ids), strict=True))


def test_a_row_has_the_same_id_in_a_joined_table_and_in_its_own_table(raw: Path) -> None:
    write_three(raw)
    types = [ColumnType(name="x", kind="number", required=False, min=None, max=None)]
    [(_, alone, _)] = read_json_rows(table_params(raw / "2024/april.csv"), types, {"0"})
    [(_, row_id, _)] = read_json_rows(joined(raw, "b.csv", "2024/*"), types, {"3:2024/april.csv"})
    assert row_id == alone


def test_workbooks_that_match_a_glob_are_joined(raw: Path) -> None:
    for month in (1, 2):
        book = openpyxl.Workbook()
        for row in (["x", "target"], [month, month]):
            book.worksheets[0].append(row)
        book.save(raw / f"{month}.xlsx")
    data = joined(raw, "*.xlsx")
    table = read_table_of(unpacked(data, ArchiveLimits(100, 200)))
    assert table.columns["x"].values.to_pylist() == [1, 2]
    assert list(map(table.source, table.numbers.tolist())) == ["0:1.xlsx", "1:2.xlsx"]
    packed = Path(shutil.make_archive("packed", "zip", raw))
    shutil.rmtree(".work")  # where they are unpacked
    data = unpacked(joined(packed, "*.xlsx"), ArchiveLimits(100, 200))
    assert read_table_of(data).columns["x"].values.to_pylist() == [1, 2]


def test_columns_whose_types_differ_between_joined_tables_become_text(raw: Path) -> None:
    (raw / "a.jsonl").write_text('{"x": 1, "y": true, "z": null}\n{"x": 2.5, "y": null, "z": null}')
    (raw / "b.csv").write_text("x,y,z\n1,false,u\n")
    (raw / "c.jsonl").write_text('{"x": null, "y": 0, "z": null}\n')
    for sources in (["a.jsonl", "b.csv", "c.jsonl"], ["c.jsonl", "b.csv", "a.jsonl"]):
        columns = read_table_of(joined(raw, *sources)).columns
        found = {name: sorted(column.values.to_pylist()) for name, column in columns.items()}
        assert found == {"x": ["1", "2.5"], "y": ["0", "false", "true"], "z": ["u"]}
        assert {column.stored for column in columns.values()} == {"text"}
    x, _, z = read_table_of(joined(raw, "c.jsonl", "a.jsonl")).columns.values()
    assert (x.stored, x.values.to_pylist(), x.codes.tolist()) == ("number", [1, 2.5], [-1, 0, 1])
    assert (z.stored, z.codes.tolist()) == ("other", [-1, -1, -1])


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["a.csv", "b.csv"], r"'a\.csv' matches nothing in raw"),
        (["b.csv", "2023/*"], r"'2023/\*' matches nothing in raw"),
        (["b.csv", "*.csv"], r"b\.csv of '\*\.csv' belongs to b\.csv as well"),
        (["2024/may.csv", "2024"], r"2024 of '2024' belongs to 2024/may\.csv as well"),
        (["2024", "2024/may.csv"], r"2024/may\.csv of .* belongs to 2024 as well"),
        (["b.csv", "link.csv"], r"link\.csv of .* belongs to b\.csv as well"),
    ],
)
def test_a_source_without_a_match_and_a_file_matched_twice_are_refused(
    raw: Path, sources: list[str], said: str
) -> None:
    write_three(raw)
    os.symlink("b.csv", raw / "link.csv")
    if "*.csv" in sources:
        (raw / "link.csv").unlink()
    with pytest.raises(DataError, match=said):
        source_names(joined(raw, *sources))


def test_a_thousand_joined_sources_are_found_quickly(raw: Path) -> None:
    for number in range(1000):
        (raw / f"{number}.csv").touch()
    data = joined(raw, "*.csv")
    begin = time.process_time()
    assert len(source_names(data)) == 1000
    assert time.process_time() - begin < 1.5  # 0.05 s; comparing each pair took 12 s


def test_a_glob_leaves_out_hidden_files_and_those_of_dvc(raw: Path) -> None:
    for name in (".gitignore", "a.csv", "a.csv.dvc", "[b].csv"):
        (raw / name).touch()
    assert source_names(joined(raw, "[[]*", "a*")) == ["[b].csv", "a.csv"]
    assert source_names(joined(raw, "[b].csv")) == ["[b].csv"]


def test_error_names_joined_tables_with_different_columns(raw: Path) -> None:
    write_three(raw)
    (raw / "c.csv").write_text("x,target,more\n1,2,3\n")
    with pytest.raises(DataError, match=r"c\.csv: kind is missing, text in b\.csv\n.*more is text"):
        read_table_of(joined(raw, "b.csv", "c.csv"))
    pq.write_table(pa.table({"x": [[1.5]], "kind": ["a"], "target": ["0"]}), raw / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: x is other, text in b\.csv"):
        read_table_of(joined(raw, "b.csv", "d.parquet"))


def test_data_sources_require_a_folder_as_data_path(raw: Path) -> None:
    write_three(raw)
    with pytest.raises(DataError, match=r"b\.csv' is not a folder"):
        read_table_of(joined(raw / "b.csv", "b.csv"))


@pytest.mark.parametrize("entry", ["/etc/*", "../*.csv", "a/../../b", " "])
def test_a_source_that_leads_out_of_the_data_folder_is_refused(raw: Path, entry: str) -> None:
    with pytest.raises(ValueError, match=r"expected a path or a glob inside data\.path"):
        joined(raw, entry)


def test_class_folders_and_archives_of_class_folders_are_joined(raw: Path) -> None:
    for number, name in enumerate(("a", "b")):
        write_folder(raw / name, {"cat": [picture(number)], "dog": [picture(number + 9)]})
    shutil.make_archive(str(raw / "b"), "zip", raw / "b")
    shutil.rmtree(raw / "b")
    limits = ArchiveLimits(100, 200)
    data = unpacked(image_params(raw, sources=["b.zip", "a"]), limits)
    samples = list(read_samples(data))
    sources = ["b.zip/cat/0.png", "b.zip/dog/0.png", "a/cat/0.png", "a/dog/0.png"]
    assert [sample.source for sample in samples] == sources
    assert [sample.label for sample in samples] == ["cat", "dog", "cat", "dog"]
    assert count_samples(data) == 4
    assert list(read_samples(data, ["a/dog/0.png"])) == samples[3:]


def test_tables_of_images_are_joined(raw: Path) -> None:
    for name in ("a", "b"):
        write_folder(raw, {name: [picture(ord(name))]})
        (raw / name / "t.csv").write_text("image,label\n0.png,cat\n,dog\n")
    data = image_params(raw, sources=["*/t.csv"])
    assert [sample.source for sample in read_samples(data)] == [
        "0:a/t.csv:0.png",
        "1:a/t.csv",
        "2:b/t.csv:0.png",
        "3:b/t.csv",
    ]
    [found] = read_samples(data, ["2:b/t.csv:0.png"])
    assert found.payload == picture(ord("b"))
    write_folder(raw / "c", {"cat": [picture(1)]})
    with pytest.raises(DataError, match=r"a/t\.csv is a table, c a folder of classes"):
        list(read_samples(image_params(raw, sources=["a/t.csv", "c"])))


def test_a_joined_source_with_its_own_split_is_refused(raw: Path) -> None:
    for split in ("train", "test"):
        write_folder(raw / "a" / split, {"cat": [picture(1)], "dog": [picture(2)]})
    with pytest.raises(DataError, match=r"names a, .* Set data\.split_folders to pool"):
        list(read_samples(image_params(raw, sources=["a"])))
    pooled = list(read_samples(image_params(raw, sources=["a"], split_folders="pool")))
    assert [sample.label for sample in pooled] == ["cat", "dog"] * 2
    assert [sample.given_split for sample in pooled] == [None] * 4
    data = image_params(raw, sources=["a"], split_folders="pool")
    assert list(read_samples(data, [pooled[3].source])) == [pooled[3]]


def test_shards_that_name_splits_are_joined_with_another_table_if_pooled(raw: Path) -> None:
    (raw / "s").mkdir()
    for name in ("s/train-00000-of-00001", "s/test-00000-of-00001", "more"):
        pq.write_table(pa.table({"a": [1.5], "target": ["x"]}), raw / f"{name}.parquet")
    data = table_params(raw, sources=["s", "more.parquet"], split_folders="pool")
    assert list(read_table_of(data).columns) == ["a", "target"]


def test_joined_tables_keep_missing_values_and_the_format_of_dates(raw: Path) -> None:
    for name in ("a", "b"):
        (raw / f"{name}.csv").write_text("a,d,target\n?,31/12/2020,x\n1,30/12/2020,y\n")
    changes: dict[str, Any] = {"missing_values": ["?"], "date_format": "%d/%m/%Y"}
    table = read_table_of(table_params(raw, sources=["*.csv"], **changes))
    assert is_missing(table.columns["a"]).sum() == 1  # of the distinct cells
    assert infer(table.columns["a"]).kind == "number"
    assert infer(table.columns["d"]).kind == "date"


def test_origin_of_returns_the_longest_source_name_that_fits_a_row() -> None:
    names = ["a", "a/b.csv", "b.csv"]
    assert origin_of("a/cat/1.png", names) == "a"
    assert origin_of("3:a/b.csv", names) == "a/b.csv"
    assert origin_of("3:b.csv:1.png", names) == "b.csv"
    assert origin_of("ab/1.png", names) == ""
