"""A split that the user gives is used unchanged, completed from train, and checked for leaks."""

from typing import Any

import pyarrow as pa
import pytest

from slipway.data.splits.report import report, summary
from slipway.reports.pages.split_page import split_page
from slipway.system.errors import DataError
from tests.data.pictures import row
from tests.data.splits.split_cases import own, places, split
from tests.project_params import split_params


def test_the_given_split_is_used_unchanged() -> None:
    rows = own()
    found = split(rows)
    assert found.way == "given"
    assert places(rows) == {entry["id"]: entry["given_split"] for entry in rows}
    assert report(found, 7)["fractions"] is None


def test_error_names_a_row_without_a_given_split() -> None:
    rows = own()
    rows[3]["given_split"], rows[4]["given_split"] = None, "validation"
    with pytest.raises(DataError) as raised:
        split(rows)
    assert "2 of 80 rows have no split of your own" in str(raised.value)
    assert "3: None" in str(raised.value)
    assert "4: 'validation'" in str(raised.value)


def test_error_names_a_leak_in_the_given_split() -> None:
    rows = own()
    rows[0]["cluster"] = rows[6]["cluster"] = "twin"
    with pytest.raises(
        DataError,
        match=r"1 rows of val and test leak[^$]*near duplicates in train/test: 1 \(twin\)",
    ):
        split(rows, split_params(on_leak="fail"))


def test_on_leak_report_marks_leaked_rows_of_val_and_test() -> None:
    rows = own()
    for place in (0, 4, 6):
        rows[place]["group"] = "shared"
    found = split(rows, split_params(on_leak="report"))
    leaked = found.rows.filter(found.rows["leaked"])
    assert sorted(leaked["split"].to_pylist()) == ["test", "val"]
    described = report(found, 7)
    assert described["leaks"]["shared"]["group"] == {
        pair: {"values": 1, "examples": ["shared"]} for pair in PAIRS
    }
    assert "leaked 2 rows" in summary(described)


PAIRS = ("train/val", "train/test", "val/test")


def test_a_class_missing_only_in_a_given_test_split_is_reported() -> None:
    rows = [
        entry for entry in own() if not (entry["given_split"] == "test" and entry["label"] == "a")
    ]
    found = split(rows)
    assert report(found, 7)["classes_missing"] == {"test": ["a"]}
    assert "test lacks the classes a" in summary(report(found, 7))


def test_a_class_that_a_given_train_split_lacks_is_refused() -> None:
    rows = [
        entry for entry in own() if not (entry["given_split"] == "train" and entry["label"] == "a")
    ]
    with pytest.raises(DataError, match="1 of 2 classes lack rows in train"):
        split(rows)


def lacking(*splits: str, **changes: Any) -> list[dict[str, Any]]:
    """Return a user's split in which the rows of the given splits are for training instead."""
    return [
        entry | {"given_split": "train"} if entry["given_split"] in splits else entry
        for entry in own(**changes)
    ]


@pytest.mark.parametrize("assignment", ["stable", "exact"])
@pytest.mark.parametrize("missing", ["val", "test"])
def test_the_only_held_out_split_is_test_and_val_is_cut_from_train_and_reported(
    missing: str, assignment: str
) -> None:
    rows = lacking(missing)
    found = split(rows, split_params(assignment=assignment))
    parts = places(rows, split_params(assignment=assignment))
    cut = [entry for entry in rows if parts[entry["id"]] == "val"]
    assert {entry["given_split"] for entry in cut} == {"train"}
    held_out = {entry["id"] for entry in rows if entry["given_split"] != "train"}
    assert {parts[name] for name in held_out} == {"test"}
    assert len(held_out) == list(parts.values()).count("test")
    assert 3 <= len(cut) <= 20  # 0.15 of 0.85 of 60 rows are 10.6
    described = report(found, 7)
    assert described["cut_from_train"] == ["val"]
    assert described["val_is_test"] == (missing == "test")
    assert "val is cut from train" in summary(described)
    is_named = "the only split that is held out" in summary(described)
    assert is_named == (missing == "test")
    assert ("The given val is the only split" in split_page(described)) == is_named


def test_a_cut_from_train_depends_only_on_content_and_seed() -> None:
    rows = lacking("val")
    assert places(rows) == places(rows[::-1])
    more = [
        *rows,
        *({**row(seed, "ab"[seed % 2]), "given_split": "train"} for seed in range(1000, 1100)),
    ]
    assert places(rows).items() <= places(more).items()


def test_a_cut_from_train_keeps_groups_together() -> None:
    rows = lacking("val")
    for place, entry in enumerate(rows):
        entry["group"] = str(place // 8) if entry["given_split"] == "train" else None
    parts = places(rows)
    of_group: dict[str, set[str]] = {}
    for entry in rows:
        if entry["group"]:
            of_group.setdefault(entry["group"], set()).add(parts[entry["id"]])
    assert all(len(found) == 1 for found in of_group.values())
    assert {"train", "val"} == set().union(*of_group.values())


def lacking_in_time(missing: str) -> list[dict[str, Any]]:
    return [entry | {"time": float(place)} for place, entry in enumerate(lacking(missing))]


def test_a_missing_val_is_cut_from_the_latest_rows_of_train_if_rows_have_times() -> None:
    rows = lacking_in_time("val")
    found = split(rows)
    train, val = (
        found.rows.filter(pa.compute.equal(found.rows["split"], name))["time"].to_pylist()
        for name in ("train", "val")
    )
    learnt = [entry["time"] for entry in rows if entry["given_split"] == "train"]
    assert sorted(train) + sorted(val) == learnt
    assert len(val) == round(len(learnt) * 0.15 / 0.85)
    described = report(found, 7)
    assert described["cut_by_time"]
    assert "val is cut from train by time (its latest rows)" in summary(described)
    assert "it is cut from train by time: its latest rows." in split_page(described)


def test_a_group_that_reaches_a_val_cut_by_time_leaves_train() -> None:
    rows = lacking_in_time("val")
    learnt = [entry for entry in rows if entry["given_split"] == "train"]
    for entry in (learnt[0], learnt[-1]):
        entry["group"] = "returning group"
    found = split(rows)
    assert [
        (entry["id"], entry["split"], entry["reaches"]) for entry in found.purged.to_pylist()
    ] == [(learnt[0]["id"], "train", "val")]
    assert not found.leaks.shared["group"]["train/val"].values


def test_a_missing_val_cannot_be_cut_if_all_times_are_equal() -> None:
    rows = [entry | {"time": 1.0} for entry in lacking("val")]
    with pytest.raises(DataError, match="one distinct time in the 60 rows of train"):
        split(rows)


def test_a_given_split_without_train_is_refused() -> None:
    rows = [
        entry | {"given_split": "val" if entry["given_split"] == "train" else entry["given_split"]}
        for entry in own()
    ]
    with pytest.raises(DataError, match="split train is empty"):
        split(rows)


def test_a_given_split_with_only_train_is_refused() -> None:
    with pytest.raises(DataError, match=r"split val, test is empty.*data.split_folders to pool"):
        split(lacking("val", "test"))


def test_folds_are_refused_for_a_given_split() -> None:
    with pytest.raises(DataError, match=r"split\.folds is 5, but the given split"):
        split(own(), split_params(folds=5))


def test_time_cuts_are_refused_for_a_given_split() -> None:
    rows = [entry | {"time": float(place)} for place, entry in enumerate(own())]
    with pytest.raises(DataError, match=r"split\.time_cuts is \['1', '2'\], but the given split"):
        split(rows, split_params(time_cuts=["1", "2"]))


def test_a_leak_of_the_given_split_is_reported_and_moves_no_row_with_auto() -> None:
    rows = own()
    rows[0]["cluster"] = rows[6]["cluster"] = "twin"
    found = split(rows, split_params(on_leak="auto"))
    assert {entry["id"]: entry["split"] for entry in found.rows.to_pylist()} == {
        entry["id"]: entry["given_split"] for entry in rows
    }
    assert found.rows.filter(found.rows["leaked"])["id"].to_pylist() == [rows[6]["id"]]
    assert "leaked 1 rows" in summary(report(found, 7))
