"""Tests of raw samples: all layouts give equal records, and every fault is reported."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import count_samples, read_samples, skipped_text
from slipway.data.tables.source import find_table
from slipway.system.errors import DataError
from tests.data.pictures import data_params, picture, write_folder, write_parquet
from tests.data.sources.source_cases import read
from tests.project_params import PROJECT


def faults(samples: list[RawSample]) -> list[str | None]:
    return [sample.fault.rule if sample.fault else None for sample in samples]


def test_the_sub_folders_of_a_data_folder_are_the_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"dog": [picture(1)], "cat": [picture(2), picture(3)]})
    samples = read(tmp_path / "images")
    assert [(sample.source, sample.label) for sample in samples] == [
        ("cat/0.png", "cat"),
        ("cat/1.png", "cat"),
        ("dog/0.png", "dog"),
    ]
    assert samples[2].payload == picture(1)


def test_files_in_folders_inside_a_class_folder_belong_to_that_class(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat/indoors": [picture(1)]})
    assert [(sample.source, sample.label) for sample in read(tmp_path)] == [
        ("cat/indoors/0.png", "cat")
    ]


def test_a_parquet_file_of_images_gives_a_sample_for_each_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [picture(1), picture(2)], ["x", "y"])
    assert read(path) == [
        RawSample("0:0.png", picture(1), "x", None, None, None),
        RawSample("1:1.png", picture(2), "y", None, None, None),
    ]


def test_a_plain_binary_image_column_of_a_parquet_file_is_read(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": pa.array([picture(1)], pa.large_binary()), "label": ["x"]}),
        tmp_path / "a.parquet",
    )
    assert read(tmp_path / "a.parquet") == [RawSample("0", picture(1), "x", None, None, None)]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_paths_in_a_table_are_relative_to_the_table(tmp_path: Path, ending: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(picture(1))
    table = tmp_path / f"table.{ending}"
    if ending == "csv":
        table.write_text("image,label\nimages/1.png, cat\n")
    else:
        pq.write_table(pa.table({"image": ["images/1.png"], "label": ["cat"]}), table)
    assert read(table) == [RawSample("0:images/1.png", picture(1), "cat", None, None, None)]


def test_a_folder_with_one_table_at_its_top_is_that_table(tmp_path: Path) -> None:
    write_folder(tmp_path, {"images": [picture(1)]})
    (tmp_path / "counts.csv").write_text("image,label\nimages/0.png,cat\n")
    assert (
        read(tmp_path)
        == read(tmp_path / "counts.csv")
        == [RawSample("0:images/0.png", picture(1), "cat", None, None, None)]
    )


def test_error_for_a_folder_with_two_tables_names_both(tmp_path: Path) -> None:
    for name in ("a.csv", "b.parquet"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=r"2 tables \(a.csv, b.parquet\), expected one") as error:
        read(tmp_path)
    assert str(error.value).endswith("or list those to be joined in data.sources.")


@pytest.mark.parametrize(
    "name", ["../secret.png", "images/../../secret.png", "/etc/hostname", "..\\secret.png"]
)
def test_a_path_that_leads_out_of_the_folder_is_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.png").write_bytes(picture(1))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "table.csv").write_text(f"image,label\n{name},cat\n")
    samples = read(tmp_path / "inside" / "table.csv")
    assert faults(samples) == ["outside_folder"]
    assert samples[0].payload == b""


def test_error_for_a_missing_image_hints_at_the_same_file_one_folder_deeper(tmp_path: Path) -> None:
    write_folder(tmp_path, {"images": [picture(1)]})
    (tmp_path / "table.csv").write_text("image,label\n0.png,cat\n")
    fault = read(tmp_path / "table.csv")[0].fault
    assert fault is not None
    assert fault.rule == "missing_file"
    assert "images/0.png does" in fault.detail


@pytest.mark.parametrize(
    ("cell", "rule", "target"),
    [
        ("1.5", None, 1.5),
        (" -2e3 ", None, -2000.0),
        ("", "missing_target", None),
        ("many", "not_a_number", None),
        ("inf", "non_finite_target", None),
        ("nan", "non_finite_target", None),
    ],
)
def test_a_numeric_target_that_is_no_finite_number_is_a_fault(
    tmp_path: Path, cell: str, rule: str | None, target: float | None
) -> None:
    write_folder(tmp_path, {"images": [picture(1)]})
    (tmp_path / "table.csv").write_text(f"image,count\nimages/0.png,{cell}\n")
    [found] = read(tmp_path / "table.csv", task="image_regression", target_column="count")
    assert (faults([found]), found.target, found.label) == ([rule], target, None)


def test_labels_keep_leading_zeros_and_lose_surrounding_blanks(tmp_path: Path) -> None:
    write_folder(tmp_path, {"images": [picture(1)]})
    (tmp_path / "table.csv").write_text(
        "image,label\nimages/0.png,007\nimages/0.png,  \nimages/0.png, a b \n"
    )
    samples = read(tmp_path / "table.csv")
    assert [sample.label for sample in samples] == ["007", None, "a b"]
    assert faults(samples) == [None, "missing_label", None]


def test_numeric_class_labels_become_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [picture(1), picture(2)], [3.0, None])
    samples = read(path)
    assert [sample.label for sample in samples] == ["3", None]
    assert faults(samples) == [None, "missing_label"]


def test_an_empty_image_cell_is_a_fault(tmp_path: Path) -> None:
    assert faults(read(write_parquet(tmp_path / "a.parquet", [None], ["x"]))) == ["missing_image"]


def test_an_empty_group_is_a_fault_if_groups_are_used(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "a.parquet", [picture(1), picture(2)], ["x", "y"], person=["p1", None]
    )
    assert faults(read(path)) == [None, None]
    samples = read(path, group_column="person")
    assert faults(samples) == [None, "missing_group"]
    assert samples[0].group == "p1"


def test_a_row_with_too_few_columns_is_one_fault_and_the_other_rows_are_read(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, {"images": [picture(1)]})
    (tmp_path / "table.csv").write_text("image,label\nimages/0.png\nimages/0.png,x\n")
    assert faults(read(tmp_path / "table.csv")) == ["malformed_row", None]


def test_a_pipe_or_folder_is_a_fault_and_does_not_hang(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    assert faults(read(tmp_path)) == [None, "unreadable"]


def test_a_file_beside_the_class_folders_is_a_sample_without_a_label(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    (tmp_path / "stray.png").write_bytes(picture(2))
    (tmp_path / ".hidden").write_bytes(b"")
    assert [(sample.source, sample.label) for sample in read(tmp_path)] == [
        ("cat/0.png", "cat"),
        ("stray.png", None),
    ]
    assert faults(read(tmp_path)) == [None, "missing_label"]


@pytest.mark.parametrize("layout", ["folder", "parquet", "csv"])
def test_read_samples_reads_only_the_requested_sources(tmp_path: Path, layout: str) -> None:
    payloads = [picture(seed) for seed in range(600)]
    write_folder(tmp_path / "images", {"cat": payloads})
    path = tmp_path / "images"
    if layout == "parquet":
        path = write_parquet(tmp_path / "a.parquet", payloads, ["cat"] * 600)
    if layout == "csv":
        path = tmp_path / "a.csv"
        path.write_text(
            "image,label\n" + "".join(f"images/cat/{index}.png,cat\n" for index in range(600))
        )
    everything = read(path)
    wanted = [everything[index].source for index in (3, 299, 599)]
    again = list(read_samples(data_params(path), wanted))
    assert sorted(again, key=str) == sorted((everything[index] for index in (3, 299, 599)), key=str)
    assert len({sample.source for sample in everything}) == 600


@pytest.mark.parametrize(
    "key",
    sorted(
        set(PROJECT.data.model_dump())
        - {"path", "sources", "task", "image_column", "checksums", "split_file", "columns"}
        - {"archive_encoding", "sheet"}  # refused for a table
    ),
)
def test_the_bytes_of_a_source_depend_only_on_path_task_and_image_column(
    tmp_path: Path, key: str
) -> None:
    table = write_parquet(
        tmp_path / "a.parquet", [picture(1), picture(2)], ["1", "2"], other=["2", "1"]
    )
    changes = {
        "label_map": {"1": "one"},
        "classes": ["1", "3"],
        "engine": "ray",
        "split_folders": "pool",
        "encoding": "latin-1",
        "missing_values": ["?"],
        "date_format": "%d/%m/%Y",
        "decimal": ",",
        "thousands": "'",
        "text_columns": ["other"],
    }
    found = [
        (sample.source, sample.payload)
        for sample in read(table, **{key: changes.get(key, "other")})
    ]
    assert found == [(sample.source, sample.payload) for sample in read(table)]


def test_a_different_image_column_gives_different_bytes(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet", [picture(1)], ["1"], other=[picture(2)])
    assert [sample.payload for sample in read(table, image_column="other")] == [picture(2)]


def test_count_samples_returns_none_for_a_csv_which_it_would_have_to_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"cat": [picture(1), picture(2)]})
    (tmp_path / "a.csv").write_text("image,label\n")
    assert count_samples(data_params(tmp_path / "images")) == 2
    assert (
        count_samples(data_params(write_parquet(tmp_path / "a.parquet", [picture(1)], ["x"]))) == 1
    )
    assert count_samples(data_params(tmp_path / "a.csv")) is None


def _allocated_by_first_row(samples: Iterator[Any]) -> int:
    before = pa.total_allocated_bytes()
    next(samples)
    return int(pa.total_allocated_bytes() - before)


def test_reading_a_parquet_file_needs_less_memory_than_its_row_group(tmp_path: Path) -> None:
    path, size = tmp_path / "a.parquet", 40_000_000
    table = pa.table(
        {
            "image": pa.array([os.urandom(100_000) for _ in range(size // 100_000)], pa.binary()),
            "label": ["x"] * 400,
        }
    )
    pq.write_table(table, path, write_batch_size=16, use_dictionary=False)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    assert _allocated_by_first_row(read_samples(data_params(path))) < size / 2
    assert (
        _allocated_by_first_row(pq.ParquetFile(path).iter_batches(1)) > size / 2
    )  # what it would be otherwise


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: None, ["does not exist", "sub-folder per class"]),
        (lambda root: root.mkdir(), ["empty folder", "sub-folder per class"]),
        (
            lambda root: (root.mkdir(), (root / "a.png").touch()),
            ["1 files (a.png)", "no sub-folder"],
        ),
        (lambda root: (root / "cat").mkdir(parents=True), ["1 sub-folders (cat) without any file"]),
        (
            lambda root: root.write_text("x"),
            ["expected a folder, a .csv, .parquet or .jsonl file, or a .zip, .tar, .tar.gz"],
        ),
    ],
)
def test_a_path_that_holds_no_data_set_is_refused_with_what_was_found(
    tmp_path: Path, make: Any, words: list[str]
) -> None:
    make(tmp_path / "data")
    with pytest.raises(DataError) as raised:
        read(tmp_path / "data")
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("read_it", [count_samples, find_table])
def test_error_for_a_url_as_data_path_says_how_to_fetch_it(
    read_it: Callable[[DataParams], object],
) -> None:
    data = data_params(Path()).model_copy(update={"path": "s3://bucket/photos.zip"})
    with pytest.raises(
        DataError, match=r"is an address.*`dvc import-url s3://bucket/photos.zip data/NAME`"
    ):
        read_it(data)


@pytest.mark.parametrize("read_it", [count_samples, find_table])
def test_error_for_a_glob_as_data_path_proposes_data_sources(
    tmp_path: Path, read_it: Callable[[DataParams], object]
) -> None:
    with pytest.raises(DataError) as error:
        read_it(data_params(tmp_path / "2*.csv"))
    keys = f"set data.path to '{tmp_path}' and data.sources to ['2*.csv']."
    assert str(error.value).endswith(keys)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_error_for_a_csv_without_lines_calls_it_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match="is empty, expected a header and rows"):
        read(tmp_path / "a.csv")


def test_empty_lines_before_the_header_of_a_csv_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(picture(1))
    (tmp_path / "a.csv").write_text("\nimage,label\n1.png,cat\n")
    assert [(sample.source, sample.label) for sample in read(tmp_path / "a.csv")] == [
        ("0:1.png", "cat")
    ]


def test_a_link_to_a_parent_folder_is_refused_and_does_not_loop(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    (tmp_path / "cat" / "again").symlink_to(tmp_path)
    with pytest.raises(DataError, match="leads back to a folder above it"):
        read(tmp_path)


def test_a_linked_class_folder_is_read_only_if_it_lies_in_the_data(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path / "images", {"cat/indoors": [picture(1)]})
    (tmp_path / "images" / "dog").symlink_to(tmp_path / "images" / "cat" / "indoors")
    assert [sample.source for sample in read(tmp_path / "images")] == [
        "cat/indoors/0.png",
        "dog/0.png",
    ]
    write_folder(tmp_path / "elsewhere", {"cow": [picture(2)]})
    (tmp_path / "images" / "cow").symlink_to(tmp_path / "elsewhere" / "cow")
    with pytest.raises(DataError, match=r"images/cow' leads to '.*elsewhere/cow', which is not"):
        read(tmp_path / "images")


@pytest.mark.parametrize("layout", ["folder", "csv"])
def test_a_linked_file_outside_the_data_is_refused_unless_dvc_linked_it(
    tmp_path: Path, layout: str
) -> None:
    cached = tmp_path / "cache/files/md5/ab" / ("0" * 30)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(picture(1))
    (tmp_path / "secret.png").write_bytes(picture(2))
    write_folder(tmp_path / "images", {"cat": [picture(3)]})
    for name, target in (
        ("1.png", cached),
        ("2.png", tmp_path / "secret.png"),
        ("3.png", tmp_path / "images/cat/0.png"),
    ):
        (tmp_path / "images/cat" / name).symlink_to(target)
    path = tmp_path / "images"
    if layout == "csv":
        path = path / "a.csv"
        path.write_text("image,label\n" + "".join(f"cat/{index}.png,cat\n" for index in range(4)))
    samples = read(path)
    assert faults(samples) == [None, None, "outside_folder", None]
    assert samples[2].fault is not None
    assert "secret.png, which is not below" in samples[2].fault.detail


def test_hidden_files_of_a_folder_are_counted_in_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    assert skipped_text(data_params(tmp_path)) == ""
    (tmp_path / ".DS_Store").write_bytes(b"")
    assert skipped_text(data_params(tmp_path)) == "\nskipped: 1 hidden file (.DS_Store)"
    (tmp_path / "__MACOSX/cat").mkdir(parents=True)
    for name in (".DS_Store", "cat/.thumbs.db", "__MACOSX/cat/0.png"):
        (tmp_path / name).write_bytes(b"")
    assert skipped_text(data_params(tmp_path)) == "\nskipped: 3 hidden files (.DS_Store, ...)"
    assert len(read(tmp_path)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_file_name_that_is_not_utf8_is_found_by_its_escaped_source(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    Path(os.fsdecode(bytes(tmp_path / "cat" / "0.png") + b"\xff")).write_bytes(picture(2))
    sources = [sample.source for sample in read(tmp_path)]
    assert sources == ["cat/0.png", "cat/0.png\\xff"]
    [again] = read_samples(data_params(tmp_path), sources[1:])
    assert again.payload == picture(2)


def test_class_folders_are_refused_for_a_task_with_a_numeric_target(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    with pytest.raises(DataError, match="'image_regression'"):
        read(tmp_path, task="image_regression")
