"""Tests of given splits: folders and Parquet shards with the names of splits."""

import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples, with_given_split
from slipway.data.splits.split import split_rows
from slipway.data.tables.cleaning import clean_table
from slipway.data.tables.source import find_table
from tests.data import raw_files
from tests.data.pictures import CLEAN, cleaned_by, data_params, picture
from tests.data.sources.split_folders import described, read, refusal, write_splits
from tests.project_params import PROJECT

THREE = {"train": "ab", "val": "ab", "test": "ab"}


def said(samples: list[RawSample]) -> Counter[tuple[str | None, str | None]]:
    """Return the number of rows of each split and class."""
    return Counter((sample.given_split, sample.label) for sample in samples)


# class folders inside split folders


def test_split_folders_with_the_same_classes_are_the_given_split(tmp_path: Path) -> None:
    samples = read(write_splits(tmp_path, THREE))
    assert said(samples) == {(split, label): 2 for split in THREE for label in "ab"}
    assert samples[0].source == "test/a/0.png"


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "TEST"),
        ("training", "testing"),
        ("train", "Validation"),
        ("train", "valid"),
        ("train", "dev"),
        ("TRAINING", "Val"),
    ],
)
def test_the_usual_names_of_splits_are_known_in_any_case(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    samples = read(write_splits(tmp_path, dict.fromkeys(names, "ab")))
    other = "test" if names[1].lower().startswith("test") else "val"
    assert {sample.given_split for sample in samples} == {"train", other}
    assert {sample.label for sample in samples} == {"a", "b"}


def test_an_archive_gives_the_same_split_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = write_splits(tmp_path / "plain", THREE)
    with zipfile.ZipFile("data.zip", "w") as archive:
        for path in root.rglob("*.png"):
            archive.write(path, Path("top") / path.relative_to(root))
            archive.writestr(f"__MACOSX/top/{path.relative_to(root)}", b"")
    data = unpacked(data_params(Path("data.zip")), ArchiveLimits(1000, 100))
    assert read(Path(data.path)) == read(root)


def test_nested_folders_hidden_files_and_macos_files_change_nothing(tmp_path: Path) -> None:
    root = write_splits(tmp_path, THREE)
    (root / "train" / "a" / "deep").mkdir()
    (root / "train" / "a" / "0.png").rename(root / "train" / "a" / "deep" / "0.png")
    (root / "__MACOSX" / "train").mkdir(parents=True)
    (root / "__MACOSX" / "train" / "._0.png").write_bytes(b"")
    (root / ".DS_Store").write_bytes(b"x")
    (root / "val" / ".DS_Store").write_bytes(b"x")
    assert said(read(root)) == {(split, label): 2 for split in THREE for label in "ab"}


def test_files_beside_split_or_class_folders_are_refused_as_missing_label(
    tmp_path: Path,
) -> None:
    root = write_splits(tmp_path, THREE)
    (root / "README.md").write_text("hello")
    (root / "val" / "lost.png").write_bytes(picture(99))
    faults = {sample.source: sample.fault for sample in read(root) if sample.fault}
    assert {source: fault.rule for source, fault in faults.items()} == {
        "README.md": "missing_label",
        "val/lost.png": "missing_label",
    }
    assert "lies beside the split folders" in faults["README.md"].detail
    assert "lies beside the class folders" in faults["val/lost.png"].detail


@pytest.mark.parametrize(
    "splits",
    [
        {"train": "ab", "plane": "ab"},  # one name only
        {"train": "a", "valid": "b"},  # nothing in common below
        {"train": "", "test": "", "plane": ""},  # other classes beside them
    ],
)
def test_class_folders_that_happen_to_name_splits_stay_classes(
    tmp_path: Path, splits: dict[str, str]
) -> None:
    samples = read(write_splits(tmp_path, splits))
    assert {(sample.given_split, sample.label) for sample in samples} == {
        (None, name) for name in splits
    }


def test_clean_reports_split_names_that_were_read_as_classes(tmp_path: Path) -> None:
    note = described(write_splits(tmp_path, {"train": "a", "valid": "b"}))
    assert (
        note == "train/, valid/ have no class folder in common, "
        "so they are read as classes, not as a given split\n"
    )


def test_clean_reports_the_folders_and_rows_of_each_split(tmp_path: Path) -> None:
    line = described(write_splits(tmp_path, {"Train": "ab", "TEST": "a"}))
    assert line.startswith(
        "given split: Train/ -> train (4 rows), TEST/ -> test (2 rows); "
        "`split` cuts val from train."
    )
    assert "set data.split_folders to pool" in line


def test_pooled_split_folders_are_read_as_classes_and_split_again(tmp_path: Path) -> None:
    root = write_splits(tmp_path, {"train": "a", "test": "ab"})
    assert said(read(root, split_folders="pool")) == {(None, "a"): 4, (None, "b"): 2}
    assert described(root, split_folders="pool") == ""


def test_split_folders_are_read_as_classes_if_configured(tmp_path: Path) -> None:
    assert said(read(write_splits(tmp_path, THREE), split_folders="classes")) == {
        (None, split): 4 for split in THREE
    }


def test_only_the_train_folder_must_have_every_class(
    tmp_path: Path,
) -> None:
    assert (
        said(read(write_splits(tmp_path / "fewer", {"train": "ab", "test": "a"})))[("test", "a")]
        == 2
    )
    more = write_splits(tmp_path / "more", {"train": "ab", "test": "abc"})
    text = refusal(more)
    assert "test/ has classes that the training folder lacks: c" in text
    assert "data.split_folders to pool" in text
    assert "data.split_folders to classes" in text
    assert (
        said(read(more, classes=["a", "b"]))[("test", "c")] == 2
    )  # the rule unknown_label has the last word
    assert said(read(more, label_map={"c": "b"}))[("test", "b")] == 4


def test_a_class_folder_without_files_is_not_a_class(tmp_path: Path) -> None:
    root = write_splits(tmp_path, {"train": "ab", "test": "ab"})
    (root / "test" / "c").mkdir()
    (root / "val").mkdir()
    assert {sample.given_split for sample in read(root)} == {"train", "test"}


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"train": "ab", "val": "ab", "test": ""}, "Move test/ out of data.path"),
        ({"train": "ab", "test": ""}, "cuts val and test from it"),
        ({"train": "", "test": ""}, "so their classes are unknown"),
    ],
)
def test_a_split_folder_with_images_but_no_class_folders_is_refused(
    tmp_path: Path, splits: dict[str, str], expected: str
) -> None:
    text = refusal(write_splits(tmp_path, splits))
    assert "test/ has files (0.png) without class folders" in text
    assert expected in text
    assert "pool" not in text  # it would not help


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"train": "ab", "test": "ab", "extra": "ab"}, "beside them are extra"),
        ({"train": "ab", "val": "ab", "dev": "ab"}, "dev, val are all for val"),
        ({"val": "ab", "test": "ab"}, "none of them is for training"),
    ],
)
def test_split_folders_that_contradict_each_other_are_refused(
    tmp_path: Path, splits: dict[str, str], expected: str
) -> None:
    assert expected in refusal(write_splits(tmp_path, splits))


def test_split_folders_of_classes_have_no_columns(tmp_path: Path) -> None:
    assert "data.split_column is 'part'" in refusal(
        write_splits(tmp_path, THREE), split_column="part"
    )


# copies in several given splits


def test_clean_keeps_the_test_copy_of_equal_images_and_reports_the_leak(tmp_path: Path) -> None:
    root = write_splits(tmp_path, THREE)
    for split in ("train", "val"):
        (root / split / "a" / "copy.png").write_bytes((root / "test" / "a" / "0.png").read_bytes())
    (root / "train" / "b" / "copy.png").write_bytes((root / "val" / "b" / "0.png").read_bytes())
    data = data_params(root)
    data = with_given_split(data)[0]
    cleaned = cleaned_by(partial(read_samples, data), CLEAN, data.task)
    assert {row["source"]: row["detail"] for row in cleaned.quarantine.to_pylist()} == {
        "train/a/copy.png": "the same pixels as test/a/0.png, which is in the given split test",
        "val/a/copy.png": "the same pixels as test/a/0.png, which is in the given split test",
        "train/b/copy.png": "the same pixels as val/b/0.png, which is in the given split val",
    }
    assert "copies of rows in another given split: 3; the copy in test" in cleaned.summary()


def test_copies_inside_one_given_split_are_not_a_leak(tmp_path: Path) -> None:
    root = write_splits(tmp_path, THREE)
    (root / "train" / "a" / "copy.png").write_bytes((root / "train" / "a" / "0.png").read_bytes())
    data = data_params(root)
    data = with_given_split(data)[0]
    cleaned = cleaned_by(partial(read_samples, data), CLEAN, data.task)
    assert [row["detail"] for row in cleaned.quarantine.to_pylist()] == [
        "the same pixels as train/a/0.png"
    ]
    assert "another given split" not in cleaned.summary()


def test_clean_keeps_the_test_copy_of_rows_with_one_id_and_reports_the_leak(
    tmp_path: Path,
) -> None:
    rows = {
        "id": [100 * row for row in range(30)],
        "a": [float(7 * row % 31) for row in range(30)],
        "target": [row * 5 % 29 for row in range(30)],
    }
    table = pa.table(rows)
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pq.write_table(
        pa.concat_tables([table.slice(0, 2), pa.table({"id": [1], "a": [99.0], "target": [1]})]),
        tmp_path / "test-00000-of-00001.parquet",
    )
    data = raw_files.data_params(tmp_path)
    found = clean_table(read_raw_table(find_table(data)), with_given_split(data)[0], CLEAN).cleaned
    assert Counter(found.rows["given_split"].to_pylist()) == {"train": 28, "test": 3}
    assert [row["detail"] for row in found.quarantine.to_pylist()] == [
        f"'id' repeats: the same row as {row}, which is in the given split test" for row in range(2)
    ]
    assert "copies of rows in another given split: 2" in found.summary()


def test_split_marks_equal_rows_of_a_table_that_are_in_two_given_splits(tmp_path: Path) -> None:
    rows = {"a": [row % 7 for row in range(30)], "target": [row % 7 * 5 for row in range(30)]}
    table = pa.table(rows)
    pq.write_table(table, tmp_path / "train.parquet")
    pq.write_table(table.slice(0, 2), tmp_path / "val.parquet")
    pq.write_table(pa.table({"a": [99], "target": [1]}), tmp_path / "test.parquet")
    data = raw_files.data_params(tmp_path)
    found = clean_table(read_raw_table(find_table(data)), with_given_split(data)[0], CLEAN).cleaned
    assert found.rows.num_rows == 33
    split = split_rows(found.rows, PROJECT.split, seed=0)
    assert split.way == "given"
    assert split.leaks.shared["sha256"]["train/val"].values == 2
    leaked = split.rows.filter(split.rows["leaked"])
    assert leaked["split"].to_pylist() == ["val", "val"]


def test_the_split_of_shards_is_not_an_input_and_does_not_change_row_ids(tmp_path: Path) -> None:
    rows = {
        "a": [float(7 * row % 31) for row in range(30)],
        "target": [row * 5 % 29 for row in range(30)],
    }
    pq.write_table(pa.table(rows).slice(0, 20), tmp_path / "train.parquet")
    pq.write_table(pa.table(rows).slice(20), tmp_path / "test.parquet")
    given, pooled = (
        clean_table(read_raw_table(find_table(data)), with_given_split(data)[0], CLEAN)
        for data in (
            raw_files.data_params(tmp_path),
            raw_files.data_params(tmp_path, split_folders="pool"),
        )
    )
    assert (
        [column.name for column in given.types] == [column.name for column in pooled.types] == ["a"]
    )
    assert given.cleaned.rows["id"] == pooled.cleaned.rows["id"]
    assert set(pooled.cleaned.rows["given_split"].to_pylist()) == {None}
