"""Metrics of uncertainty on simulated rows of known calibration, and their section of the page."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.metrics.class_uncertainty import softmax
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.reports.pages.sections.uncertainty import uncertainty_section
from tests.artifacts.test_uncertainty import simulated, with_threshold
from tests.calibrations import CALIBRATION

RESAMPLING = Resampling(seed=1, num_samples=100, confidence=0.95)
NUM_ROWS = 3000


def worth(too_sure: float = 1.0, calibration: Calibration = CALIBRATION) -> UncertaintyReport:
    """Rows of a calibrated network, which before was `too_sure` times as sure."""
    generator = np.random.default_rng(0)
    logits, classes = simulated(generator, NUM_ROWS)
    answers = Answers(
        softmax(logits).astype(np.float32), generator.random(NUM_ROWS).astype(np.float32)
    )
    before = softmax(logits * too_sure).astype(np.float32)
    return UncertaintyReport(
        "image_classification", calibration, classes, answers, before, RESAMPLING
    )


def numbers(half: float | None = 1.0) -> UncertaintyReport:
    errors = np.random.default_rng(0).normal(size=NUM_ROWS)
    answers = Answers(np.zeros((NUM_ROWS, 1), np.float32), np.abs(errors).astype(np.float32))
    return UncertaintyReport(
        "image_regression", with_threshold(half), errors, answers, None, RESAMPLING
    )


def test_calibration_error_is_near_0_for_a_calibrated_and_large_for_an_overconfident_network() -> (
    None
):
    metrics = worth(too_sure=4).metrics
    assert metrics["calibration_error"].value < 0.03
    assert metrics["calibration_error_before"].value > 0.15
    assert (
        metrics["calibration_error"].low
        <= metrics["calibration_error"].value
        <= metrics["calibration_error"].high
    )
    assert metrics["log_loss_before"].value > worth().metrics["log_loss_before"].value + 0.3


def test_coverage_and_set_size_match_hand_counts() -> None:
    found = worth()
    sets = found.answers.outputs >= np.minimum(
        np.float32(0.25), found.answers.outputs.max(axis=1, keepdims=True)
    )
    assert found.metrics["set_size"].value == sets.sum() / NUM_ROWS
    assert (
        found.metrics["coverage"].value
        == sets[np.arange(NUM_ROWS), found.targets.astype(int)].mean()
    )
    assert found.metrics["ood_fraction"].value == pytest.approx(
        0.25, abs=0.03
    )  # scores are uniform, the threshold is 0.75


def test_sets_of_every_label_have_full_coverage() -> None:
    found = worth(calibration=with_threshold(0.0)).metrics
    assert (found["coverage"].value, found["set_size"].value) == (1.0, 5.0)


def test_intervals_of_a_numeric_target_reach_their_coverage() -> None:
    found = numbers().metrics
    assert set(found) == {"coverage", "ood_fraction"}
    assert found["coverage"].value == pytest.approx(0.683, abs=0.03)
    assert set(numbers(None).metrics) == {"ood_fraction"}


def test_reliability_bins_match_accuracy_only_for_a_calibrated_network() -> None:
    found = worth(too_sure=4)
    assert max(map(abs, overconfidence(found, found.answers.outputs))) < 0.1
    assert found.before is not None
    assert max(overconfidence(found, found.before)) > 0.2


def overconfidence(report: UncertaintyReport, probabilities: NDArray[np.float32]) -> list[float]:
    """Confidence less accuracy in each bin above a confidence of 0.5."""
    bins = report.reliability_bins(probabilities)
    return [one.confidence - one.accuracy for one in bins if one.confidence > 0.5]


@pytest.mark.parametrize("found", [worth(), numbers()])
def test_rejecting_the_most_doubtful_rows_lowers_the_error(found: UncertaintyReport) -> None:
    doubt: NDArray[np.floating] = (
        found.answers.scores if found.before is None else -found.answers.outputs.max(axis=1)
    )
    share, risk = found.risk_curve(doubt)
    assert share[-1] == 1.0
    assert risk[-1] == pytest.approx(found.losses.mean())
    assert risk[0] < 0.5 * risk[-1]


def test_the_uncertainty_section_names_fitted_parameters_and_too_few_rows() -> None:
    assert "Reliability" in uncertainty_section(worth())
    text = uncertainty_section(numbers())
    assert "An interval is the value +/- 1" in text
    assert "Reliability" not in text
    few = CALIBRATION.model_copy(
        update={"conformal": CALIBRATION.conformal.model_copy(update={"rows": 5, "threshold": 0.0})}
    )
    assert "too few rows for that coverage" in uncertainty_section(worth(calibration=few))
    assert "There are no intervals" in uncertainty_section(numbers(None))


def test_the_uncertainty_section_warns_of_missed_coverage_and_of_few_rows() -> None:
    enough = {"rows": 200, "threshold": 1.645}  # nine tenths of normal errors
    met = with_fields(numbers(), coverage=0.9, **enough)
    assert met.warnings == []
    assert "the target" not in uncertainty_section(met)
    missed = with_fields(numbers(), coverage=0.95, **enough)
    (doubt,) = missed.warnings
    assert "is below the target of 95%" in doubt
    assert doubt in uncertainty_section(missed)
    few = with_fields(numbers(), coverage=0.9, **(enough | {"rows": 66}))
    assert "fitted on 66 rows, fewer than 200" in uncertainty_section(few)


def with_fields(found: UncertaintyReport, **changes: float) -> UncertaintyReport:
    conformal = found.calibration.conformal.model_copy(update=changes)
    return replace(found, calibration=found.calibration.model_copy(update={"conformal": conformal}))
