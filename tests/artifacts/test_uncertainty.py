"""Temperatures and thresholds, fitted to simulated rows with known probabilities."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration, read_calibration, write_calibration
from slipway.metrics.class_uncertainty import (
    ClassUncertainty,
    fit_temperature,
    least_probability,
    softmax,
)
from slipway.metrics.number_scores import NumberUncertainty
from slipway.metrics.scores import fraction_of
from slipway.metrics.uncertainty import upper_quantile
from slipway.reports.evaluation.uncertainty import coverage_warnings
from slipway.system.errors import IntegrityError, SchemaError
from tests.calibrations import CALIBRATION

Float = NDArray[np.float64]
COVERAGE = 0.9
NUM_SETS = 200
# (14 + 1) * 0.1 is 1.5: the corrected threshold covers 14 of 15 on average, the quantile 0.85.
FEW = 14


def simulated(
    generator: np.random.Generator, num_rows: int, num_classes: int = 5
) -> tuple[Float, Float]:
    """Return simulated true logits (N, K), and classes (N,) drawn from them."""
    logits = 2 * generator.normal(size=(num_rows, num_classes))
    classes = (softmax(logits).cumsum(axis=1) < generator.random((num_rows, 1))).sum(axis=1)
    return logits, np.minimum(classes, num_classes - 1).astype(np.float64)


def with_threshold(threshold: float | None) -> Calibration:
    return CALIBRATION.model_copy(
        update={"conformal": CALIBRATION.conformal.model_copy(update={"threshold": threshold})}
    )


# temperature


@pytest.mark.parametrize("planted", [0.4, 1.0, 2.5])
def test_fit_temperature_recovers_the_simulated_temperature(planted: float) -> None:
    logits, classes = simulated(np.random.default_rng(0), 4000)
    assert fit_temperature(logits * planted, classes) == pytest.approx(planted, rel=0.07)


def test_temperature_stays_finite_if_every_row_is_correct() -> None:
    classes = np.arange(60) % 3
    logits = np.eye(3)[classes] * 4
    sure = softmax(logits / fit_temperature(logits, classes.astype(np.float64)))
    assert 0.95 < sure.max(axis=1).min() < 0.999


def test_temperature_is_bounded_for_noise_labels_and_1_without_rows() -> None:
    generator = np.random.default_rng(0)
    noise = fit_temperature(
        generator.normal(size=(500, 3)), generator.integers(3, size=500).astype(np.float64)
    )
    assert 1 < noise <= 100.01
    assert fit_temperature(np.empty((0, 3)), np.empty(0)) == 1.0


@pytest.mark.parametrize("temperature", [0.05, 0.7, 3.0, 50.0])
def test_temperature_changes_no_predicted_label(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(2000, 10)).astype(np.float32)
    shares = softmax(logits / temperature)
    assert (shares.argmax(axis=1) == logits.argmax(axis=1)).all()


# coverage

Fit = Callable[[NDArray[np.float32], Float], float]


def coverage_of_sets(fit: Fit, memorised: bool = False) -> float:
    """Return the mean coverage of prediction sets over 200 draws of rows.

    With `memorised`, the network knows the rows on which the sets are fitted.
    """
    generator, covered = np.random.default_rng(1), []
    for _ in range(NUM_SETS):
        logits, classes = simulated(generator, FEW)
        if memorised:
            logits[np.arange(FEW), classes.astype(int)] += 6
        calibration = with_threshold(fit(softmax(logits).astype(np.float32), classes))
        new, truth = simulated(generator, 100)
        sets = calibration.prediction_sets(softmax(new).astype(np.float32))
        covered.append(sets[np.arange(100), truth.astype(int)].mean())
    return float(np.mean(covered))


def test_prediction_sets_reach_the_coverage() -> None:
    assert (
        COVERAGE
        <= coverage_of_sets(lambda shares, classes: least_probability(shares, classes, COVERAGE))
        < 0.96
    )


def test_prediction_sets_miss_the_coverage_without_correction_or_on_training_rows() -> None:
    def plain(shares: NDArray[np.float32], classes: Float) -> float:
        return float(np.quantile(shares[np.arange(FEW), classes.astype(int)], 1 - COVERAGE))

    assert coverage_of_sets(plain) < COVERAGE
    assert (
        coverage_of_sets(
            lambda shares, classes: least_probability(shares, classes, COVERAGE), memorised=True
        )
        < COVERAGE
    )


def coverage_of_intervals(fit: Callable[[Float], float | None]) -> float:
    generator, covered = np.random.default_rng(2), []
    for _ in range(NUM_SETS):
        half = fit(np.abs(generator.standard_t(3, FEW)))
        assert half is not None
        covered.append((np.abs(generator.standard_t(3, 100)) <= half).mean())
    return float(np.mean(covered))


def test_conformal_intervals_need_the_finite_sample_correction_to_reach_the_coverage() -> None:
    assert COVERAGE <= coverage_of_intervals(lambda errors: upper_quantile(errors, COVERAGE)) < 0.96
    assert coverage_of_intervals(lambda errors: float(np.quantile(errors, COVERAGE))) < COVERAGE


def test_ood_threshold_flags_at_most_the_requested_fraction_of_ordinary_rows() -> None:
    assert (
        1 - coverage_of_intervals(lambda scores: upper_quantile(scores, COVERAGE)) <= 1 - COVERAGE
    )


@pytest.mark.parametrize("num_rows", [0, 8])
def test_conformal_fit_on_too_few_rows_gives_full_sets_no_interval_and_no_ood_flag(
    num_rows: int,
) -> None:
    shares = np.full((num_rows, 2), 0.5, dtype=np.float32)
    calibration = with_threshold(least_probability(shares, np.zeros(num_rows), COVERAGE))
    assert calibration.prediction_sets(np.array([[1.0, 0.0]], dtype=np.float32)).all()
    assert upper_quantile(np.zeros(num_rows), COVERAGE) is None
    assert with_threshold(None).interval(3.0) is None
    unknown = calibration.model_copy(
        update={"ood": calibration.ood.model_copy(update={"threshold": None})}
    )
    assert not unknown.is_ood(np.array([1e30], dtype=np.float32)).any()
    few = calibration.conformal.model_copy(update={"coverage": COVERAGE, "rows": num_rows})
    assert few.is_vacuous


def test_nine_rows_are_enough_for_a_coverage_of_nine_tenths() -> None:
    shares = np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None].repeat(2, axis=1)
    assert least_probability(shares, np.zeros(9), COVERAGE) == pytest.approx(0.1)
    assert upper_quantile(np.arange(9.0), COVERAGE) == 8.0
    assert not CALIBRATION.conformal.model_copy(update={"rows": 9}).is_vacuous


def test_prediction_sets_contain_the_best_label_and_labels_at_the_threshold() -> None:
    shares = np.array([[0.2, 0.5, 0.3], [0.34, 0.33, 0.33], [0.5, 0.5, 0.0]], dtype=np.float32)
    assert with_threshold(0.6).prediction_sets(shares).tolist() == [
        [False, True, False],
        [True, False, False],
        [True, True, False],
    ]
    assert with_threshold(float(np.float32(0.3))).prediction_sets(shares[0]).tolist() == [
        False,
        True,
        True,
    ]


# the file


def test_calibration_survives_a_round_trip_and_refuses_malformed_files(
    tmp_path: Path,
) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(SchemaError, match="is missing"):
        read_calibration(path)
    write_calibration(path, CALIBRATION)
    assert read_calibration(path) == read_calibration(path, CALIBRATION) == CALIBRATION
    with pytest.raises(IntegrityError, match="differs from the calibration of the bundle"):
        read_calibration(path, with_threshold(0.3))
    path.write_text(path.read_text().replace('"temperature": 1.0', '"temperature": 0.0'))
    with pytest.raises(SchemaError, match="is not a valid Calibration"):
        read_calibration(path)


# what was measured


def measured(hits: int, rows: int) -> Metric:
    return fraction_of(np.arange(rows) < hits, 0.95)


@pytest.mark.parametrize(("hits", "verdict"), [(110, "below"), (124, "within"), (138, "above")])
def test_coverage_verdict_needs_an_interval_that_excludes_the_target(
    hits: int, verdict: str
) -> None:
    conformal = CALIBRATION.conformal.model_copy(update={"coverage": 0.9, "rows": 200})
    found = measured(hits, 138)
    assert conformal.verdict(found.low, found.high) == verdict
    doubts = coverage_warnings(conformal, found)
    share = f"{hits / 138:.1%} of 138 test rows ({found.low:.1%} to {found.high:.1%})"
    below = f"The measured coverage, {share}, is below the target of 90%."
    assert doubts == [below] * (verdict == "below"), "more than the target is no fault"


@pytest.mark.parametrize(("rows", "warns"), [(199, True), (200, False)])
def test_coverage_fitted_on_fewer_than_200_rows_is_marked(rows: int, warns: bool) -> None:
    conformal = CALIBRATION.conformal.model_copy(update={"coverage": 0.9, "rows": rows})
    doubts = coverage_warnings(conformal, measured(124, 138))
    assert [f"fitted on {rows} rows, fewer than 200" in doubt for doubt in doubts] == [True] * warns


def test_is_held_is_true_for_rows_whose_set_or_interval_contains_the_label() -> None:
    shares = np.array([[0.2, 0.5, 0.3], [0.9, 0.05, 0.05]], dtype=np.float32)
    in_set = ClassUncertainty.is_held(with_threshold(0.25), shares, np.array([2.0, 1.0]))
    assert in_set.tolist() == [True, False]
    numbers = np.array([[1.0], [5.0]], dtype=np.float32)
    held = NumberUncertainty.is_held(with_threshold(2.0), numbers, np.array([3.0, 8.0]))
    assert held is not None
    assert held.tolist() == [True, False]
    assert NumberUncertainty.is_held(with_threshold(None), numbers, np.zeros(2)) is None
