"""Tests of the split: a pure function of content and seed that keeps related rows together."""

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.artifacts.label_sets import set_text
from slipway.config.sections import SplitParams
from slipway.data.engine.rows import ROWS, SPLITS
from slipway.data.splits.assignment import largest_remainder
from slipway.data.splits.report import report
from slipway.data.splits.split import split_rows
from slipway.system.errors import DataError
from tests.data.pictures import row
from tests.data.splits.split_cases import SEVERAL, STABLE, classes, places, split, table
from tests.project_params import split_params

EXACT = split_params(assignment="exact")


BOTH = pytest.mark.parametrize("params", [STABLE, EXACT], ids=["stable", "exact"])


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
    assert "3 different rows (or groups) of a class it is in every split" in text


def test_a_stable_split_that_lacks_a_class_recommends_exact() -> None:
    with pytest.raises(DataError, match=r"Set split\.assignment to exact"):
        split([*classes(200, "ab"), row(1000, "rare"), row(1001, "rare")])


def test_the_minimum_number_of_rows_that_the_split_error_names_is_enough() -> None:
    rows = [*classes(100, "ab"), *(row(seed, "rare") for seed in (1000, 1001, 1002))]
    found = split(rows, EXACT).rows
    rare = found.filter(pa.compute.equal(found["label"], "rare"))
    assert sorted(rare["split"].to_pylist()) == ["test", "train", "val"]


@given(st.lists(st.integers(1, 30), min_size=3, max_size=12))
@SEVERAL
def test_an_exact_split_has_every_class_of_three_groups_however_large_they_are(
    sizes: list[int],
) -> None:
    seeds = iter(range(1000))
    rows = [
        row(next(seeds), "a", group=f"g{group}")
        for group, size in enumerate(sizes)
        for _ in range(size)
    ]
    assert set(places([*rows, *classes(60, "b", first=1000)], EXACT).values()) == set(SPLITS)
    numbers = [entry | {"label": None, "target": 1.0} for entry in rows]
    found = split(numbers, EXACT).rows
    assert set(found["split"].to_pylist()) == set(SPLITS)
    assert pa.compute.count_distinct(found["group"]).as_py() == len(sizes)


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


# the report


def test_the_split_report_has_the_counts_of_every_class_and_the_largest_deviation() -> None:
    described = report(split(classes(200, "ab"), EXACT), 7)
    assert described["splits"]["val"] == {"rows": 30, "leaked": 0, "classes": {"a": 15, "b": 15}}
    assert described["largest_deviation"]["found"] == pytest.approx(
        described["largest_deviation"]["requested"]
    )
    stable = report(split(classes(200, "ab")), 7)["largest_deviation"]
    assert abs(stable["found"] - stable["requested"]) > 0.01


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
