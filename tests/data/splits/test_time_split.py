"""A split by time puts the latest rows last, and divides no unit."""

from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.data.engine.rows import PURGED, SPLIT_ROWS
from slipway.data.splits.report import report
from slipway.data.splits.split import Split, check_columns
from slipway.system.errors import DataError
from tests.data.pictures import row
from tests.data.splits.split_cases import SEVERAL, classes, own, places, split, table
from tests.project_params import split_params


def timed(num_rows: int, **columns: Any) -> list[dict[str, Any]]:
    return [
        {**row(seed, "ab"[seed % 2]), "time": float(seed), **columns} for seed in range(num_rows)
    ]


# time


def test_a_split_by_time_puts_the_earliest_rows_in_train_and_the_latest_in_test() -> None:
    found = split(timed(200))
    order = found.rows.sort_by("time")["split"].to_pylist()
    assert order == ["train"] * 140 + ["val"] * 30 + ["test"] * 30
    assert not found.leaks.found
    assert report(found, 7)["leaks"]["time_order"]["train/val"] == {
        "latest_before": 139,
        "earliest_after": 140,
        "rows_not_later": 0,
    }


def test_rows_of_equal_time_are_in_one_split() -> None:
    rows = [{**entry, "time": float(entry["time"] // 30)} for entry in timed(200)]
    of_time = defaultdict(set)
    for entry in split(rows).rows.to_pylist():
        of_time[entry["time"]].add(entry["split"])
    assert all(len(names) == 1 for names in of_time.values())


@pytest.mark.process
@SEVERAL
@given(
    st.lists(st.integers(0, 12), min_size=60, max_size=120),
    st.lists(st.integers(0, 400), min_size=120, max_size=120),
)
def test_a_split_by_time_divides_no_unit_and_loses_no_row(
    times: list[int], groups: list[int]
) -> None:
    rows = [
        {**row(index, None, 1.0, f"g{groups[index]}"), "time": float(time)}
        for index, time in enumerate(times)
    ]
    with suppress(DataError):  # where a split would be empty
        check_time_order(split(rows), len(rows))


def check_time_order(found: Split, num_rows: int) -> None:
    assert not found.leaks.found
    assert found.rows.num_rows + found.purged.num_rows == num_rows
    latest = [
        found.rows.filter(pa.compute.equal(found.rows["split"], name))["time"].to_numpy()
        for name in ("train", "val", "test")
    ]
    assert all(before.max() < after.min() for before, after in pairwise(latest))


def test_earlier_rows_of_a_group_that_reaches_a_later_split_are_purged() -> None:
    rows = timed(200)
    for place in (10, 150, 190):
        rows[place]["group"] = "returning group"
    found = split(rows)
    assert found.purged.schema == PURGED
    assert [
        (entry["source"], entry["split"], entry["reaches"])
        for entry in found.purged.sort_by("time").to_pylist()
    ] == [
        ("10", "train", "test"),
        ("150", "val", "test"),
    ]
    assert found.rows.schema == SPLIT_ROWS
    assert found.rows.num_rows == 198
    assert report(found, 7)["purged"] == 2


@pytest.mark.parametrize("cuts", [["100", "150"], ["1970-04-11", "1970-05-31T00:00:00Z"]])
def test_configured_time_cuts_stay_the_same_when_data_grows(cuts: list[str]) -> None:
    params = split_params(time_cuts=cuts)
    assert Counter(places(timed(200), params).values()) == {"train": 100, "val": 50, "test": 50}
    assert places(timed(200), params).items() <= places(timed(300), params).items()


@pytest.mark.parametrize(
    ("cuts", "message"),
    [(["150", "100"], "then a later time"), (["soon", "nan"], "'soon', 'nan', expected ISO 8601")],
)
def test_time_cuts_that_are_no_ascending_times_are_refused(cuts: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(timed(200), split_params(time_cuts=cuts))


def test_error_names_rows_without_a_time() -> None:
    rows = timed(200)
    rows[5]["time"] = None
    with pytest.raises(DataError, match="1 of 200 rows have no time, the first are 5;"):
        split(rows)


def test_a_split_by_time_with_too_few_distinct_times_is_refused() -> None:
    with pytest.raises(DataError, match="2 distinct times in 100 rows"):
        split([{**entry, "time": entry["time"] % 2} for entry in timed(100)])


def test_a_given_split_out_of_time_order_is_a_leak() -> None:
    rows = [{**entry, "time": float(place)} for place, entry in enumerate(own())]
    with pytest.raises(DataError, match=r"time order of train/test: 18 rows of test are not later"):
        split(rows, split_params(on_leak="fail"))


@pytest.mark.parametrize(
    ("names", "key", "column", "value"),
    [(("mine", None), "split", "given_split", "val"), ((None, "mine"), "time", "time", 1.0)],
)
def test_a_requested_split_or_time_column_without_values_is_refused(
    names: tuple[str | None, str | None], key: str, column: str, value: Any
) -> None:
    with pytest.raises(
        DataError, match=f"data.{key}_column is 'mine', but no row has a value there"
    ):
        check_columns(table(classes(5)), *names)
    check_columns(table([{**row(1), column: value}]), *names)
    check_columns(table(classes(5)), None, None)
