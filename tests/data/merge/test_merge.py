"""A merged data set holds every base row and every new row once, read through `data.path`."""

import csv
import math
import os
import shutil
import stat
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slipway.config.sections import DataParams
from slipway.data.merge.__main__ import main, merge, next_command
from slipway.data.merge.new_rows import MergeReport, read_recent_mark
from slipway.data.sources.raw_tables import COLLECTED as MARK
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from slipway.system.errors import DataError
from tests.data import raw_files
from tests.data.pictures import IMAGE_TYPE, data_params, picture
from tests.data.raw_files import cleaned, said, write_csv
from tests.project_params import PROJECT

OLD = {seed: ("cat", "dog")[seed % 2] for seed in range(6)}
FORMS = ("folder", "paths.csv", "paths.parquet", "bytes.parquet", "folder with a table")


def base_images(folder: Path, form: str) -> Path:
    """Write the same six pictures in each layout that `data.path` accepts."""
    folder.mkdir()
    if form == "folder":
        for seed, label in OLD.items():
            (folder / label).mkdir(exist_ok=True)
            (folder / label / f"{seed}.png").write_bytes(picture(seed))
        return folder
    if form == "bytes.parquet":
        images = pa.array([{"bytes": picture(seed), "path": None} for seed in OLD], IMAGE_TYPE)
        pq.write_table(
            pa.table(
                {"image": images, "label": list(OLD.values()), "site": [f"s{seed}" for seed in OLD]}
            ),
            folder / form,
        )
        return folder / form
    (folder / "images").mkdir()
    for seed in OLD:
        (folder / "images" / f"{seed}.png").write_bytes(picture(seed))
    rows = [
        {"image": f"images/{seed}.png", "label": label, "site": f"s{seed}"}
        for seed, label in OLD.items()
    ]
    if form == "paths.parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / form)
        return folder / form
    with (folder / "paths.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "label", "site"])
        writer.writeheader()
        writer.writerows(rows)
    return folder if form == "folder with a table" else folder / form


def collected_images(path: Path, labels: dict[int, str | None]) -> Path:
    """Write collected images in the format of `slipway.traffic.collect`."""
    images = pa.array([{"bytes": picture(seed), "path": None} for seed in labels], IMAGE_TYPE)
    pq.write_table(
        pa.table({"image": images, "label": pa.array(list(labels.values()), pa.string())}), path
    )
    return path


def seeds_and_labels(samples: list[RawSample]) -> Counter[tuple[int, str | None]]:
    known = {picture(seed): seed for seed in range(20)}
    return Counter((known[sample.payload], sample.label) for sample in samples)


def read(data: DataParams, path: Path, **changes: Any) -> list[RawSample]:
    return list(read_samples(data.model_copy(update={"path": str(path)} | changes)))


def counts(report: MergeReport) -> tuple[int, int, int, int]:
    return report.num_base, report.num_added, report.num_duplicates, report.num_relabelled


@pytest.mark.parametrize("kind", ["images", "table"])
def test_a_merged_file_names_its_first_recent_row(tmp_path: Path, kind: str) -> None:
    out, again = tmp_path / "next.parquet", tmp_path / "again.parquet"
    if kind == "images":
        data = data_params(base_images(tmp_path / "base", "bytes.parquet"))
        new = collected_images(tmp_path / "new.parquet", {1: "dog", 7: "cat", 8: "dog", 9: "cat"})
    else:
        write_base_table(tmp_path / "base.csv")
        data = raw_files.data_params(tmp_path / "base.csv", "table_classification", "label")
        new = write_collected_table(tmp_path / "new.parquet")
    report = merge(data, new, out, recent_from=2)
    older = [index for index in report.added if index < 2]
    assert len(older) < len(report.added)
    assert read_recent_mark(out) == report.num_base + len(older)
    assert [read_recent_mark(path) for path in (new, tmp_path / "absent.parquet")] == [None, None]
    merge(data.model_copy(update={"path": str(out)}), new, again)
    assert read_recent_mark(again) == read_recent_mark(out)  # otherwise older rows count as recent


@pytest.mark.parametrize("form", FORMS)
def test_merge_keeps_each_image_once_in_every_layout(tmp_path: Path, form: str) -> None:
    data = data_params(base_images(tmp_path / "old", form))
    collected = collected_images(
        tmp_path / "collected.parquet", {2: "cat", 10: "dog", 11: "bird"}
    )  # 2 is there already
    out = tmp_path / "elsewhere" / "next.parquet"
    report = merge(data, collected, out)
    assert counts(report) == (6, 2, 1, 0)
    shutil.rmtree(tmp_path / "old")  # it holds all of them
    found = read(data, out)
    assert seeds_and_labels(found) == Counter([*OLD.items(), (10, "dog"), (11, "bird")])
    assert [sample.fault for sample in found] == [None] * 8
    table = pq.read_table(out)
    assert table[MARK].to_pylist() == [False] * 6 + [True] * 2
    if form != "folder":
        assert sorted(table["site"].to_pylist()[:6]) == [f"s{seed}" for seed in OLD]
        assert table["site"].to_pylist()[6:] == [None, None]


@pytest.mark.parametrize("kind", ["images", "table"])
def test_merge_omits_and_reports_a_column_of_unsupported_type(tmp_path: Path, kind: str) -> None:
    boxes = {"boxes": [[1, 2]] * 30, "label": ["cat", "dog"] * 15}
    if kind == "images":
        images = pa.array(
            [{"bytes": picture(seed), "path": None} for seed in range(30)], IMAGE_TYPE
        )
        pq.write_table(pa.table({"image": images} | boxes), tmp_path / "old.parquet")
        data, collected = (
            data_params(tmp_path / "old.parquet"),
            collected_images(tmp_path / "a.parquet", {50: "cat"}),
        )
    else:
        pq.write_table(
            pa.table({"a": [float(7 * row % 31) for row in range(30)]} | boxes),
            tmp_path / "old.parquet",
        )
        pq.write_table(pa.table({"a": [0.5], "label": ["cat"]}), tmp_path / "a.parquet")
        data, collected = (
            raw_files.data_params(tmp_path / "old.parquet", "table_classification", "label"),
            tmp_path / "a.parquet",
        )
    report = merge(data, collected, tmp_path / "next.parquet")
    (omitted,) = report.omitted
    assert "'boxes'" in omitted
    assert "boxes" not in pq.read_table(tmp_path / "next.parquet").column_names


def test_merging_again_adds_no_duplicate_and_takes_the_newer_label(tmp_path: Path) -> None:
    data = data_params(base_images(tmp_path / "old", "folder"))
    first = tmp_path / "first.parquet"
    merge(data, collected_images(tmp_path / "a.parquet", {10: "dog", 11: "bird"}), first)
    again = data.model_copy(update={"path": str(first)})
    report = merge(
        again, collected_images(tmp_path / "b.parquet", {10: "dog", 11: "cat", 12: None}), first
    )  # into its own place
    assert counts(report) == (8, 1, 2, 1)
    assert seeds_and_labels(read(data, first)) == Counter(
        [*OLD.items(), (10, "dog"), (11, "cat"), (12, None)]
    )
    assert pq.read_table(first)[MARK].to_pylist() == [False] * 6 + [True] * 3


def test_merge_keeps_and_reports_rows_with_conflicting_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_params(base_images(tmp_path / "old", "folder"))
    report = merge(
        data, collected_images(tmp_path / "a.parquet", {3: "cat"}), tmp_path / "next.parquet"
    )
    assert (counts(report), report.conflicts) == ((6, 1, 0, 0), ["dog/3.png"])
    assert seeds_and_labels(read(data, tmp_path / "next.parquet")) == Counter(
        [*OLD.items(), (3, "cat")]
    )


def test_merge_treats_mapped_spellings_of_a_label_as_one(tmp_path: Path) -> None:
    data = data_params(base_images(tmp_path / "old", "paths.csv"), label_map={"cat": "Cat"})
    report = merge(
        data, collected_images(tmp_path / "a.parquet", {2: "Cat"}), tmp_path / "next.parquet"
    )
    assert counts(report) == (6, 0, 1, 0)
    assert {label for _, label in seeds_and_labels(read(data, tmp_path / "next.parquet"))} == {
        "Cat",
        "dog",
    }


def test_numeric_classes_and_collected_texts_merge_into_one_column(tmp_path: Path) -> None:
    images = pa.array([{"bytes": picture(seed), "path": None} for seed in range(3)], IMAGE_TYPE)
    pq.write_table(pa.table({"image": images, "label": [0, 1, 2]}), tmp_path / "old.parquet")
    data = data_params(tmp_path / "old.parquet")
    report = merge(
        data, collected_images(tmp_path / "a.parquet", {1: "1", 5: "2"}), tmp_path / "next.parquet"
    )
    assert counts(report) == (3, 1, 1, 0)
    assert pq.read_table(tmp_path / "next.parquet")["label"].to_pylist() == ["0", "1", "2", "2"]


def test_merge_keeps_groups_weights_and_splits_and_gives_new_rows_own_groups(
    tmp_path: Path,
) -> None:
    images = pa.array([{"bytes": picture(seed), "path": None} for seed in range(3)], IMAGE_TYPE)
    facts = {
        "label": ["a", "b", "a"],
        "who": [7, 7, 8],
        "weight": [0.5, 2.0, 1.0],
        "part": ["train", "val", "test"],
        "day": [3, 1, 2],
    }
    pq.write_table(pa.table({"image": images} | facts), tmp_path / "old.parquet")
    columns = {
        "group_column": "who",
        "weight_column": "weight",
        "split_column": "part",
        "time_column": "day",
    }
    data = data_params(tmp_path / "old.parquet", **columns)
    out = tmp_path / "next.parquet"
    merge(data, collected_images(tmp_path / "a.parquet", {5: "a", 6: "b"}), out)
    found = read(data, out, time_column=None)
    assert [sample.fault for sample in found] == [None] * 5
    assert [sample.group for sample in found[:3]] == ["7", "7", "8"]
    assert len({sample.group for sample in found[3:]} - {"7", "8", None}) == 2
    assert [sample.weight for sample in found] == [0.5, 2.0, 1.0, 1.0, 1.0]
    assert [sample.given_split for sample in found] == ["train", "val", "test", "train", "train"]
    assert next_command(data, out) == f"slipway run data.path={out} data.time_column=null"


def test_merge_refuses_data_with_a_split_file_which_cannot_name_new_rows(tmp_path: Path) -> None:
    data = data_params(tmp_path, split_file="splits.csv")
    with pytest.raises(
        DataError, match=r"data.split_file 'splits.csv' names the rows of data.path"
    ):
        merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")


def test_merge_writes_the_split_of_folders_to_a_column_named_in_the_next_command(
    tmp_path: Path,
) -> None:
    for seed, place in enumerate(("train/cat", "train/dog", "test/cat", "test/dog")):
        (tmp_path / "old" / place).mkdir(parents=True)
        (tmp_path / "old" / place / f"{seed}.png").write_bytes(picture(seed))
    data, out = data_params(tmp_path / "old"), tmp_path / "next.parquet"
    merge(data, collected_images(tmp_path / "a.parquet", {5: "cat"}), out)
    assert next_command(data, out) == f"slipway run data.path={out} data.split_column=slipway_split"
    found = read(data, out, split_column="slipway_split")
    assert [(sample.label, sample.given_split) for sample in found] == [
        ("cat", "test"),
        ("dog", "test"),
        ("cat", "train"),
        ("dog", "train"),
        ("cat", "train"),
    ]


def test_merge_writes_the_split_of_shards_to_a_column(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for split, numbers in {"train": [1.5, 2.5, 3.5], "test": [4.5, 5.5]}.items():
        cells = {"a": numbers, "label": ["x", "y", "x"][: len(numbers)]}
        pq.write_table(pa.table(cells), tmp_path / "old" / f"{split}-00000-of-00001.parquet")
    pq.write_table(pa.table({"a": [9.5], "label": ["y"]}), tmp_path / "new.parquet")
    out = tmp_path / "next.parquet"
    merge(
        raw_files.data_params(tmp_path / "old", "table_classification", "label"),
        tmp_path / "new.parquet",
        out,
    )
    assert pq.read_table(out)["slipway_split"].to_pylist() == [
        "test",
        "test",
        "train",
        "train",
        "train",
        "train",
    ]


def test_base_rows_that_clean_refuses_stay_refused_after_a_merge(tmp_path: Path) -> None:
    path = base_images(tmp_path / "old", "paths.csv")
    path.write_text(path.read_text() + "images/none.png,cat,s\nimages/1.png,,s\nonly\n")
    data = data_params(path)
    rules = [sample.fault.rule for sample in read(data, path) if sample.fault]
    assert len(rules) == 3
    report = merge(
        data, collected_images(tmp_path / "a.parquet", {10: "cat"}), tmp_path / "next.parquet"
    )
    assert counts(report)[:2] == (9, 1)
    found = read(data, tmp_path / "next.parquet")
    assert sum(sample.fault is not None for sample in found) == 3
    assert seeds_and_labels([sample for sample in found if sample.fault is None]) == Counter(
        [*OLD.items(), (10, "cat")]
    )


def write_base_table(path: Path, num_rows: int = 30, stored: str = "csv") -> Path:
    """Inputs a, colour and yes; a constant, a twin of a, a row index, and the target."""
    rows = [
        {
            "": str(row), "a": f"{(7 * row) % 31}.5",
            "colour": ("red", "blue")[row % 7 < 3], "yes": ("yes", "no")[row % 3 == 0], "same": "x",
            "twin": f"{(7 * row) % 31}.50", "label": ("1", "2")[row % 2],
        }
        for row in range(num_rows)
    ]  # fmt: skip
    if stored == "csv":
        return write_csv(
            path, "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n"
        )
    typed = [
        row
        | {
            "a": float(row["a"]),
            "twin": float(row["twin"]),
            "yes": row["yes"] == "yes",
            "label": int(row["label"]),
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(typed), path)
    return path


def write_collected_table(path: Path) -> Path:
    """Write typed inputs in the format of `slipway.traffic.collect`; row 0 equals a base row."""
    columns = {
        "a": [0.5, 100.25, None],
        "colour": ["blue", "red", "blue"],
        "yes": [False, True, True],
    }
    pq.write_table(pa.table(columns | {"label": ["1", "2", "1"]}), path)
    return path


@pytest.mark.parametrize("stored", ["csv", "parquet"])
def test_merging_a_table_keeps_the_ids_of_base_rows_and_the_inputs(
    tmp_path: Path, stored: str
) -> None:
    old = write_base_table(tmp_path / f"old.{stored}", stored=stored)
    data = raw_files.data_params(old, "table_classification", "label")
    out = tmp_path / "next.parquet"
    report = merge(data, write_collected_table(tmp_path / "collected.parquet"), out)
    assert counts(report) == (30, 2, 1, 0)
    before, after = cleaned(data), cleaned(data.model_copy(update={"path": str(out)}))
    assert [(each.name, each.kind) for each in after.types] == [
        (each.name, each.kind) for each in before.types
    ]
    labels, merged_labels = (
        dict(zip(*(table.cleaned.rows[name].to_pylist() for name in ("id", "label")), strict=True))
        for table in (before, after)
    )
    assert len(merged_labels) == 32
    assert (
        labels.items() < merged_labels.items()
    )  # by the same ids, so that a stable split moves none of them
    assert pq.read_table(out)[MARK].to_pylist() == [False] * 30 + [True] * 2


def merged_columns(
    tmp_path: Path, rows: list[dict[str, Any]], new: dict[str, list[Any]], **changes: Any
) -> tuple[list[str], list[str]]:
    """Return the inputs before and after rows with other labels are merged into a table."""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    data = raw_files.data_params(
        tmp_path / "old.parquet", "table_classification", "label", **changes
    )
    merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    before, after = (
        cleaned(data),
        cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")})),
    )
    old, all_ids = (set(table.cleaned.rows["id"].to_pylist()) for table in (before, after))
    assert old < all_ids
    return [each.name for each in before.types], [each.name for each in after.types]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (lambda row: ("a", "b")[row % 2], "other names of the classes"),
        (lambda row: row + 5, "a counter of the rows"),
        (lambda row: ("1", "1.0")[row % 2], "one value in two forms"),
        (lambda row: math.nan if row % 5 == 0 else float(row % 4), "a twin with missing cells"),
        (lambda row: ("true", "false")[row % 3 == 0], "a twin in other words"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merge_does_not_turn_ignored_columns_into_inputs(
    tmp_path: Path, cells: Callable[[int], Any], reason: str
) -> None:
    rows = [
        {
            "a": (7 * row) % 61 + 0.5, "c": math.nan if row % 5 == 0 else float(row % 4),
            "yes": ("yes", "no")[row % 3 == 0], "no input": cells(row), "label": str(row % 2),
        }
        for row in range(60)
    ]  # fmt: skip
    new: dict[str, list[Any]] = {
        "a": [0.25, 100.5],
        "c": [3.0, None],
        "yes": [True, False],
        "label": ["0", "1"],
    }
    before, after = merged_columns(tmp_path, rows, new)
    assert before == after == ["a", "c", "yes"], reason


@pytest.mark.parametrize(
    ("labels", "new_labels", "label_map"),
    [
        ([True, False], ["True", "False"], {}),
        (["Cat", "dog"], ["cat", "dog"], {"Cat": "cat"}),
        ([0, 1], ["0", "1"], {}),
    ],
    ids=["booleans", "spelling variants", "numbers"],
)
def test_merge_keeps_base_classes_and_ids_for_every_type_of_class_column(
    tmp_path: Path, labels: list[Any], new_labels: list[str], label_map: dict[str, str]
) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "b": float(row % 9), "label": labels[row % 2]}
        for row in range(60)
    ]
    merged_columns(
        tmp_path,
        rows,
        {"a": [0.25, 100.5], "b": [1.0, 2.0], "label": new_labels},
        label_map=label_map,
    )
    data = raw_files.data_params(
        tmp_path / "next.parquet", "table_classification", "label", label_map=label_map
    )
    assert set(cleaned(data).cleaned.rows["label"].to_pylist()) == set(new_labels)


def test_merge_accepts_base_rows_without_any_label(tmp_path: Path) -> None:
    rows = [{"a": (7 * row) % 61 + 0.5, "other": f"{row % 3}", "label": None} for row in range(60)]
    pq.write_table(
        pa.Table.from_pylist(
            rows, pa.schema([("a", pa.float64()), ("other", pa.string()), ("label", pa.string())])
        ),
        tmp_path / "o.parquet",
    )
    pq.write_table(pa.table({"a": [0.25], "label": ["0"]}), tmp_path / "new.parquet")
    data = raw_files.data_params(tmp_path / "o.parquet", "table_classification", "label")
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 1, 0, 0)


def test_merge_treats_a_date_in_two_forms_as_equal(tmp_path: Path) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "day": f"2020-01-{1 + row % 28:02d}", "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    pq.write_table(
        pa.table(
            {"a": [0.5, 7.5], "day": ["2020-01-01T00:00:00Z", "2020-02-01"], "label": ["0", "1"]}
        ),
        tmp_path / "new.parquet",
    )
    data = raw_files.data_params(tmp_path / "old.parquet", "table_classification", "label")
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 1, 1, 0)


@pytest.mark.parametrize(
    "labels",
    [["0", "1"], [None, "1"], ["1", None]],
    ids=["another truth", "the last has one", "the first has one"],
)
def test_merge_adds_a_new_row_once_if_it_is_written_in_two_forms(
    tmp_path: Path, labels: list[str | None]
) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "day": f"2020-01-{1 + row % 28:02d}", "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    forms = ["2021-05-05", "2021-05-05T00:00:00"]
    pq.write_table(
        pa.table({"a": [0.5, 0.5], "day": forms, "label": pa.array(labels, pa.string())}),
        tmp_path / "new.parquet",
    )
    data = raw_files.data_params(tmp_path / "old.parquet", "table_classification", "label")
    out = tmp_path / "next.parquet"
    assert counts(merge(data, tmp_path / "new.parquet", out)) == (60, 1, 1, 0)
    assert pq.read_table(out)["label"].to_pylist()[60:] == ["1"]
    again = data.model_copy(update={"path": str(out)})
    for _ in range(2):
        assert counts(merge(again, tmp_path / "new.parquet", out)) == (61, 0, 2, 0)


@pytest.mark.parametrize("stored", ["text", "numbers"])
def test_merge_compares_categories_as_text_and_numbers_by_value(
    tmp_path: Path, stored: str
) -> None:
    zips: list[Any] = ["0123", "456", "789"] if stored == "text" else [123, 456, 789]
    rows = [
        {"a": f"{(7 * row) % 61}.50", "zip": zips[row % 3], "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    new: dict[str, list[Any]] = {
        "a": [0.5, 7.5, 14.5],
        "zip": ["123" if stored == "text" else "0123", "456", None],
        "label": ["0", "1", "0"],
    }
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    data = raw_files.data_params(
        tmp_path / "old.parquet", "table_classification", "label", columns={"zip": said("category")}
    )
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 2, 1, 0)
    assert pq.read_table(tmp_path / "next.parquet")["zip"].to_pylist()[60:] == [new["zip"][0], None]


@pytest.mark.parametrize("umask", [0o022, 0o000])
@pytest.mark.parametrize("kind", ["images", "table"])
def test_only_the_owner_can_read_the_merged_file(tmp_path: Path, kind: str, umask: int) -> None:
    if kind == "images":
        data = data_params(base_images(tmp_path / "old", "folder"))
        collected = collected_images(tmp_path / "collected.parquet", {10: "cat"})
    else:
        data = raw_files.data_params(
            write_base_table(tmp_path / "old.csv"), "table_classification", "label"
        )
        collected = write_collected_table(tmp_path / "collected.parquet")
    before = os.umask(umask)
    try:
        merge(data, collected, tmp_path / "next.parquet")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "next.parquet").stat().st_mode) == 0o600


def test_merging_a_regression_table_keeps_its_targets(tmp_path: Path) -> None:
    data = raw_files.data_params(raw_files.numbered_csv(tmp_path / "old.csv"))
    pq.write_table(
        pa.table({"a": [0.5, 1.25], "b": [0.0, 3.0], "target": [0.0, 7.5]}),
        tmp_path / "collected.parquet",
    )
    report = merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    assert counts(report) == (30, 1, 1, 0)
    after = cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")}))
    before = cleaned(data).cleaned.rows["target"].to_pylist()
    assert Counter(after.cleaned.rows["target"].to_pylist()) == Counter([*before, 7.5])


def test_merge_keeps_column_kinds_that_the_user_corrected(tmp_path: Path) -> None:
    old = write_base_table(tmp_path / "old.csv")
    data = raw_files.data_params(
        old,
        "table_classification",
        "label",
        columns={"colour": said("category"), "same": said("ignore")},
    )
    merge(data, write_collected_table(tmp_path / "collected.parquet"), tmp_path / "next.parquet")
    before, after = (
        cleaned(data),
        cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")})),
    )
    assert [each.name for each in after.types] == [each.name for each in before.types]


def test_merge_refuses_tables_with_different_columns(tmp_path: Path) -> None:
    data = raw_files.data_params(raw_files.numbered_csv(tmp_path / "old.csv"))
    pq.write_table(
        pa.table({"a": [0.5], "c": [0.0], "target": [0.0]}), tmp_path / "collected.parquet"
    )
    with pytest.raises(DataError, match="do not both have the columns c"):
        merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    assert not (tmp_path / "next.parquet").exists()


def test_the_merge_command_reads_the_projects_data_even_from_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        archive.add(base_images(tmp_path / "old", "folder"), "old")
    params = PROJECT.model_dump(mode="json")
    params["data"] |= {"path": "old.tar"}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="write it with `slipway dataset collect`"):
        main(["next.parquet"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "collected.parquet").write_text("PAR1 and no end")
    with pytest.raises(
        DataError,
        match=r"^data/collected\.parquet is not a readable Parquet file \(.*\); write it with",
    ):
        main(["next.parquet"])
    collected_images(tmp_path / "data" / "collected.parquet", {3: "dog", 4: "dog", 10: "cat"})
    main(["next.parquet"])
    printed = capsys.readouterr().out
    assert "6 rows of .work/archives/" in printed
    assert "2 collected rows are in next.parquet" in printed
    assert "1 collected rows were there already" in printed
    assert "1 have another label in the base data, rows cat/4.png: both are kept" in printed
    assert printed.endswith("next: slipway run data.path=next.parquet\n")
    with pytest.raises(DataError, match=r"does not end in \.parquet"):
        main(["next.csv"])


def test_merge_writes_new_numbers_and_dates_in_the_notation_of_the_base_data(
    tmp_path: Path,
) -> None:
    lines = [f"{(7 * row) % 31}.5%,{row % 28 + 1:02}/12/2020,{row % 9}" for row in range(30)]
    base = write_csv(tmp_path / "t.csv", "\n".join(["rate,day,target", *lines, ""]))
    data = raw_files.data_params(base, date_format="%d/%m/%Y")
    new = {"rate": [0.5, 99.25], "day": ["2020-12-01", "2020-12-31"], "target": [0.0, 7.0]}
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "collected.parquet", out)
    assert (report.num_base, report.num_added) == (30, 1)
    merged = data.model_copy(update={"path": str(out)})
    before, after = cleaned(data), cleaned(merged)
    assert not len(after.cleaned.quarantine)
    cells = after.cells.to_pylist()
    assert {"rate": 99.25, "day": 18627.0} in [{k: c[k] for k in ("rate", "day")} for c in cells]
    ids = before.cleaned.rows["id"].to_pylist()
    assert set(ids) < set(after.cleaned.rows["id"].to_pylist())


def test_merge_compares_targets_with_units_and_thousands_separators_by_value(
    tmp_path: Path,
) -> None:
    rows = "".join(f'"{number},{number}50.25",{number}.5%\n' for number in range(1, 10))
    base = write_csv(tmp_path / "t.csv", f"price,target\n{rows}")
    data = raw_files.data_params(base, task="table_regression")
    new = {"price": [1150.25, 77.5], "target": [1.5, 8.25]}
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "collected.parquet", out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (9, 1, 1)
    assert pq.read_table(out)["target"].to_pylist()[-1] == "8.25%"
    after = cleaned(data.model_copy(update={"path": str(out)}))
    assert not len(after.cleaned.quarantine)
