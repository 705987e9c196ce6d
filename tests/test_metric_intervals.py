"""Confidence intervals of metrics: against brute force, their coverage, and their invariances."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.metrics import class_scores, scores
from slipway.metrics.class_scores import confusion_matrix
from slipway.metrics.scores import (
    Resampling,
    wilson_interval,
)
from slipway.system.errors import MetricError
from tests.metric_cases import (
    FEW,
    THOUSAND,
    classification_metrics,
    one_hot,
    random_case,
    regression_metrics,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning"),
    pytest.mark.filterwarnings("ignore:A single label was found:UserWarning"),
]
WILSON = ("accuracy", "precision_micro", "recall_micro", "recall_weighted", "f1_micro")
TOLERANCE = 1e-12


def test_intervals_of_counts_are_those_of_resampling_rows_one_by_one() -> None:
    generator = np.random.default_rng(5)
    targets = generator.integers(4, size=150)
    predicted = np.where(generator.random(150) < 0.7, targets, generator.integers(4, size=150))
    many = Resampling(seed=6, num_samples=8000, confidence=0.9)
    found = classification_metrics(targets, np.eye(4)[predicted], many)
    rows = generator.integers(150, size=(8000, 150))
    matrices = np.stack(
        [confusion_matrix(targets[chosen], predicted[chosen], 4) for chosen in rows]
    )
    counts = class_scores.ClassCounts(
        np.diagonal(matrices, axis1=1, axis2=2), matrices.sum(axis=2), matrices.sum(axis=1)
    )
    for name, samples in class_scores.scores_from_counts(counts).items():
        if name in WILSON:
            continue
        low, high = np.quantile(samples, [0.05, 0.95])
        assert abs(found[name].low - low) < 0.006
        assert abs(found[name].high - high) < 0.006


def test_resample_without_a_class_does_not_lower_a_perfect_score() -> None:
    targets = [0, 1, 2, 3] * 2  # a resample of 8 rows misses one of 4 classes more often than not
    found = classification_metrics(targets, one_hot(targets, 4), THOUSAND)
    names = ("f1_macro", "precision_macro", "recall_macro", "roc_auc", "average_precision")
    assert [(found[name].low, found[name].high) for name in names] == [(1, 1)] * 5


@pytest.mark.parametrize(
    ("hits", "rows", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (10, 10, 10 / (10 + 1.959964**2), 1.0),  # by hand: n / (n + z^2)
        (0, 10, 0.0, 1.959964**2 / (10 + 1.959964**2)),
    ],
)
def test_the_accuracy_has_wilsons_interval(hits: int, rows: int, low: float, high: float) -> None:
    found = classification_metrics([0] * rows, one_hot([0] * hits + [1] * (rows - hits), 2), FEW)
    for name in WILSON:
        assert [found[name].low, found[name].high] == pytest.approx([low, high], abs=5e-5)
        assert found[name].low <= found[name].value <= found[name].high


@pytest.mark.parametrize("share", [0.8, 0.99])
def test_wilsons_interval_reaches_its_coverage_even_near_one(share: float) -> None:
    hits = np.random.default_rng(7).binomial(200, share, size=4000)
    bounds = {count: wilson_interval(count, 200, 0.9) for count in np.unique(hits).tolist()}
    covered = np.mean([bounds[count][0] <= share <= bounds[count][1] for count in hits.tolist()])
    assert 0.87 <= covered <= 0.96


def test_bootstrap_intervals_reach_their_coverage_approximately() -> None:
    generator, covered = np.random.default_rng(7), 0
    for trial in range(300):
        right = generator.random(200) < 0.8
        outputs, resampling = (
            one_hot([0 if hit else 1 for hit in right], 2),
            Resampling(trial, 400, 0.9),
        )
        found = classification_metrics(
            np.zeros(200), outputs, resampling, names=["balanced_accuracy"]
        )
        covered += found["balanced_accuracy"].low <= 0.8 <= found["balanced_accuracy"].high
    assert 0.85 <= covered / 300 <= 0.95


@pytest.mark.parametrize("name", ["log_loss", "brier", "roc_auc", "average_precision"])
def test_intervals_are_those_of_measuring_resampled_rows_one_by_one(name: str) -> None:
    generator = np.random.default_rng(16)
    targets = generator.integers(3, size=25)
    probabilities = generator.multinomial(10, np.ones(3) / 3, size=25) / 10
    found = classification_metrics(targets, probabilities, Resampling(17, 200, 0.8), names=[name])[
        name
    ]
    rows = np.random.default_rng(17).integers(25, size=(200, 25))
    measured = [
        classification_metrics(targets[chosen], probabilities[chosen], FEW, names=[name])
        for chosen in rows
    ]
    samples = [one[name].value for one in measured if name in one]
    assert [found.low, found.high] == pytest.approx(
        np.quantile(samples, [0.1, 0.9]).tolist(), abs=TOLERANCE
    )


def test_resample_of_one_class_is_left_out_of_a_ranking_interval() -> None:
    found = classification_metrics([0, 1], [[0.9, 0.1], [0.2, 0.8]], THOUSAND)["roc_auc"]
    assert (found.value, found.low, found.high) == (1, 1, 1)
    with pytest.raises(MetricError, match="none of 1 resamples has rows of two classes"):
        classification_metrics(
            [0, 1], [[0.9, 0.1], [0.2, 0.8]], Resampling(seed=0, num_samples=1, confidence=0.9)
        )


def calibrated(
    generator: np.random.Generator, num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw answers of a perfectly calibrated network."""
    probabilities = generator.dirichlet(np.ones(3), size=num_rows)
    return (generator.random((num_rows, 1)) > probabilities.cumsum(axis=1)[:, :2]).sum(
        axis=1
    ), probabilities


def test_calibration_error_interval_covers_a_calibrated_network_but_percentiles_do_not() -> None:
    generator, held, by_percentiles, name = np.random.default_rng(18), 0, 0, "calibration_error"
    for trial in range(60):
        targets, probabilities = calibrated(generator, 200)
        resampling = Resampling(trial, 200, 0.95)
        found = classification_metrics(targets, probabilities, resampling, names=[name])[name]
        assert 0 <= found.low <= found.value <= found.high
        held += found.low == 0
        samples = scores.samples(
            class_scores.ClassAnswers(targets, probabilities, None), [name], resampling
        )[name]
        by_percentiles += scores.percentiles(samples, 0.95)[0] < 0.005
    assert held >= 54
    assert by_percentiles == 0


def test_the_interval_of_a_calibration_error_mirrors_the_percentiles_at_the_value() -> None:
    targets, probabilities = calibrated(np.random.default_rng(19), 1000)
    sharper = probabilities**3 / (probabilities**3).sum(axis=1, keepdims=True)
    found = classification_metrics(targets, sharper, THOUSAND, names=["calibration_error"])[
        "calibration_error"
    ]
    answers = class_scores.ClassAnswers(targets, sharper, None)
    low, high = scores.percentiles(
        scores.samples(answers, ["calibration_error"], THOUSAND)["calibration_error"],
        THOUSAND.confidence,
    )
    basic = (min(found.value, 2 * found.value - high), max(found.value, 2 * found.value - low))
    assert (found.low, found.high) == pytest.approx(basic, abs=TOLERANCE)
    assert found.low < low


def test_the_interval_of_the_calibration_error_of_an_overconfident_network_is_above_0() -> None:
    targets, probabilities = calibrated(np.random.default_rng(19), 1000)
    sharper = probabilities**3 / (probabilities**3).sum(axis=1, keepdims=True)
    found = classification_metrics(targets, sharper, THOUSAND, names=["calibration_error"])[
        "calibration_error"
    ]
    assert 0.1 < found.low < found.value < found.high < 0.4


def test_an_interval_does_not_depend_on_what_else_is_measured() -> None:
    targets, probabilities = random_case(np.random.default_rng(11))
    whole = classification_metrics(targets, probabilities, THOUSAND, top_k=2)
    for name, metric in whole.items():
        assert classification_metrics(targets, probabilities, THOUSAND, top_k=2, names=[name]) == {
            name: metric
        }


def test_an_interval_is_a_pure_function_of_the_seed() -> None:
    targets, probabilities = random_case(np.random.default_rng(11))
    assert classification_metrics(targets, probabilities, THOUSAND) == classification_metrics(
        targets, probabilities, THOUSAND
    )
    other = classification_metrics(targets, probabilities, Resampling(2, 1000, 0.95))
    assert other != classification_metrics(targets, probabilities, THOUSAND)


def test_more_confidence_gives_a_wider_interval_around_the_same_value() -> None:
    generator = np.random.default_rng(8)
    targets = generator.normal(size=200)
    values = targets + generator.normal(size=200)
    narrow, wide = (
        regression_metrics(targets, values, Resampling(1, 1000, share))["rmse"]
        for share in (0.5, 0.99)
    )
    assert wide.low < narrow.low < narrow.value == wide.value < narrow.high < wide.high


def test_resampling_in_bounded_memory_changes_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(20)
    targets, probabilities = (
        generator.integers(30, size=100),
        generator.dirichlet(np.ones(30), size=100),
    )
    whole = classification_metrics(targets, probabilities, Resampling(1, 100, 0.95), top_k=2)
    values = regression_metrics(targets, probabilities[:, 0], Resampling(1, 100, 0.95))
    monkeypatch.setattr(scores, "_CHUNK_NUMBERS", 1000)
    assert (
        classification_metrics(targets, probabilities, Resampling(1, 100, 0.95), top_k=2) == whole
    )
    assert regression_metrics(targets, probabilities[:, 0], Resampling(1, 100, 0.95)) == values
