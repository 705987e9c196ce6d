"""Refusals of `slipway init` name what the user gave, never a copy in the temporary directory."""

import io
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.project import table_sample
from slipway.project.inspection import inspect
from slipway.project.proposal import propose
from slipway.system.errors import SlipwayError


def parquet(**columns: object) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def workbook(*rows: tuple[object, ...]) -> bytes:
    stream, book = io.BytesIO(), openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(stream)
    return stream.getvalue()


ROWS = b"x,target\n" + b"1,a\n" * 40
REFUSED: dict[str, Mapping[str, bytes]] = {
    "an empty table": {"t.csv": b""},
    "a header without rows": {"t.csv": b"x,target\n"},
    "an open quotation": {"t.csv": b'x,target\n"1,2\n'},
    "a quotation that closes late": {"t.csv": ROWS + b'"' + b"y" * 9000},
    "a repeated column": {"t.csv": b"x,x\n1,2\n"},
    "more cells than names": {"t.csv": b"x,target\n" + b"1,2,3,4\n" * 30},
    "no rows in JSON lines": {"t.jsonl": b"\n"},
    "a damaged Parquet": {"t.parquet": parquet(x=[1], target=[2])[:-9]},
    "a Parquet without rows": {"t.parquet": parquet(x=[], target=[])},
    "shards of other columns": {"a.parquet": parquet(x=[1]), "b.parquet": parquet(y=[1])},
    "shards of other types": {"a.parquet": parquet(x=[b"1"]), "b.parquet": parquet(x=["1"])},
    "a missing shard": {"a-00000-of-00002.parquet": parquet(x=[1]), "b.parquet": parquet(x=[1])},
    "a damaged shard": {"a.csv": ROWS, "b.csv": b'x,target\n"1,2\n'},
    "tables of two formats": {"a.csv": ROWS, "b.parquet": parquet(x=[1])},
    "tables of other columns": {"a.csv": ROWS, "b.jsonl": b'{"y": 1}\n'},
    "images that are not there": {"t.csv": b"image,target\n" + b"a.png,1\nb.png,2\n" * 9},
    "a split without training rows": {"val.csv": ROWS, "test.csv": ROWS},
    "files without folders": {"a.txt": b"a", "b.txt": b"b"},
    "a workbook beside a text": {"t.xlsx": workbook(("x",), (1,)), "a.txt": b"a"},
    "split folders of different contents": {
        "train/cat/1.txt": b"a",
        "test/t.csv": b"x,target\n1,2\n",
    },
}
WORKBOOKS: dict[str, bytes] = {
    "no cells": workbook(),
    "only a header": workbook(("x", "target")),
    "a title": workbook(("A report",), ("x", "target"), (1, 2)),
    "no workbook": b"PK\x05\x06" + bytes(18),
    "cut off": workbook(("x", "target"), (1, 2))[:-50],
}


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a folder or an archive, by the ending of `path`."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    elif path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return path


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def refusal(path: Path) -> str:
    with pytest.raises(SlipwayError) as raised:
        propose(inspect(path))
    return str(raised.value)


@pytest.mark.parametrize("name", ["given", "given.zip", "given.tar"])
@pytest.mark.parametrize("files", REFUSED.values(), ids=REFUSED)
def test_no_refusal_of_a_folder_or_archive_names_the_temporary_directory(
    tmp_path: Path, files: Mapping[str, bytes], name: str
) -> None:
    text = refusal(write(tmp_path / name, files))
    assert "temporary" not in text
    assert str(tmp_path / name) in text


@pytest.mark.parametrize("content", WORKBOOKS.values(), ids=WORKBOOKS)
def test_no_refusal_of_a_workbook_names_the_temporary_directory(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "given.xlsx").write_bytes(content)
    text = refusal(tmp_path / "given.xlsx")
    assert "temporary" not in text
    assert repr(str(tmp_path / "given.xlsx")) in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("given.csv", b'x,target\n"1,2\n' + ROWS * 50),
        ("given.csv", b"x,x\n" + b"1,2\n" * 3000),
        ("given.csv", b'"x\n' + b"1\n" * 3000),
    ],
)
def test_no_refusal_of_a_table_that_is_sampled_names_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(table_sample, "_SAMPLE_BYTES", 4000)
    (tmp_path / name).write_bytes(content)
    text = refusal(tmp_path / name)
    assert "temporary" not in text
    assert str(tmp_path / name) in text
