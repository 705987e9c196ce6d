"""Tests of annotations: each column in the params is read, and unusable cells are reported."""

import time
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from slipway.data.sources.annotations import Annotation, annotate
from slipway.data.sources.sources import read_samples
from slipway.system.errors import DataError
from tests.data.pictures import data_params, picture, write_folder

COLUMNS = {
    "group_column": "person",
    "time_column": "day",
    "weight_column": "w",
    "split_column": "part",
}
GOOD: dict[str, Any] = {
    "label": "cat",
    "person": "p1",
    "day": "1970-01-03",
    "w": "0.5",
    "part": "Train",
}


def said(data: dict[str, Any] | None = None, **cells: Any) -> Annotation:
    return annotate(GOOD | cells, data_params(Path("a.csv"), **COLUMNS, **(data or {})))


def test_annotate_reads_every_column_of_the_params() -> None:
    assert said() == Annotation("cat", None, "p1", 2.0, 0.5, "train", (), None)


@pytest.mark.parametrize(
    ("cell", "days"),
    [
        ("12.5", 12.5),
        (7, 7.0),
        ("1970-01-02T12:00:00Z", 1.5),
        ("1970-01-02T12:00:00+12:00", 1.0),
        ("1970-01-02T12:00:00-06:00", 1.75),
        ("1970-01-02T12:00:00", 1.5),
        (date(1970, 1, 5), 4.0),
        (datetime(1970, 1, 2, tzinfo=UTC), 1.0),
        (datetime(1970, 1, 2, 12), 1.5),
        (datetime(1970, 1, 2, 12, tzinfo=timezone(timedelta(hours=12))), 1.0),
    ],
)
def test_a_time_is_a_date_or_a_number(cell: Any, days: float) -> None:
    assert said(day=cell).time == days


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_a_time_without_a_zone_is_utc_in_any_local_time_zone(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert (
            said(day="1970-01-02T12:00:00").time == said(day=datetime(1970, 1, 2, 12)).time == 1.5
        )
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("cells", "rule", "words"),
    [
        ({"label": " "}, "missing_label", "empty"),
        ({"person": None}, "missing_group", "'person' is empty"),
        ({"day": ""}, "missing_time", "'day' is empty"),
        ({"day": "last week"}, "bad_time", "'last week', expected an ISO 8601 date"),
        ({"day": "inf"}, "bad_time", "finite number"),
        ({"w": "-1"}, "bad_weight", "'-1', expected a finite number of at least 0"),
        ({"w": "nan"}, "bad_weight", "finite"),
        ({"w": None}, "bad_weight", "holds None"),
        ({"part": "holdout"}, "bad_split", "'holdout', expected train, val, test"),
        ({"part": ""}, "bad_split", "expected train, val, test"),
    ],
)
def test_an_unusable_cell_names_its_rule_and_column(
    cells: dict[str, Any], rule: str, words: str
) -> None:
    fault = said(**cells).fault
    assert fault is not None
    assert fault.rule == rule
    assert words in fault.detail


def test_a_spelling_variant_is_mapped_and_recorded() -> None:
    found = said({"label_map": {"Cat": "cat"}}, label=" Cat ")
    assert (found.label, found.corrections) == ("cat", ("label: Cat -> cat",))
    assert said({"label_map": {"Cat": "cat"}}).corrections == ()


def test_a_class_folder_is_mapped_by_label_map_and_recorded(tmp_path: Path) -> None:
    write_folder(tmp_path, {"Cat": [picture(1)], "dog": [picture(2)]})
    samples = list(read_samples(data_params(tmp_path, label_map={"Cat": "cat"})))
    assert [(sample.source, sample.label, sample.corrections) for sample in samples] == [
        ("Cat/0.png", "cat", ("label: Cat -> cat",)),
        ("dog/0.png", "dog", ()),
    ]


@pytest.mark.parametrize("key", COLUMNS)
def test_error_for_a_column_setting_with_class_folders_says_they_have_no_columns(
    tmp_path: Path, key: str
) -> None:
    write_folder(tmp_path, {"cat": [picture(1)]})
    with pytest.raises(DataError, match=f"which has no columns, but data.{key} is 'x'"):
        next(iter(read_samples(data_params(tmp_path, **{key: "x"}))))


def test_read_samples_returns_only_paths_of_files_if_read_files_is_false(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"cat": [picture(1)]})
    [sample] = read_samples(data_params(tmp_path / "images"), read_files=False)
    assert (sample.payload, sample.path) == (b"", str(tmp_path / "images" / "cat" / "0.png"))
