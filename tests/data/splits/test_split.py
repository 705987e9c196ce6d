"""Tests of the split: a pure function of content and seed that keeps related rows together."""

import random
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.artifacts.label_sets import set_text
from slipway.config.sections import SplitParams
from slipway.data.engine.rows import PURGED, ROWS, SPLIT_ROWS
from slipway.data.splits.assignment import largest_remainder
from slipway.data.splits.report import report, summary
from slipway.data.splits.split import Split, check_columns, split_rows
from slipway.reports.pages.split_page import split_page
from slipway.system.errors import DataError
from tests.data.pictures import row
from tests.project_params import split_params

STABLE = split_params(assignment="stable")
EXACT = split_params(assignment="exact")
SEVERAL = settings(deadline=None, max_examples=40)  # a deadline would measure the machine
BOTH = pytest.mark.parametrize("params", [STABLE, EXACT], ids=["stable", "exact"])


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=ROWS)


def split(rows: list[dict[str, Any]], params: SplitParams = STABLE, seed: int = 7) -> Split:
    return split_rows(table(rows), params, seed)


def places(
    rows: list[dict[str, Any]], params: SplitParams = STABLE, seed: int = 7
) -> dict[str, str]:
    found = split(rows, params, seed).rows
    return dict(zip(found["id"].to_pylist(), found["split"].to_pylist(), strict=True))


def classes(num_rows: int, names: str = "abc", first: int = 0) -> list[dict[str, Any]]:
    return [row(seed, names[seed % len(names)]) for seed in range(first, first + num_rows)]


def timed(num_rows: int, **columns: Any) -> list[dict[str, Any]]:
    return [
        {**row(seed, "ab"[seed % 2]), "time": float(seed), **columns} for seed in range(num_rows)
    ]


# a pure function of content and seed


@BOTH
def test_the_split_does_not_depend_on_the_order_of_rows(params: SplitParams) -> None:
    rows = [
        {**entry, "cluster": f"c{index // 3}" if index % 2 else None}
        for index, entry in enumerate(classes(300))
    ]
    expected = split(rows, params).rows
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert split(rows, params).rows.equals(expected)


@BOTH
def test_the_split_does_not_depend_on_file_names(params: SplitParams) -> None:
    renamed = [{**entry, "source": f"elsewhere/{entry['source']}"} for entry in classes(200)]
    assert places(renamed, params) == places(classes(200), params)


@BOTH
def test_a_different_seed_gives_a_different_split(params: SplitParams) -> None:
    assert places(classes(200), params, 7) == places(classes(200), params, 7)
    assert places(classes(200), params, 7) != places(classes(200), params, 8)


def test_the_stable_split_equals_that_of_earlier_versions() -> None:
    """These digests must never change, because another rule would move the rows of every user."""
    found = places(classes(60))
    assert "".join(found[row(seed)["id"]][1] for seed in range(20)) == GOLDEN


GOLDEN = "errrrraerraraaaaarrr"  # second letters: tRain, vAl, tEst


# growth (D4)


@SEVERAL
@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60), st.integers(0, 2**32 - 1))
def test_new_unrelated_rows_move_no_existing_row_with_a_stable_split(
    new: set[int], seed: int
) -> None:
    old = grown_rows(range(300))
    added = [
        {**entry, "group": f"new {entry['group']}"}
        for entry in grown_rows(number + 1000 for number in new)
    ]
    before = places(old, seed=seed)
    after = places(old + added, seed=seed)
    assert {sample_id: after[sample_id] for sample_id in before} == before


@SEVERAL
@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60), st.integers(0, 2**32 - 1))
def test_new_rows_of_a_known_group_join_its_split_and_move_no_row_with_a_stable_split(
    new: set[int], seed: int
) -> None:
    old = [{**entry, "cluster": None} for entry in grown_rows(range(300))]
    added = [{**row(number + 1000, "a"), "group": f"g{number % 100}"} for number in new]
    before, after = places(old, seed=seed), places(old + added, seed=seed)
    assert {sample_id: after[sample_id] for sample_id in before} == before
    of_group = {entry["group"]: before[entry["id"]] for entry in old}
    assert all(after[entry["id"]] == of_group[entry["group"]] for entry in added)


def grown_rows(numbers: Any) -> list[dict[str, Any]]:
    """Return three rows of each group; every tenth row is in a cluster with another group."""
    return [
        {
            **row(number, "abc"[number % 3]),
            "group": f"g{number // 3}",
            "cluster": f"c{number // 30}" if number % 10 == 0 else None,
        }
        for number in numbers
    ]


def test_an_exact_split_may_move_rows_when_data_grows() -> None:
    """Control of the tests above: with `exact`, the same growth moves old rows."""
    before, after = places(classes(300), EXACT), places(classes(360), EXACT)
    assert 0 < sum(after[sample_id] != name for sample_id, name in before.items()) < 60


def test_a_new_near_duplicate_moves_a_single_row_at_most_half_of_the_time() -> None:
    rows = classes(2000, "a")
    twins = [{**row(seed, "a"), "cluster": f"c{seed}"} for seed in range(10_000, 12_000)]
    before = places(rows)
    after = places(
        [{**entry, "cluster": twin["cluster"]} for entry, twin in zip(rows, twins, strict=True)]
        + twins
    )
    assert all(
        after[entry["id"]] == after[twin["id"]] for entry, twin in zip(rows, twins, strict=True)
    )
    moved = np.mean([after[entry["id"]] != before[entry["id"]] for entry in rows])
    assert moved == pytest.approx(0.5 * (1 - 0.7**2 - 2 * 0.15**2), abs=0.04)


# units


@BOTH
def test_all_rows_of_a_group_are_in_one_split(params: SplitParams) -> None:
    found = split(
        [row(seed, "ab"[seed % 2], group=f"person{seed % 80}") for seed in range(800)], params
    ).rows
    assert len(set(zip(found["group"].to_pylist(), found["split"].to_pylist(), strict=True))) == 80


@BOTH
def test_groups_that_share_a_near_duplicate_cluster_are_in_one_split(params: SplitParams) -> None:
    rows = [
        {
            **row(seed, "a", group=f"g{seed // 4}"),
            "cluster": f"c{seed // 8}" if seed % 8 in (3, 4) else None,
        }
        for seed in range(800)
    ]
    found = split(rows, params)
    assert not found.leaks.found
    for column in ("group", "cluster"):
        of_value = defaultdict(set)
        for entry in found.rows.to_pylist():
            of_value[entry[column]].add(entry["split"])
        assert all(len(names) == 1 for value, names in of_value.items() if value)


# shares


def test_an_exact_split_gives_each_class_the_same_fractions() -> None:
    found = split(classes(300), EXACT).rows
    counts = Counter(zip(found["label"].to_pylist(), found["split"].to_pylist(), strict=True))
    assert counts == {
        (label, name): count
        for label in "abc"
        for name, count in (("train", 70), ("val", 15), ("test", 15))
    }


def test_an_exact_split_meets_its_fractions_with_groups() -> None:
    found = split(
        [row(seed, "ab"[seed % 2], group=f"person{seed % 40}") for seed in range(400)], EXACT
    ).rows
    assert Counter(found["split"].to_pylist()) == {"train": 280, "val": 60, "test": 60}


def test_a_stable_split_meets_its_fractions_on_average_in_each_class() -> None:
    found = split(classes(30_000)).rows
    counts = Counter(zip(found["label"].to_pylist(), found["split"].to_pylist(), strict=True))
    for label in "abc":
        for name, share in (("train", 0.7), ("val", 0.15), ("test", 0.15)):
            assert (
                abs(counts[label, name] - 10_000 * share)
                < 4 * (10_000 * share * (1 - share)) ** 0.5
            )


def test_an_exact_split_spreads_numeric_targets_evenly() -> None:
    rows = split(
        [row(seed, label=None, target=float(seed)) for seed in range(1000)], EXACT
    ).rows.to_pylist()
    for name, count in (("train", 700), ("val", 150), ("test", 150)):
        targets = [entry["target"] for entry in rows if entry["split"] == name]
        assert len(targets) == count
        assert abs(sum(targets) / count - 499.5) < 12


def test_equal_remainders_of_several_target_deciles_go_to_different_splits() -> None:
    rows = [row(seed, label=None, target=float(seed)) for seed in range(364)]
    counts = Counter(split(rows, EXACT).rows["split"].to_pylist())
    assert abs(counts["val"] - counts["test"]) <= 1


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=2, max_size=7))
def test_largest_remainder_parts_add_up_and_differ_by_less_than_one_from_exact(
    total: int, weights: list[int]
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = largest_remainder(total, shares)
    assert sum(counts) == total
    assert all(
        abs(count - total * share) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True)
    )


def test_a_class_that_a_split_lacks_is_refused_with_its_counts() -> None:
    rows = [*classes(100, "ab"), row(1000, "rare"), row(1001, "rare")]
    with pytest.raises(DataError) as raised:
        split(rows, EXACT)
    text = str(raised.value)
    assert "1 of 3 classes lack rows" in text
    assert "'rare': train " in text
    assert "7 rows (or groups) of a class it is in every split" in text


def test_a_stable_split_that_lacks_a_class_recommends_exact() -> None:
    with pytest.raises(DataError, match=r"Set split\.assignment to exact"):
        split([*classes(200, "ab"), row(1000, "rare"), row(1001, "rare")])


def test_the_minimum_number_of_rows_that_the_split_error_names_is_enough() -> None:
    assert set(places(classes(14, "ab"), EXACT).values()) == {"train", "val", "test"}


@BOTH
def test_error_for_an_empty_split_names_the_size_of_a_group_that_holds_all_rows(
    params: SplitParams,
) -> None:
    with pytest.raises(DataError, match="largest group or chain of near duplicates has 40 rows"):
        split([row(seed, group="the only one") for seed in range(40)], params)


@BOTH
def test_an_empty_split_is_refused_with_the_counts(params: SplitParams) -> None:
    with pytest.raises(DataError, match=r"is empty: 2 rows became "):
        split([row(seed, label=None, target=float(seed)) for seed in range(2)], params)


# folds


@BOTH
def test_every_row_that_is_not_for_testing_is_val_in_exactly_one_fold(params: SplitParams) -> None:
    rows = [row(seed, "ab"[seed % 2], group=f"g{seed % 100}") for seed in range(1000)]
    plain = split(rows, params).rows
    test = set(plain.filter(pa.compute.equal(plain["split"], "test"))["id"].to_pylist())
    times_in_val: Counter[str] = Counter()
    for fold in range(5):
        found = split(rows, params.model_copy(update={"folds": 5, "fold": fold}))
        assert not found.leaks.found
        entries = found.rows.to_pylist()
        assert {entry["id"] for entry in entries if entry["split"] == "test"} == test
        assert all((entry["fold"] is None) == (entry["split"] == "test") for entry in entries)
        assert all((entry["fold"] == fold) == (entry["split"] == "val") for entry in entries)
        times_in_val.update(entry["id"] for entry in entries if entry["split"] == "val")
    assert set(times_in_val.values()) == {1}
    assert len(times_in_val) + len(test) == 1000


def test_folds_of_an_exact_split_are_equally_large() -> None:
    found = split(classes(600, "ab"), split_params(assignment="exact", folds=5, fold=2))
    assert report(found, 7)["folds"] == [102] * 5


def test_folds_of_a_stable_split_move_no_row_when_data_grows() -> None:
    params = split_params(folds=4, fold=1)
    assert places(classes(400), params).items() <= places(classes(700), params).items()


# the user's own split


def own(**changes: Any) -> list[dict[str, Any]]:
    return [
        {
            **row(seed, "ab"[seed % 2]),
            "given_split": ("train", "train", "val", "test")[seed // 2 % 4],
            **changes,
        }
        for seed in range(80)
    ]


def test_the_given_split_is_used_unchanged() -> None:
    rows = own()
    found = split(rows)
    assert found.way == "given"
    assert places(rows) == {entry["id"]: entry["given_split"] for entry in rows}
    assert report(found, 7)["shares"] is None


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
def test_a_val_or_test_missing_from_the_given_split_is_cut_from_train_and_reported(
    missing: str, assignment: str
) -> None:
    rows = lacking(missing)
    found = split(rows, split_params(assignment=assignment))
    parts = places(rows, split_params(assignment=assignment))
    cut = [entry for entry in rows if parts[entry["id"]] == missing]
    assert {entry["given_split"] for entry in cut} == {"train"}
    assert all(
        parts[entry["id"]] == entry["given_split"]
        for entry in rows
        if entry["given_split"] != "train"
    )
    assert 3 <= len(cut) <= 20  # 0.15 of 0.85 of 60 rows are 10.6
    described = report(found, 7)
    assert described["cut_from_train"] == [missing]
    assert f"{missing} is cut from train" in summary(described)


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


def test_a_missing_test_is_cut_by_a_hash_although_rows_have_times() -> None:
    assert places(lacking_in_time("test")) == places(lacking("test"))
    assert not report(split(lacking_in_time("test")), 7)["cut_by_time"]


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


# the report


def test_the_split_report_has_the_counts_of_every_class_and_the_largest_deviation() -> None:
    described = report(split(classes(200, "ab"), EXACT), 7)
    assert described["splits"]["val"] == {"rows": 30, "leaked": 0, "classes": {"a": 15, "b": 15}}
    assert described["largest_deviation"]["found"] == pytest.approx(
        described["largest_deviation"]["asked"]
    )
    stable = report(split(classes(200, "ab")), 7)["largest_deviation"]
    assert abs(stable["found"] - stable["asked"]) > 0.01


def test_the_split_report_has_the_mean_of_a_numeric_target() -> None:
    described = report(
        split([row(seed, label=None, target=float(seed)) for seed in range(100)], EXACT), 7
    )
    assert described["splits"]["train"]["target"]["mean"] == pytest.approx(49.5, abs=5)


@pytest.mark.nightly
def test_a_million_rows_are_split_in_seconds() -> None:
    """This checks only that the time does not grow with the square of the number of rows."""
    ids = [f"{number:016x}{number:016x}" for number in range(1_000_000)]
    columns: dict[str, Any] = {
        name: pa.nulls(len(ids), ROWS.field(name).type) for name in ROWS.names
    }
    empty = pa.ListArray.from_arrays(
        pa.array(np.zeros(len(ids) + 1, np.int32)), pa.array([], pa.string())
    )
    columns |= {
        "id": ids,
        "source": ids,
        "sha256": ids,
        "bytes": np.ones(len(ids), np.int64),
        "flags": empty,
        "corrections": empty,
    }
    columns |= {
        "label": [f"class {number % 100}" for number in range(len(ids))],
        "group": [f"g{number // 7}" for number in range(len(ids))],
    }
    found = split_rows(pa.table(columns, schema=ROWS), STABLE, 7)
    assert found.rows.num_rows == 1_000_000
    assert not found.leaks.found


# several labels


def label_sets(counts: dict[str, int]) -> list[dict[str, Any]]:
    texts = [set_text(names) for names, number in counts.items() for _ in range(number)]
    return [row(seed, text) for seed, text in enumerate(texts)]


def test_an_exact_split_meets_its_fractions_in_each_set_of_labels() -> None:
    found = split_rows(table(label_sets({"ab": 40, "a": 60, "": 20})), EXACT, 7, several=True)
    counts = Counter(
        zip(*(found.rows[name].to_pylist() for name in ("label", "split")), strict=True)
    )
    assert counts['["a", "b"]', "train"] == 28
    assert (counts['["a"]', "val"], counts["[]", "test"]) == (9, 3)


def test_rare_label_sets_are_split_together_by_their_rarest_label() -> None:
    rows = label_sets({"a": 50, "b": 50, "abz": 4, "az": 4, "bz": 4})
    found = report(split_rows(table(rows), EXACT, 7, several=True), 7)["splits"]
    assert [found[name]["classes"]["z"] for name in ("train", "val", "test")] == [8, 2, 2]


def test_error_names_a_label_that_a_split_lacks() -> None:
    with pytest.raises(DataError, match=r"1 of 3 classes lack rows in a split:\n  'z'"):
        split_rows(table(label_sets({"a": 60, "ab": 60, "az": 2})), EXACT, 7, several=True)
