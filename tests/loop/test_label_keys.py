"""Keys with wrong labels are named; keys like the others are not."""

from dataclasses import replace

import numpy as np
import pytest

from slipway.loop.label_keys import NO_KEY, suspicious_keys
from slipway.traffic.monitoring_records import JoinedLabel


def labels_of(
    key: str | None, num_labels: int, error_rate: float, seed: int = 0
) -> list[JoinedLabel]:
    random = np.random.default_rng(seed)
    wrong = random.random(num_labels) < error_rate
    return [
        JoinedLabel(key, "cat", "dog" if is_wrong else "cat", 0.0, 0.0)
        for is_wrong in wrong.tolist()
    ]


def names(labels: list[JoinedLabel], *trusted: str) -> list[str]:
    return [record.key for record in suspicious_keys(labels, trusted)]


def test_a_key_with_30_percent_wrong_labels_is_named() -> None:
    """The model is right on 95 % of the rows, so the labels contradict it on 33 %."""
    rest = [one for number in range(4) for one in labels_of(f"k{number}", 200, 0.05, number)]
    assert names([*rest, *labels_of("bad", 200, 0.335, 9)]) == ["bad"]
    (record,) = suspicious_keys([*rest, *labels_of(None, 200, 0.335, 9)])
    assert record.key == NO_KEY
    assert record.text.startswith("no key: its 200 labels contradict the model by 0.3")


def test_a_bad_key_is_named_although_it_sends_most_labels() -> None:
    rest = [one for number in range(3) for one in labels_of(f"k{number}", 60, 0.05, number)]
    assert names([*rest, *labels_of("bad", 2000, 0.335, 9)]) == ["bad"]


def test_a_second_bad_key_is_not_hidden_by_the_first() -> None:
    rest = [one for number in range(4) for one in labels_of(f"k{number}", 200, 0.05, number)]
    bad = [*labels_of("bad", 400, 0.335, 8), *labels_of("worse", 400, 0.6, 9)]
    assert sorted(names([*rest, *bad])) == ["bad", "worse"]


def test_errors_that_rise_for_all_keys_make_none_suspicious() -> None:
    assert not names(
        [one for number in range(5) for one in labels_of(f"k{number}", 200, 0.4, number)]
    )


def test_honest_keys_are_never_named_in_300_checks() -> None:
    random = np.random.default_rng(5)
    named = 0
    for check in range(300):
        rate = float(random.uniform(0.02, 0.4))
        named += bool(
            names(
                [
                    one
                    for number in range(5)
                    for one in labels_of(f"k{number}", 100, rate, 10 * check + number)
                ]
            )
        )
    assert named == 0


@pytest.mark.parametrize("num_labels", [29, 30])
def test_a_key_with_fewer_than_30_labels_is_not_named(num_labels: int) -> None:
    found = names([*labels_of("a", 300, 0.05), *labels_of("bad", num_labels, 1.0)])
    assert found == (["bad"] if num_labels == 30 else [])


def test_a_trusted_key_is_never_named() -> None:
    labels = [*labels_of("a", 300, 0.05), *labels_of("bad", 300, 0.5, 1)]
    assert names(labels) == ["bad"]
    assert names(labels, "bad") == []


def test_for_numeric_labels_the_key_with_larger_distances_is_named() -> None:
    random = np.random.default_rng(2)

    def numbers(key: str, scale: float) -> list[JoinedLabel]:
        drawn = random.normal(size=200)
        return [JoinedLabel(key, float(value), float(value + scale * error), 0.0, 0.0)
                for value, error in zip(drawn, random.normal(size=200), strict=True)]  # fmt: skip

    assert names([*numbers("a", 1), *numbers("b", 1), *numbers("bad", 3)]) == ["bad"]


def test_an_honest_key_whose_labels_begin_after_a_shift_is_not_named() -> None:
    early = [one for key in "ab" for one in labels_of(key, 400, 0.05)]
    late = [
        replace(one, answered=1.0)
        for number, key in enumerate("abc")
        for one in labels_of(key, 300, 0.4, number)
    ]
    assert names([*early, *late]) == []
    bad = [replace(one, answered=1.0) for one in labels_of("bad", 300, 0.7, 9)]
    assert names([*early, *late, *bad]) == ["bad"]
