"""The metadata of a Hugging Face imagefolder names images, labels and splits."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.sources.sources import read_samples
from tests.data.pictures import data_params, picture
from tests.data.sources.split_folders import read, refusal, write_splits

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
