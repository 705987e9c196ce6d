"""Tests of a user's file that gives the split of each row."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.sources.sources import find_layout, read_samples
from slipway.data.splits.split_file import read_split_file
from slipway.system.errors import DataError
from tests.data import raw_files
from tests.data.pictures import (
    cleaned_by,
    data_params,
    picture,
    write_folder,
    write_parquet,
)
from tests.project_params import clean_params

NAMES = ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
SPLITS = ["train", "test", "train", "val"]
EXPECTED = dict(zip(NAMES, SPLITS, strict=True))


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    pictures = [picture(seed) for seed in range(4)]
    return write_folder(tmp_path / "images", {"cat": pictures[:2], "dog": pictures[2:]})


def split_csv(path: Path, names: list[Any], splits: list[str], key: str = "path") -> Path:
    lines = [f"{name},{split}\n" for name, split in zip(names, splits, strict=True)]
    path.write_text(f"{key},split\n{''.join(lines)}")
    return path


def given(data: DataParams) -> dict[str, str]:
    params = clean_params(rules=dict.fromkeys(("blurred", "near_duplicate"), None))
    read = partial(read_samples, data, read_files=False)
    cleaned = cleaned_by(read, params, data.task, split_file=read_split_file(data))
    return {row["source"]: row["given_split"] for row in cleaned.rows.to_pylist()}


def fault(data: DataParams) -> str:
    with pytest.raises(DataError) as raised:
        given(data)
    return str(raised.value)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_each_image_gets_the_split_that_the_split_file_lists_for_its_path(
    root: Path, tmp_path: Path, ending: str, is_inside: bool
) -> None:
    path = (root if is_inside else tmp_path) / f"splits.{ending}"
    if ending == "csv":
        split_csv(path, NAMES, SPLITS)
    elif ending == "jsonl":
        path.write_text(
            "".join(json.dumps({"path": n, "split": s}) + "\n" for n, s in EXPECTED.items())
        )
    else:
        pq.write_table(pa.table({"split": SPLITS, "path": NAMES}), path)
    assert given(data_params(root, split_file=str(path))) == EXPECTED


def test_a_split_file_accepts_the_same_split_names_as_split_folders(
    root: Path, tmp_path: Path
) -> None:
    path = split_csv(tmp_path / "s.csv", NAMES, ["Training", "test", "TRAIN", "validation"])
    assert given(data_params(root, split_file=str(path))) == EXPECTED


@pytest.mark.parametrize("key", ["path", "row", "image"])
def test_a_split_file_names_images_of_a_table_by_path_or_row(
    root: Path, tmp_path: Path, key: str
) -> None:
    lines = [f"{name},{name[:3]}\n" for name in NAMES]
    (root / "a.csv").write_text(f"image,label\n{''.join(lines)}")
    names: list[Any] = list(range(4)) if key == "row" else NAMES
    path = split_csv(root / "splits.csv", names, SPLITS, key)
    found = given(data_params(root, split_file=str(path)))
    assert found == {f"{row}:{name}": EXPECTED[name] for row, name in enumerate(NAMES)}


def test_a_split_file_names_images_inside_a_table_by_row(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet", [picture(1), picture(2)], ["1", "2"])
    path = split_csv(tmp_path / "s.csv", [1, 0], ["test", "train"], "row")
    assert given(data_params(table, split_file=str(path))) == {
        "0:0.png": "train",
        "1:1.png": "test",
    }


def test_error_counts_all_unmatched_names_of_a_split_file_and_shows_three(
    root: Path, tmp_path: Path
) -> None:
    path = split_csv(tmp_path / "s.csv", ["cat/0.png", *"abcd"], ["train"] * 5)
    text = fault(data_params(root, split_file=str(path)))
    assert "4 of its names match no row: 'a', 'b', 'c', ...\n" in text
    assert "3 rows have no split in it: 'cat/1.png', 'dog/0.png', 'dog/1.png'\n" in text
    assert "'path', the path of an image in the data" in text


def test_an_image_that_clean_refused_may_be_missing_from_the_split_file_or_in_it(
    root: Path, tmp_path: Path
) -> None:
    (root / "cat" / "1.png").write_bytes(b"words")
    (root / "dog" / "1.png").write_bytes(b"words")
    path = split_csv(tmp_path / "s.csv", NAMES[:3], SPLITS[:3])
    expected = {"cat/0.png": "train", "dog/0.png": "train"}
    assert given(data_params(root, split_file=str(path))) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("path,split\na,train\nb,test\na,train\n", "1 names are listed more than once: 'a'"),
        ("path,split\na,train\nb,\nc,dev set\n", "another split than train, val or test: 'b', 'c'"),
        ("path,split\n,train\n", "1 lines name no row: 0"),
        ("path,split\na,train,b\nb,val\n", "1 lines are malformed: 'line of row 0, 3 cells, "),
        ("path,part\na,train\n", "it has the columns path, part"),
        ("path,split,label\na,train,b\n", "it has the columns path, split, label"),
        ("split\ntrain\n", "it has the columns split"),
        ("id,split\na,train\n", "its column 'id' does not name images"),
        ('path,split\n"a,train\n', "data.split_file 'FILE' has a quotation mark"),
        ("", "data.split_file 'FILE' is empty"),
    ],
)
def test_a_malformed_split_file_is_refused(
    root: Path, tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "s.csv"
    path.write_text(content)
    text = fault(data_params(root, split_file=str(path)))
    assert words.replace("FILE", str(path)) in text


@pytest.mark.parametrize("name", ["none.csv", "s.txt"])
def test_a_split_file_that_is_missing_or_not_a_table_is_refused(
    root: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "s.txt").touch()
    text = fault(data_params(root, split_file=str(tmp_path / name)))
    assert f"{name}' is not a file that ends in .parquet" in text


def test_a_split_file_takes_precedence_over_split_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        seed = len(split)
        write_folder(
            tmp_path / "raw" / split,
            {"cat": [picture(seed)], "dog": [picture(seed + 10)]},
        )
    names = [f"{split}/{label}/0.png" for split in ("test", "train") for label in ("cat", "dog")]
    path = split_csv(tmp_path / "s.csv", names, SPLITS)
    data = data_params(tmp_path / "raw", split_file=str(path))
    assert not find_layout(data).given
    assert given(data) == dict(zip(names, SPLITS, strict=True))


def table_splits(data: DataParams) -> dict[str, str]:
    rows = raw_files.cleaned(data).cleaned.rows.to_pylist()
    return {row["source"]: row["given_split"] for row in rows}


@pytest.mark.parametrize("key", ["row", "b"])
def test_a_split_file_names_table_rows_by_number_or_by_a_column(tmp_path: Path, key: str) -> None:
    table = raw_files.numbered_csv(tmp_path / "t.csv", a_3="x")  # row 3 is refused
    cells = [(11 * row) % 37 for row in range(30)]
    names = list(range(30)) if key == "row" else cells
    splits = ["train", "val", "test"] * 10
    path = split_csv(tmp_path / "s.csv", names[::-1], splits[::-1], key)
    found = table_splits(raw_files.data_params(table, split_file=str(path)))
    assert found == {str(row): splits[row] for row in range(30) if row != 3}


def test_rows_with_the_same_name_in_the_split_file_get_the_same_split(tmp_path: Path) -> None:
    table = raw_files.numbered_csv(tmp_path / "t.csv", 6)
    lines = table.read_text().splitlines()
    person = ["person", *"aabbcc"]
    table.write_text("".join(f"{p},{line}\n" for p, line in zip(person, lines, strict=True)))
    path = split_csv(tmp_path / "s.csv", ["a", "b", "c"], ["train", "val", "test"], "person")
    found = table_splits(raw_files.data_params(table, split_file=str(path)))
    splits = [found[str(row)] for row in range(6)]
    assert splits == ["train", "train", "val", "val", "test", "test"]


@pytest.mark.parametrize("key", ["row", "b"])
def test_a_split_file_may_name_a_malformed_row_of_the_table(tmp_path: Path, key: str) -> None:
    table = raw_files.numbered_csv(tmp_path / "t.csv")
    table.write_text(table.read_text() + "1,999\n")
    names = list(range(31)) if key == "row" else [*((11 * row) % 37 for row in range(30)), 999]
    path = split_csv(tmp_path / "s.csv", names, ["train"] * 31, key)
    data = raw_files.data_params(table, split_file=str(path))
    assert set(table_splits(data).values()) == {"train"}
    split_csv(path, [*names, 1000], ["train"] * 32, key)
    with pytest.raises(DataError, match=r"1000"):
        table_splits(data)


def test_a_split_file_with_an_unknown_column_is_refused(tmp_path: Path) -> None:
    table = raw_files.numbered_csv(tmp_path / "t.csv")
    path = split_csv(tmp_path / "s.csv", [1], ["train"], "A")
    with pytest.raises(DataError, match=r"'A' names rows by a column, .* did you mean 'a'\?"):
        table_splits(raw_files.data_params(table, split_file=str(path)))


def test_a_split_file_beside_a_table_is_not_read_as_data(tmp_path: Path) -> None:
    raw_files.numbered_csv(tmp_path / "t.csv")
    path = split_csv(tmp_path / "splits.csv", list(range(30)), ["train"] * 30, "row")
    data = raw_files.data_params(tmp_path, split_file=str(path))
    assert set(table_splits(data).values()) == {"train"}


def test_a_split_file_names_images_of_joined_tables_by_path(root: Path, tmp_path: Path) -> None:
    lines = [f"{name},{name[:3]}\n" for name in NAMES]
    (root / "a.csv").write_text(f"image,label\n{''.join(lines)}")
    names = [f"images/{name}" for name in NAMES]
    path = split_csv(tmp_path / "splits.csv", names, SPLITS)
    data = data_params(tmp_path, sources=["images/a.csv"], split_file=str(path))
    assert [split for _, split in sorted(given(data).items())] == SPLITS
