"""A merged data set holds every base row and every new row once, read through `data.path`."""

import csv
import os
import shutil
import stat
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slipway.config.sections import DataParams
from slipway.data.merge.__main__ import main, merge, next_command
from slipway.data.merge.new_rows import read_recent_mark
from slipway.data.sources.raw_tables import COLLECTED as MARK
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from slipway.system.errors import DataError
from tests.data import raw_files
from tests.data.merge.merge_cases import counts, write_base_table, write_collected_table
from tests.data.pictures import IMAGE_TYPE, data_params, picture
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
