"""Splitting: a pure function of content and seed, in exact shares, without leaks."""

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.data.rows import ROWS, SPLIT_ROWS
from slipway.data.splitting import check_leaks, find_leaks, largest_remainder, report, split_rows
from slipway.errors import DataError
from tests.data.pictures import row
from tests.project_params import split_params

PARAMS = split_params(assignment="exact")


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ROWS)


def classes(num_rows: int, names: str = "abc") -> list[dict[str, Any]]:
    return [row(seed, names[seed % len(names)]) for seed in range(num_rows)]


def split_of(split: pa.Table) -> dict[str, str]:
    return dict(zip(split["id"].to_pylist(), split["split"].to_pylist(), strict=True))


def test_each_class_is_split_in_the_same_shares() -> None:
    split = split_rows(table(*classes(300)), PARAMS, seed=7)
    counts = Counter(zip(split["label"].to_pylist(), split["split"].to_pylist(), strict=True))
    assert counts == {(label, name): count for label in "abc" for name, count in (("train", 70), ("val", 15), ("test", 15))}


def test_the_order_of_rows_does_not_matter() -> None:
    rows = classes(100)
    expected = split_rows(table(*rows), PARAMS, seed=7)
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert split_rows(table(*rows), PARAMS, seed=7).equals(expected)


def test_the_seed_decides() -> None:
    rows = table(*classes(100))
    assert split_of(split_rows(rows, PARAMS, seed=7)) == split_of(split_rows(rows, PARAMS, seed=7))
    assert split_of(split_rows(rows, PARAMS, seed=7)) != split_of(split_rows(rows, PARAMS, seed=8))


def test_the_name_of_a_file_does_not_matter() -> None:
    renamed = [{**entry, "source": f"elsewhere/{entry['source']}"} for entry in classes(100)]
    assert split_of(split_rows(table(*renamed), PARAMS, 7)) == split_of(split_rows(table(*classes(100)), PARAMS, 7))


def test_another_row_moves_at_most_the_rows_at_the_borders() -> None:
    before = split_of(split_rows(table(*classes(300, "ab")), PARAMS, 7))
    after = split_of(split_rows(table(*classes(301, "ab")), PARAMS, 7))
    assert sum(after[sample_id] != split for sample_id, split in before.items()) <= 2


def test_a_group_stays_in_one_split() -> None:
    rows = [row(seed, "ab"[seed % 2], group=f"patient{seed % 40}") for seed in range(400)]
    split = split_rows(table(*rows), PARAMS, seed=7)
    places = {(entry["group"], entry["split"]) for entry in split.to_pylist()}
    assert len(places) == 40
    assert Counter(split["split"].to_pylist()) == {"train": 280, "val": 60, "test": 60}


def test_numeric_targets_are_spread_evenly() -> None:
    rows = [row(seed, label=None, target=float(seed)) for seed in range(1000)]
    split = split_rows(table(*rows), PARAMS, seed=7).to_pylist()
    for name, count in (("train", 700), ("val", 150), ("test", 150)):
        targets = [entry["target"] for entry in split if entry["split"] == name]
        assert len(targets) == count
        assert abs(sum(targets) / count - 499.5) < 12


def test_equal_remainders_do_not_all_go_to_the_same_split() -> None:
    rows = [row(seed, label=None, target=float(seed)) for seed in range(364)]
    counts = Counter(split_rows(table(*rows), PARAMS, seed=7)["split"].to_pylist())
    assert abs(counts["val"] - counts["test"]) <= 1


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=3, max_size=3))
def test_largest_remainders_add_up_and_are_off_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = largest_remainder(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


def test_a_class_that_a_split_lacks_is_refused_with_its_counts() -> None:
    rows = [*classes(100, "ab"), row(1000, "rare"), row(1001, "rare")]
    with pytest.raises(DataError) as raised:
        split_rows(table(*rows), PARAMS, seed=7)
    text = str(raised.value)
    assert "1 of 3 classes lack rows" in text
    assert "'rare': train " in text
    assert "With 7 rows (or groups) a class is in every split" in text


def test_as_many_rows_as_the_error_asks_for_are_enough() -> None:
    assert set(split_rows(table(*classes(14, "ab")), PARAMS, seed=7)["split"].to_pylist()) == {"train", "val", "test"}


def test_an_empty_split_is_refused_with_the_counts() -> None:
    rows = [row(seed, label=None, target=float(seed)) for seed in range(2)]
    with pytest.raises(DataError, match=r"is empty: 2 rows became .*With 7 rows"):
        split_rows(table(*rows), PARAMS, seed=7)


def test_a_split_has_no_leaks() -> None:
    rows = [row(seed, "ab"[seed % 2], group=f"g{seed // 3}") for seed in range(300)]
    leaks = find_leaks(split_rows(table(*rows), PARAMS, seed=7))
    assert leaks == {"id": [], "sha256": [], "group": []}
    check_leaks(leaks)


@pytest.mark.parametrize("column", ["id", "sha256", "group"])
def test_a_planted_leak_is_found_and_refused(column: str) -> None:
    rows = [{**row(1, group="g1"), "split": "train"}, {**row(2, group="g2"), "split": "test"}]
    rows[1][column] = rows[0][column]
    leaks = find_leaks(pa.Table.from_pylist(rows, schema=SPLIT_ROWS))
    assert leaks[column] == [rows[0][column]]
    with pytest.raises(DataError, match=f"{column}: 1"):
        check_leaks(leaks)


def test_the_report_has_the_counts_of_every_class() -> None:
    split = split_rows(table(*classes(200, "ab")), PARAMS, seed=7)
    summary = report(split, 7, find_leaks(split))
    assert summary["splits"]["val"] == {"rows": 30, "classes": {"a": 15, "b": 15}}


def test_the_report_of_a_numeric_target_has_its_mean() -> None:
    split = split_rows(table(*(row(seed, label=None, target=float(seed)) for seed in range(100))), PARAMS, seed=7)
    assert report(split, 7, {})["splits"]["train"]["target"]["mean"] == pytest.approx(49.5, abs=5)
