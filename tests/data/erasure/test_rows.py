"""Erasure removes all rows of a group, and leaves every other row unchanged byte for byte."""

import os
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.erasure.rows import find_group, named_files, raw_tables, remove
from slipway.system.errors import DataError, IntegrityError
from tests.data.pictures import data_params as image_params
from tests.data.pictures import picture
from tests.data.raw_files import data_params

# Similar to p7: other cases, spaces inside, zeros, longer and shorter ids, another column.
ROWS = [
    'p7,1,"one, of p7"\r\n',
    "p70,2,p7\r\n",
    "P7,3,x\r\n",
    'ap7,4,"two\nlines"\r\n',
    ' p7 ,5,"three\nlines, of p7"\r\n',
    "p 7,6,\r\n",
    "p07,7,é\r\n",
]
HEAD = "\ufeff# p7 is a person\r\nperson,target,text\r\n"


def table(folder: Path, content: str | bytes) -> DataParams:
    path = folder / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return data_params(path, group_column="person")


def erase(data: DataParams, *groups: str) -> int:
    num_rows = 0
    for path in raw_tables(data):
        rows = find_group(path, data, frozenset(groups))
        num_rows += rows.num_rows
        remove(rows, data)
    return num_rows


def test_erasing_a_group_from_a_csv_keeps_every_other_byte(tmp_path: Path) -> None:
    data = table(tmp_path, HEAD + "".join(ROWS) + "\r\n")
    os.chmod(data.path, 0o640)
    assert erase(data, "p7") == 2
    left = [row for number, row in enumerate(ROWS) if number not in (0, 4)]
    assert Path(data.path).read_bytes() == (HEAD + "".join(left) + "\r\n").encode()
    assert stat.S_IMODE(os.stat(data.path).st_mode) == 0o640
    assert erase(data, "p7") == 0


def test_erasing_rows_of_a_csv_keeps_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    data = table(tmp_path, b"person,target\nb,\xff\xe9\na,1\nb,2")
    assert erase(data, "a") == 1
    assert Path(data.path).read_bytes() == b"person,target\nb,\xff\xe9\nb,2"


def test_erasure_reads_a_cell_beyond_the_size_limit_of_the_csv_module(tmp_path: Path) -> None:
    long = "b," + "x" * 200_000 + "\n"
    data = table(tmp_path, "person,target\n" + long + "a,1\n")
    assert erase(data, "a") == 1
    assert Path(data.path).read_text() == "person,target\n" + long


def test_erasure_reports_and_keeps_a_malformed_row_that_contains_the_group(tmp_path: Path) -> None:
    data = table(tmp_path, "person,target\nb,1\na,1,2\na,2\n")
    rows = find_group(Path(data.path), data, frozenset({"a"}))
    assert (rows.num_rows, rows.unclear) == (1, [2])
    remove(rows, data)
    assert Path(data.path).read_text() == "person,target\nb,1\na,1,2\n"


def test_erasing_rows_of_json_lines_leaves_the_other_lines_unchanged(tmp_path: Path) -> None:
    lines = [
        '{"person": "a",  "t": 1}\n',
        '\n{"t": "a"}\n',
        '{"person": 7, "t": 2}\n',
        "a torn {\n",
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(lines))
    data = data_params(path, group_column="person")
    assert erase(data, "a", "7") == 2
    assert path.read_text() == lines[1] + lines[3]


def test_erasing_rows_of_parquet_shards_keeps_schema_and_row_groups(tmp_path: Path) -> None:
    schema = pa.schema([("person", pa.int64()), ("target", pa.float32())], {"note": "kept"})
    for shard in range(2):
        numbers = list(range(shard * 6, shard * 6 + 6))
        rows = pa.table({"person": [number % 4 for number in numbers], "target": numbers}, schema)
        pq.write_table(rows, tmp_path / f"part-{shard}.parquet", row_group_size=2)
    data = data_params(tmp_path, group_column="person")
    assert erase(data, "3") == 3
    left = [pq.ParquetFile(tmp_path / f"part-{shard}.parquet") for shard in range(2)]
    assert [file.metadata.num_row_groups for file in left] == [3, 3]
    assert left[0].schema_arrow.equals(schema, check_metadata=True)
    targets = [target for file in left for target in file.read()["target"].to_pylist()]
    assert targets == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_erasing_a_group_removes_its_images_except_those_that_other_rows_name(
    tmp_path: Path,
) -> None:
    for name in ("a.png", "b.png", "both.png"):
        (tmp_path / name).write_bytes(picture(1))
    rows = "image,label,person\na.png,x,a\nboth.png,x,a\nb.png,y,b\n./both.png,y,b\n"
    (tmp_path / "metadata.csv").write_text(rows)
    data = image_params(tmp_path, image_column="image", target_column="label").model_copy(
        update={"group_column": "person"}
    )
    (path,) = raw_tables(data)
    found = find_group(path, data, frozenset({"a"}))
    assert [file.name for file in found.images] == ["a.png"]
    assert [file.name for file in found.shared] == ["both.png"]
    remove(found, data)
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["b.png", "both.png"]
    assert path.read_text() == "image,label,person\nb.png,y,b\n./both.png,y,b\n"


def test_erasure_replaces_a_link_into_dvcs_cache_and_follows_any_other_link(
    tmp_path: Path,
) -> None:
    text = "person,target\na,1\nb,2\n"
    cached = tmp_path / "cache" / "files" / "md5" / "ab" / "cd"
    other = tmp_path / "elsewhere" / "rows.csv"
    for target in (cached, other):
        target.parent.mkdir(parents=True)
        target.write_text(text)
        link = tmp_path / f"{target.parent.name}.csv"
        link.symlink_to(target)
        data = data_params(link, group_column="person")
        assert erase(data, "a") == 1
        assert link.read_text() == "person,target\nb,2\n"
    assert cached.read_text() == text  # under its digest
    assert other.read_text() == "person,target\nb,2\n"


def test_erasure_refuses_a_table_that_changed_since_it_was_searched(tmp_path: Path) -> None:
    data = table(tmp_path, "person,target\na,1\nb,2\n")
    rows = find_group(Path(data.path), data, frozenset({"a"}))
    Path(data.path).write_text("person,target\nb,2\na,1\n")
    with pytest.raises(IntegrityError, match="changed while it was searched"):
        remove(rows, data)


def test_erasure_refuses_a_table_without_the_group_column_and_an_archive(tmp_path: Path) -> None:
    data = table(tmp_path, "Person,target\na,1\n")
    with pytest.raises(DataError, match="did you mean 'Person'"):
        find_group(Path(data.path), data, frozenset({"a"}))
    (tmp_path / "rows.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match="archive or a workbook"):
        raw_tables(data_params(tmp_path / "rows.zip"))


def test_erasure_finds_named_files_only_below_the_data_folder(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        (root / label / "1.png").write_bytes(picture(1))
    (tmp_path / "secret.png").write_bytes(b"")
    data = image_params(root)
    assert named_files(data, ["cat/1.png", "cat/gone.png"]) == [root / "cat" / "1.png"]
    for name in ("../secret.png", str(tmp_path / "secret.png"), "cat"):
        with pytest.raises(DataError, match="not a file below"):
            named_files(data, [name])
