"""Quality estimates without labels: accurate under covariate shift, and invalid if unknowable."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.drift.quality_estimate import MIN_ROWS, Estimate, estimate_quality
from slipway.drift.window import Window
from tests.calibrations import CALIBRATION
from tests.drift.populations import (
    CONTRACT,
    ORDINARY,
    Population,
    ReferenceRows,
    accuracy,
    build_reference,
    features_of_rows,
    reference_of,
    window_of,
)

Float = NDArray[np.float64]
MIXED = Population(hardness=0.2)
REFERENCE_ROWS = MIXED.draw(np.random.default_rng(1), 6000)
REFERENCE = reference_of(REFERENCE_ROWS)
VALUE = OutputContract(kind="value", labels=[])


def _estimate(population: Population, seed: int, num_rows: int = 3000) -> tuple[Estimate, float]:
    rows = population.draw(np.random.default_rng(seed), num_rows)
    return estimate_quality(REFERENCE, window_of(REFERENCE, rows)), accuracy(rows)


@pytest.mark.parametrize("hardness", [0.0, 0.2, 0.5, 0.9])
def test_estimated_accuracy_is_within_two_points_when_hard_rows_become_more_or_less_frequent(
    hardness: float,
) -> None:
    differences = []
    for seed in range(12):
        estimate, truth = _estimate(Population(hardness=hardness), seed)
        assert estimate.valid, estimate.reason
        assert estimate.value is not None
        differences.append(estimate.value - truth)
    assert abs(np.mean(differences)) < 0.01
    assert np.mean(np.abs(differences) < 0.02) >= 11 / 12


def test_accuracy_of_the_reference_rows_is_no_substitute_for_an_estimate() -> None:
    """Counter-check: the reference's own accuracy is off by more than ten points."""
    assert abs(_estimate(Population(hardness=0.9), 3)[1] - accuracy(REFERENCE_ROWS)) > 0.1


@pytest.mark.nightly(seconds=20)
def test_estimate_interval_covers_the_true_accuracy_in_at_least_90_percent_of_windows() -> None:
    random, held, widths = np.random.default_rng(5), 0, []
    for _ in range(150):
        reference = reference_of(MIXED.draw(random, 1000))
        rows = Population(hardness=0.5).draw(random, 500)
        estimate = estimate_quality(reference, window_of(reference, rows))
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= accuracy(rows) <= estimate.high
        widths.append(estimate.high - estimate.low)
    assert held >= 135  # of 150
    assert np.mean(widths) < 0.11


def test_estimate_is_invalid_for_a_miscalibrated_network() -> None:
    rows = Population(hardness=0.5, overconfidence=0.2).draw(np.random.default_rng(6), 3000)
    reference = reference_of(rows)
    estimate = estimate_quality(reference, window_of(reference, rows))
    assert not estimate.valid
    assert "the confidence was off by" in estimate.reason


def _miscalibrated_by_x0(
    seed: int, num_rows: int, excess: Callable[[Float], Float], above: float = -np.inf
) -> ReferenceRows:
    """Answers calibrated on average, but overconfident by `excess` of the first column.

    Only rows whose first column is `above` a bound are returned.
    """
    random = np.random.default_rng(seed)
    rows = Population(hardness=1.0).draw(random, 4 * num_rows)
    rows.inputs[:, 0] = random.permutation(rows.inputs[:, 0])
    is_right = random.uniform(size=4 * num_rows) < rows.outputs.max(axis=1) - excess(
        rows.inputs[:, 0]
    )
    predicted = rows.outputs.argmax(axis=1)
    targets = np.where(is_right, predicted, (predicted + 1) % 10).astype(np.float64)
    taken = np.flatnonzero(rows.inputs[:, 0] > above)[:num_rows]
    return ReferenceRows(
        rows.inputs[taken], rows.outputs[taken], rows.scores[taken], targets[taken]
    )


def _more_with_x0(x0: Float) -> Float:
    excess: Float = 0.08 * np.clip(x0, -2, 2)
    return excess


def _in_stripes_of_x0(x0: Float) -> Float:
    excess: Float = 0.2 * np.sign(np.sin(4 * x0))
    return excess


@pytest.mark.process
def test_estimate_corrects_a_confidence_whose_calibration_depends_on_a_feature() -> None:
    reference = reference_of(_miscalibrated_by_x0(22, 12000, _more_with_x0))
    differences = []
    for seed in range(8):
        rows = _miscalibrated_by_x0(100 + seed, 3000, _more_with_x0, above=0.3)
        estimate = estimate_quality(reference, window_of(reference, rows))
        assert estimate.valid, estimate.reason
        assert estimate.value is not None
        differences.append(estimate.value - accuracy(rows))
        assert (
            abs(float(rows.outputs.max(axis=1).mean()) - accuracy(rows)) > 0.05
        )  # counter-check: the mean confidence is far off
    assert abs(np.mean(differences)) < 0.01
    assert np.mean(np.abs(differences) < 0.02) >= 7 / 8


def test_estimate_is_invalid_if_calibration_depends_on_a_feature_in_steps() -> None:
    reference = reference_of(_miscalibrated_by_x0(22, 12000, _in_stripes_of_x0))
    like, unlike = (
        _miscalibrated_by_x0(23, 3000, _in_stripes_of_x0, above) for above in (-np.inf, 0.0)
    )
    stripe = unlike.inputs[:, 0] < 0.7
    unlike = ReferenceRows(
        unlike.inputs[stripe], unlike.outputs[stripe], unlike.scores[stripe], unlike.targets[stripe]
    )
    assert estimate_quality(reference, window_of(reference, like)).valid
    estimate = estimate_quality(reference, window_of(reference, unlike))
    assert not estimate.valid
    assert "validation rows with such values of column x0" in estimate.reason
    assert estimate.value is not None
    assert abs(estimate.value - accuracy(unlike)) > 0.05


@pytest.mark.parametrize(("num_labels", "is_enough"), [(600, False), (6000, True)])
def test_estimate_is_valid_only_if_the_labels_determine_it_to_two_points(
    num_labels: int, is_enough: bool
) -> None:
    reference = reference_of(MIXED.draw(np.random.default_rng(24), num_labels))
    estimate = estimate_quality(
        reference,
        window_of(reference, Population(hardness=0.9).draw(np.random.default_rng(25), 3000)),
    )
    assert estimate.valid == is_enough
    assert (
        f"{num_labels:,} validation labels determine the accuracy of 5,000 such rows"
        in estimate.reason
    ) != is_enough


def test_short_windows_widen_the_interval_without_making_the_estimate_invalid() -> None:
    """The noise of a window's own labels only widens the interval."""
    (short, _), (long, _) = (
        _estimate(Population(hardness=0.5), 26, num_rows) for num_rows in (500, 5000)
    )
    assert short.valid
    assert long.valid
    widths = [(one.high or 0.0) - (one.low or 0.0) for one in (short, long)]
    assert widths[0] > 2 * widths[1]
    assert widths[0] > 0.04


def test_estimate_is_invalid_if_too_many_rows_are_out_of_distribution() -> None:
    estimate, _ = _estimate(Population(hardness=0.2, strangeness=0.4), 7)
    assert not estimate.valid
    assert "rows are OOD" in estimate.reason


def test_estimate_is_invalid_if_too_many_inputs_leave_the_reference_range() -> None:
    estimate, _ = _estimate(Population(hardness=0.2, shift=6.0), 8)
    assert not estimate.valid
    assert "outside the range" in estimate.reason


def test_too_few_window_or_validation_rows_give_no_estimate() -> None:
    estimate, _ = _estimate(MIXED, 9, MIN_ROWS - 1)
    assert (estimate.valid, estimate.value) == (False, None)
    few = reference_of(MIXED.draw(np.random.default_rng(10), 80))
    found = estimate_quality(few, window_of(few, MIXED.draw(np.random.default_rng(11), 500)))
    assert (found.valid, found.metric) == (False, None)
    assert "80 validation rows" in found.reason


def test_estimate_from_120_validation_rows_is_invalid() -> None:
    reference = reference_of(MIXED.draw(np.random.default_rng(12), 120))
    estimate = estimate_quality(
        reference,
        window_of(reference, Population(hardness=0.9).draw(np.random.default_rng(13), 100)),
    )
    assert not estimate.valid


def _values(seed: int, num_rows: int, far: float, informed: bool = True) -> ReferenceRows:
    """Errors that grow with the OOD score; both are larger for a fraction `far` of the rows."""
    random = np.random.default_rng(seed)
    rows = ORDINARY.draw(random, num_rows)
    scores = random.gamma(20, 0.02, num_rows) + np.where(
        random.uniform(size=num_rows) < far, 0.2, 0
    )
    errors = random.normal(size=num_rows) * (scores**2 * 6 if informed else 1.0)
    outputs = random.normal(size=(num_rows, 1))
    return ReferenceRows(
        rows.inputs,
        outputs.astype(np.float32),
        np.minimum(scores, 0.74).astype(np.float32),
        outputs[:, 0] + errors,
    )


def _rmse_estimate(reference_rows: ReferenceRows, rows: ReferenceRows) -> Estimate:
    reference = build_reference(CONTRACT, VALUE, CALIBRATION, reference_rows)
    window = Window(reference)
    window.add(features_of_rows(rows))
    return estimate_quality(reference, window)


def test_estimated_rmse_follows_the_ood_score() -> None:
    rows = _values(15, 3000, far=0.6)
    truth, before = (
        float(np.sqrt(np.square(own.outputs[:, 0] - own.targets).mean()))
        for own in (rows, _values(16, 6000, far=0.2))
    )
    estimate = _rmse_estimate(_values(14, 6000, far=0.2), rows)
    assert estimate.valid, estimate.reason
    assert estimate.value == pytest.approx(truth, rel=0.06)
    assert abs(before / truth - 1) > 0.15


def test_estimated_rmse_is_invalid_if_the_ood_score_is_uninformative() -> None:
    estimate = _rmse_estimate(
        _values(17, 3000, far=0.2, informed=False), _values(18, 1000, far=0.2, informed=False)
    )
    assert not estimate.valid
    assert "does not separate large errors from small ones" in estimate.reason


def test_estimate_does_not_read_the_labels() -> None:
    rows = MIXED.draw(np.random.default_rng(19), 1000)
    blind = replace(rows, targets=np.full(1000, np.nan))
    assert estimate_quality(REFERENCE, window_of(REFERENCE, blind)) == estimate_quality(
        REFERENCE, window_of(REFERENCE, rows)
    )
