"""Tests of given splits: folders and Parquet shards with the names of splits."""

import json
import zipfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.raw_tables import column_names, read_raw_table
from slipway.data.sources.samples import GIVEN_SPLIT, RawSample
from slipway.data.sources.sources import find_layout, read_samples, with_given_split
from slipway.data.tables.cleaning import clean_table
from slipway.data.tables.source import find_table
from slipway.system.errors import DataError
from tests.data import raw_files
from tests.data.pictures import CLEAN, IMAGE_TYPE, cleaned_by, data_params, picture

THREE = {"train": "ab", "val": "ab", "test": "ab"}


def write_splits(root: Path, splits: Mapping[str, str]) -> Path:
    """Write two images into each class folder; a letter is a class, "" the split folder itself."""
    seed = 0
    for split, classes in splits.items():
        for label in classes or [""]:
            (root / split / label).mkdir(parents=True)
            for index in range(2):
                (root / split / label / f"{index}.png").write_bytes(picture(seed := seed + 1))
    return root


def read(root: Path, **changes: Any) -> list[RawSample]:
    """Return the samples as `clean` reads them."""
    data = data_params(root, **changes)
    return list(read_samples(with_given_split(data)[0]))


def said(samples: list[RawSample]) -> Counter[tuple[str | None, str | None]]:
    """Return the number of rows of each split and class."""
    return Counter((sample.given_split, sample.label) for sample in samples)


def refusal(root: Path, **changes: Any) -> str:
    with pytest.raises(DataError) as raised:
        read(root, **changes)
    return str(raised.value)


def described(root: Path, **changes: Any) -> str:
    data = data_params(root, **changes)
    samples = read(root, **changes)
    columns = {"given_split": [sample.given_split for sample in samples]}
    rows = pa.table(columns | {"time": [sample.time for sample in samples]})
    return find_layout(data).described(rows)


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


# metadata of a Hugging Face imagefolder


def write_metadata(
    folder: Path, names: list[str], labels: list[Any], ending: str = "csv", column: str = "label"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(zip(names, labels, strict=True))
    if ending == "csv":
        (folder / "metadata.csv").write_text(
            "\n".join([f"file_name,{column}", *(f"{name},{label}" for name, label in rows)]) + "\n"
        )
    else:
        lines = [json.dumps({"file_name": name, column: label}) for name, label in rows]
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    for index, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(1000 * len(folder.name) + index))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_metadata_at_the_top_names_images_in_file_name(tmp_path: Path, ending: str) -> None:
    write_metadata(tmp_path, ["1.png", "more/2.png"], ["a", "b"], ending)
    assert [(sample.source, sample.label, sample.fault) for sample in read(tmp_path)] == [
        ("0:1.png", "a", None),
        ("1:more/2.png", "b", None),
    ]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_metadata_in_each_split_folder_gives_labels_and_splits(tmp_path: Path, ending: str) -> None:
    write_metadata(tmp_path / "train", ["1.png", "2.png"], ["a", "b"], ending)
    write_metadata(tmp_path / "test", ["1.png"], ["a"], ending)
    samples = read(tmp_path)
    assert [(sample.source, sample.given_split, sample.label) for sample in samples] == [
        ("0:test/1.png", "test", "a"),
        ("1:train/1.png", "train", "a"),
        ("2:train/2.png", "train", "b"),
    ]
    assert all(sample.payload for sample in samples)
    data = data_params(tmp_path)
    assert [sample.payload for sample in read_samples(data, ["2:train/2.png"])] == [
        samples[2].payload
    ]


def test_metadata_with_numbers_is_read_for_image_regression(tmp_path: Path) -> None:
    write_metadata(tmp_path / "train", ["1.png"], [1.5], "jsonl", "count")
    write_metadata(tmp_path / "val", ["1.png"], [2], "jsonl", "count")
    samples = read(tmp_path, task="image_regression", target_column="count")
    assert [(sample.given_split, sample.target) for sample in samples] == [
        ("train", 1.5),
        ("val", 2.0),
    ]


def test_metadata_at_the_top_of_split_folders_gives_the_split_by_the_path(tmp_path: Path) -> None:
    write_metadata(tmp_path, ["train/1.png", "test/1.png", "lost.png"], ["a", "b", "a"])
    samples = read(tmp_path)
    assert [sample.given_split for sample in samples] == ["train", "test", None]
    assert samples[2].fault is not None
    assert samples[2].fault.rule == "bad_split"
    assert "no split folder" in samples[2].fault.detail
    assert [sample.given_split for sample in read(tmp_path, split_folders="pool")] == [None] * 3


def test_a_split_folder_without_metadata_beside_one_with_it_is_refused(tmp_path: Path) -> None:
    write_metadata(tmp_path / "train", ["1.png"], ["a"])
    write_splits(tmp_path, {"test": ""})
    assert "test/ has files (0.png) without class folders and no metadata.csv" in refusal(tmp_path)


def test_metadata_and_class_folders_are_not_mixed(tmp_path: Path) -> None:
    write_metadata(tmp_path / "train", ["1.png"], ["a"])
    write_splits(tmp_path, {"test": "ab"})
    assert "train has a table (metadata.csv), test has class folders" in refusal(tmp_path)


def test_a_bad_line_of_metadata_is_one_bad_row(tmp_path: Path) -> None:
    write_metadata(tmp_path, ["1.png"], ["a"], "jsonl")
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write('\n[1]\n{"file_name": "1.png"}\n{"file_name": \n')
    faults = [sample.fault.rule if sample.fault else None for sample in read(tmp_path)]
    assert faults == [None, "malformed_row", "missing_label", "malformed_row"]
    raw = read_raw_table(tmp_path / "metadata.jsonl")
    assert (list(raw.columns), raw.numbers.tolist(), len(raw.malformed)) == (
        ["file_name", "label"],
        [0, 2],
        2,
    )


@pytest.mark.parametrize(
    "text", ['"\\udcff"', '{"\\udcff": 1}', "[" * 100_000], ids=["cell", "key", "nested"]
)
def test_json_that_cannot_be_stored_is_one_bad_row(text: str, tmp_path: Path) -> None:
    write_metadata(tmp_path, ["1.png"], ["\U0001f600"], "jsonl")
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write(f'\n{{"file_name": "1.png", "label": {text}}}\n')
    samples = read(tmp_path)
    assert [sample.label for sample in samples] == ["\U0001f600", None]
    assert samples[1].fault is not None
    assert samples[1].fault.rule == "malformed_row"
    assert [number for number, _ in read_raw_table(tmp_path / "metadata.jsonl").malformed] == [1]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (f'{{"file_name": "1.png", "label": 1{"0" * 400}}}', "not_a_number"),
        ('{"file_name": {"path": 3}, "label": 1}', "missing_image"),
    ],
)
def test_json_of_an_unexpected_type_is_one_bad_row(line: str, rule: str, tmp_path: Path) -> None:
    write_metadata(tmp_path, ["1.png"], [1], "jsonl")
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    faults = [sample.fault for sample in read(tmp_path, task="image_regression")]
    assert [fault.rule if fault else None for fault in faults] == [None, rule]
    assert len(read_raw_table(tmp_path / "metadata.jsonl").numbers) == 2


def test_a_row_that_names_the_folder_itself_is_one_bad_row(tmp_path: Path) -> None:
    write_metadata(tmp_path, ["train/1.png", "test/1.png"], ["a", "b"])
    with (tmp_path / "metadata.csv").open("a") as file:
        file.write(".,a\n")
    faults = [sample.fault.rule if sample.fault else None for sample in read(tmp_path)]
    assert faults == [None, None, "bad_split"]


def test_only_metadata_tables_use_file_name_as_the_image_column(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("file_name,label\n1.png,a\n")
    assert "data.image_column is 'image', which is not there" in refusal(tmp_path)


# Parquet shards


def write_shard(path: Path, seeds: list[int], **columns: list[Any]) -> Path:
    images = pa.array([{"bytes": picture(seed), "path": None} for seed in seeds], IMAGE_TYPE)
    labels = ["ab"[seed % 2] for seed in seeds]
    pq.write_table(pa.table({"image": images, "label": labels, **columns}), path)
    return path


def test_shards_as_the_hub_names_them_are_the_given_split(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00002.parquet", [1, 2])
    write_shard(tmp_path / "train-00001-of-00002.parquet", [3])
    write_shard(tmp_path / "test-00000-of-00001.parquet", [4])
    samples = read(tmp_path)
    assert [(sample.source, sample.given_split) for sample in samples] == [
        ("0", "test"),
        ("1", "train"),
        ("2", "train"),
        ("3", "train"),
    ]
    assert [sample.payload for sample in read_samples(data_params(tmp_path), ["3"])] == [picture(3)]
    assert (
        "train-00000-of-00002.parquet + train-00001-of-00002.parquet -> train (3 rows)"
        in described(tmp_path)
    )


def test_clean_reports_that_a_missing_val_is_cut_by_time(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00001.parquet", [1, 2], day=[1.0, 2.0])
    write_shard(tmp_path / "test-00000-of-00001.parquet", [3], day=[3.0])
    assert "; `split` cuts val from train by time. " in described(tmp_path, time_column="day")
    assert "; `split` cuts val from train. " in described(tmp_path)


def test_a_clone_of_the_hub_is_read_as_the_shards_in_its_only_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs")
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "train-00000-of-00001.parquet", [1, 2])
    write_shard(tmp_path / "data" / "test-00000-of-00001.parquet", [3])
    samples = read(tmp_path)
    assert [(sample.label, sample.given_split) for sample in samples] == [
        ("b", "test"),
        ("b", "train"),
        ("a", "train"),
    ]
    assert find_table(data_params(tmp_path, task="table_classification")) == tmp_path / "data"


def test_an_only_folder_with_images_beside_tables_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    write_shard(tmp_path / "cat" / "notes.parquet", [1])
    (tmp_path / "cat" / "1.png").write_bytes(picture(1))
    assert [sample.label for sample in read(tmp_path)] == ["cat", "cat"]


@pytest.mark.parametrize(
    "names", [("part-0", "part-1"), ("train-00000-of-00002", "train-00001-of-00002")]
)
def test_shards_that_name_fewer_than_two_splits_are_one_table(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    for seed, name in enumerate(names):
        write_shard(tmp_path / f"{name}.parquet", [seed])
    assert [(sample.source, sample.given_split) for sample in read(tmp_path)] == [
        ("0", None),
        ("1", None),
    ]


def test_error_names_shards_with_different_columns(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [1])
    write_shard(tmp_path / "b.parquet", [2], size=[3])
    pq.write_table(pa.table({"image": [b""], "label": [1]}), tmp_path / "c.parquet")
    text = refusal(tmp_path)
    assert "b.parquet: also has size" in text
    assert "c.parquet: image is binary, not struct" in text
    assert "  a.parquet: " not in text


def test_error_names_a_missing_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00003.parquet", [1])
    write_shard(tmp_path / "train-00002-of-00003.parquet", [2])
    assert "lacks the shards train-00001-of-00003" in refusal(tmp_path)


def test_a_shard_without_a_split_beside_others_is_refused_or_pooled(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "test", "unsupervised")):
        write_shard(tmp_path / f"{name}-00000-of-00001.parquet", [seed])
    assert "unsupervised-00000-of-00001.parquet name no split" in refusal(tmp_path)
    assert [sample.given_split for sample in read(tmp_path, split_folders="pool")] == [None] * 3


def test_the_shards_of_a_table_are_joined_with_the_split_that_their_names_give(
    tmp_path: Path,
) -> None:
    pq.write_table(
        pa.table({"a": [1.0, 2.0], "target": [1, 2]}), tmp_path / "train-00000-of-00001.parquet"
    )
    pq.write_table(pa.table({"a": [3.0], "target": [3]}), tmp_path / "test-00000-of-00001.parquet")
    table = find_table(data_params(tmp_path, task="table_regression"))
    assert column_names(table) == ["a", "target"]
    raw = read_raw_table(table)
    given = raw.columns[GIVEN_SPLIT]
    assert given.values.take(pa.array(given.codes)).to_pylist() == ["test", "train", "train"]
    assert raw.columns["a"].values.take(pa.array(raw.columns["a"].codes)).to_pylist() == [
        3.0,
        1.0,
        2.0,
    ]
    assert list(read_raw_table(table, ["a"]).columns) == ["a"]


def test_a_split_column_overrides_the_names_of_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", [1], part=["test"])
    write_shard(tmp_path / "test.parquet", [2], part=["train"])
    assert [sample.given_split for sample in read(tmp_path, split_column="part")] == [
        "train",
        "test",
    ]


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


def test_clean_keeps_the_test_copy_of_equal_rows_and_reports_the_leak(
    tmp_path: Path,
) -> None:
    rows = {
        "a": [float(7 * row % 31) for row in range(30)],
        "target": [row * 5 % 29 for row in range(30)],
    }
    table = pa.table(rows)
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pq.write_table(
        pa.concat_tables([table.slice(0, 2), pa.table({"a": [99.0], "target": [1]})]),
        tmp_path / "test-00000-of-00001.parquet",
    )
    data = raw_files.data_params(tmp_path)
    found = clean_table(read_raw_table(find_table(data)), with_given_split(data)[0], CLEAN).cleaned
    assert Counter(found.rows["given_split"].to_pylist()) == {"train": 28, "test": 3}
    assert [row["detail"] for row in found.quarantine.to_pylist()] == [
        f"the same row as {row}, which is in the given split test" for row in range(2)
    ]


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
