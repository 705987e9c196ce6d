"""Paired comparison: hand-computed cases, brute force, exact arithmetic, coverage, refusals."""

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.kinds.targets import CLASS, NUMBER
from slipway.metrics import scores
from slipway.metrics.paired_bootstrap import PairedDifference, mcnemar_p_value, paired_difference
from slipway.metrics.scores import Resampling, measure
from slipway.system.errors import MetricError

HUNDRED = Resampling(seed=1, num_samples=100, confidence=0.95)
THOUSAND = Resampling(seed=1, num_samples=1000, confidence=0.95)


def answers(generator: np.random.Generator, num_rows: int, num_classes: int) -> NDArray[np.float64]:
    return generator.dirichlet(np.ones(num_classes), size=num_rows)


def one_hot(labels: NDArray[np.int64], num_classes: int = 2) -> NDArray[np.float64]:
    return np.eye(num_classes)[labels]


@pytest.mark.parametrize("name", CLASS.metrics)
def test_paired_difference_is_the_difference_of_both_metrics(name: str) -> None:
    generator = np.random.default_rng(0)
    targets = generator.integers(4, size=50)
    before, after = answers(generator, 50, 4), answers(generator, 50, 4)
    found = paired_difference(
        "image_classification", name, targets, before, after, HUNDRED, top_k=2
    )
    old, new = (
        measure("image_classification", targets, outputs, HUNDRED, top_k=2)[name].value
        for outputs in (before, after)
    )
    assert found.difference == new - old
    assert (found.before, found.after, found.rows, found.confidence, found.metric) == (
        old,
        new,
        50,
        0.95,
        name,
    )
    assert found.low <= found.difference <= found.high
    assert (found.p_value is not None) == (name == "accuracy")


@pytest.mark.parametrize("name", NUMBER.metrics)
def test_paired_difference_of_regression_is_the_difference_of_both_metrics(name: str) -> None:
    generator = np.random.default_rng(0)
    targets = generator.normal(size=50)
    before, after = (targets + generator.normal(size=50) for _ in range(2))
    found = paired_difference("table_regression", name, targets, before, after[:, None], HUNDRED)
    old, new = (
        measure("table_regression", targets, values, HUNDRED)[name].value
        for values in (before, after)
    )
    assert found.difference == new - old
    assert found.low <= found.difference <= found.high
    assert found.p_value is None


def test_paired_bootstrap_resamples_the_same_rows_for_both() -> None:
    generator = np.random.default_rng(2)
    targets, before, after = (
        generator.integers(3, size=40),
        answers(generator, 40, 3),
        answers(generator, 40, 3),
    )
    found = paired_difference("table_classification", "brier", targets, before, after, THOUSAND)
    old, new = (((outputs - np.eye(3)[targets]) ** 2).sum(axis=1) for outputs in (before, after))
    rows = np.random.default_rng(THOUSAND.seed).integers(40, size=(1000, 40))
    low, high = np.quantile((new - old)[rows].mean(axis=1), [0.025, 0.975])
    assert [found.low, found.high] == pytest.approx([low, high], abs=1e-12)


def test_paired_interval_is_narrower_because_row_difficulty_cancels() -> None:
    generator = np.random.default_rng(3)
    targets = generator.normal(size=300)
    before = targets + generator.normal(size=300)
    after = before + 0.01 * generator.normal(size=300)
    found = paired_difference("table_regression", "rmse", targets, before, after, THOUSAND)
    alone = measure("table_regression", targets, before, THOUSAND)["rmse"]
    assert found.high - found.low < (alone.high - alone.low) / 20


def test_paired_difference_of_equal_answers_is_zero_without_width() -> None:
    generator = np.random.default_rng(4)
    targets, outputs = generator.integers(3, size=30), answers(generator, 30, 3)
    for name in set(CLASS.metrics) - {"top_k_accuracy"}:
        found = paired_difference("image_classification", name, targets, outputs, outputs, HUNDRED)
        assert (found.difference, found.low, found.high) == (0, 0, 0)
        assert found.p_value in (None, 1)


def test_paired_interval_covers_the_true_difference() -> None:
    generator, covered = np.random.default_rng(5), 0
    for trial in range(300):
        difficulty = generator.random(200)
        before, after = (
            one_hot((difficulty + 0.2 * generator.random(200) > bound).astype(int))
            for bound in (0.9, 0.8)
        )
        found = paired_difference(
            "image_classification",
            "accuracy",
            np.zeros(200),
            before,
            after,
            Resampling(trial, 400, 0.9),
        )
        # P(difficulty + 0.2 * uniform > bound) is 1.1 - bound where the bound is within [0.2, 1]
        covered += found.low <= -0.1 <= found.high
    assert 0.85 <= covered / 300 <= 0.95


def test_chunk_size_of_resamples_does_not_change_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(6)
    targets, before, after = (
        generator.integers(3, size=40),
        answers(generator, 40, 3),
        answers(generator, 40, 3),
    )
    whole = paired_difference("image_classification", "roc_auc", targets, before, after, THOUSAND)
    monkeypatch.setattr(scores, "_CHUNK_NUMBERS", 400)
    assert (
        paired_difference("image_classification", "roc_auc", targets, before, after, THOUSAND)
        == whole
    )


def test_a_paired_difference_survives_a_round_trip_through_json() -> None:
    generator = np.random.default_rng(7)
    found = paired_difference(
        "image_classification",
        "accuracy",
        generator.integers(2, size=9),
        answers(generator, 9, 2),
        answers(generator, 9, 2),
        HUNDRED,
    )
    assert PairedDifference.model_validate_json(found.model_dump_json()) == found


# McNemar


def test_mcnemar_p_value_agrees_with_hand_computation() -> None:
    # 1 row lost and 7 gained: 2 (1 + 8) / 2^8
    before, after = np.array([1, *[0] * 7, 1, 0]), np.array([0, *[1] * 7, 1, 0])
    found = paired_difference(
        "image_classification", "accuracy", np.ones(10), one_hot(before), one_hot(after), HUNDRED
    )
    assert found.p_value == pytest.approx(18 / 256, rel=1e-12)
    assert found.difference == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("lost", "gained"),
    [(0, 0), (0, 1), (1, 0), (3, 3), (2, 9), (40, 60), (500, 700), (0, 900), (90, 700)],
)
def test_mcnemar_p_value_agrees_with_integer_arithmetic(lost: int, gained: int) -> None:
    total, fewer = lost + gained, min(lost, gained)
    expected = min(
        Fraction(1),
        2 * sum((Fraction(math.comb(total, k), 2**total) for k in range(fewer + 1)), Fraction(0)),
    )
    assert mcnemar_p_value(lost, gained) == pytest.approx(float(expected), rel=1e-9, abs=1e-300)
    assert mcnemar_p_value(gained, lost) == mcnemar_p_value(lost, gained)


def test_mcnemar_test_keeps_its_level() -> None:
    lost = np.random.default_rng(8).binomial(30, 0.5, size=4000)
    p_values = {count: mcnemar_p_value(count, 30 - count) for count in range(31)}
    assert np.mean([p_values[count] <= 0.05 for count in lost.tolist()]) <= 0.055


def test_mcnemar_p_value_of_very_many_rows_is_finite() -> None:
    assert mcnemar_p_value(0, 1_000_000) == 0
    assert math.isclose(mcnemar_p_value(500_000, 500_000), 1)


# refusals


@pytest.mark.parametrize(
    ("metric", "targets", "before", "after", "text"),
    [
        (
            "rmse",
            [0, 1],
            [[1, 0], [0, 1]],
            [[1, 0], [0, 1]],
            "'rmse' is not a metric of image_classification",
        ),
        (
            "accuracy",
            [0, 1],
            [[1, 0], [0, 1]],
            [[1, 0, 0], [0, 1, 0]],
            "2 classes before and 3 after",
        ),
        ("accuracy", [0, 1], [[1, 0], [0, 1]], [[1, 0]], "2 targets and 1 rows"),
        ("accuracy", [0, 1], [[1, 0], [0, 1]], [[1, 0], [np.nan, 1]], "row 1"),
        (
            "roc_auc",
            [1, 1],
            [[1, 0], [0, 1]],
            [[1, 0], [0, 1]],
            "roc_auc is not defined: all rows have the same class",
        ),
        (
            "top_k_accuracy",
            [0, 1],
            [[1, 0], [0, 1]],
            [[1, 0], [0, 1]],
            "top_k_accuracy is not defined",
        ),
    ],
)
def test_paired_difference_refuses_incomparable_answers(
    metric: str, targets: list[int], before: list[list[float]], after: list[list[float]], text: str
) -> None:
    with pytest.raises(MetricError) as caught:
        paired_difference("image_classification", metric, targets, before, after, HUNDRED)
    assert text in str(caught.value)
