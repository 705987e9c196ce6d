"""Quality estimate without labels: accuracy or RMSE of a window, with an interval.

Transfers the labels of the validation rows: how much better or worse answers were than their
confidence claimed (for numbers: the squared errors), by every feature. This holds under covariate
shift, while inputs still resemble those the network learned. It cannot hold if the same rows now
have other labels (concept drift), or if features matter in combinations that no single one shows:
only feedback reveals that. If traffic leaves the region of the validation rows, or their labels
are too few, the estimate is marked invalid.
"""

import math

import numpy as np

from slipway.drift.quality_reference import QualityReference
from slipway.drift.reference import Reference
from slipway.drift.window import Window
from slipway.system.contract import Contract

MIN_ROWS = 100  # of a window
_NORMAL = 1.959964  # half width of a 95 % interval, in standard errors
_NORMAL_ONE_SIDED = 1.645  # the same for a one-sided bound
_MAX_CALIBRATION_ERROR = 0.05  # root mean square over the bins, weighted by traffic
_MAX_P_VALUE = 0.01  # of equal squared errors in all bins of the OOD score
_MAX_GAP = 0.02  # between the estimates by single features, in points of accuracy
_MAX_RELATIVE_GAP = 0.1  # the same for a mean squared error, relative to it
_MANY_STANDARD_ERRORS = 3.0  # noise rarely exceeds it in any of a dozen features
# A valid accuracy is off by at most so much in 95 of 100 windows with so many rows.
_PROMISED_ERROR, _PROMISED_ROWS = 0.02, 5000
_MAX_HALF_WIDTH = 0.1  # of the interval of an accuracy; relative for an RMSE
_MAX_UNUSUAL = 0.05  # fraction of rows unlike the reference, beyond the reference's own


class Estimate(Contract):
    """Estimated quality; 95 % of intervals contain what labels for these very rows would show."""

    metric: str | None  # "accuracy" or "rmse"; null without any estimate
    value: float | None
    low: float | None
    high: float | None
    valid: bool
    reason: str  # why it is invalid; empty if valid


def estimate_quality(reference: Reference, window: Window) -> Estimate:
    """Estimate the quality of a window's answers.

    An invalid estimate keeps its numbers for display; they are not fit for decisions.
    """
    quality = reference.answers.quality
    if quality is None:
        return _no_estimate(
            f"the bundle was exported with {reference.answers.rows} validation rows, too few to "
            "estimate quality from"
        )
    if window.num_rows < MIN_ROWS:
        return _no_estimate(f"{window.num_rows} rows were seen, expected at least {MIN_ROWS}")

    counts = [window.counts(column) for column in range(len(reference.features))]
    residual, model_variance = quality.adjustment.predict(reference.features, counts)
    value = window.confidence_sum / window.num_rows + residual
    fractions = window.quality_counts / window.quality_counts.sum()
    label_variance = float(fractions @ np.array(quality.variances))  # of one row
    half_width = _NORMAL * math.sqrt(model_variance + label_variance / window.num_rows)
    low, high = value - half_width, value + half_width

    reasons = [*_unusual_rows(reference, window), *_disagreement(reference, quality, window, value)]
    if quality.metric != "rmse":
        reasons += _miscalibration(quality, window)
        reasons += _too_few_labels(quality, model_variance + label_variance / _PROMISED_ROWS)
        value, low, high = (min(1.0, max(0.0, bound)) for bound in (value, low, high))
        scale = 1.0
    else:
        reasons += _uninformative_score(quality)
        value, low, high = (math.sqrt(max(0.0, bound)) for bound in (value, low, high))
        scale = value or 1.0
    half_width = (high - low) / 2 / scale
    if half_width > _MAX_HALF_WIDTH:
        reasons.append(
            f"the interval is too wide (plus or minus {half_width:.2f}, expected at most "
            f"{_MAX_HALF_WIDTH})"
        )
    return Estimate(
        metric=quality.metric,
        value=value,
        low=low,
        high=high,
        valid=not reasons,
        reason="; ".join(reasons),
    )


def _no_estimate(reason: str) -> Estimate:
    return Estimate(metric=None, value=None, low=None, high=None, valid=False, reason=reason)


def _unusual_rows(reference: Reference, window: Window) -> list[str]:
    """Reject windows whose rows are too unlike the reference's."""
    inputs, answers = reference.inputs, reference.answers
    outliers = _surplus(window.num_outliers, window.num_rows, answers.outliers, answers.rows)
    if outliers > _MAX_UNUSUAL:
        return [
            f"at least {outliers:.0%} more of the rows are outliers than of the validation rows"
        ]
    outside = _surplus(window.num_outside, window.num_rows, inputs.outside, inputs.rows)
    if outside > _MAX_UNUSUAL:
        return [
            f"at least {outside:.0%} more of the rows than expected have an input outside the "
            "range of all training and validation rows"
        ]
    return []


def _surplus(count: int, rows: int, reference_count: int, reference_rows: int) -> float:
    """Lower 95 % bound of the window's fraction less the reference's (one-sided, normal)."""
    fraction = (count + 0.5) / (rows + 1)
    reference_fraction = (reference_count + 0.5) / (reference_rows + 1)
    variance = fraction * (1 - fraction) / rows
    variance += reference_fraction * (1 - reference_fraction) / reference_rows
    return fraction - reference_fraction - _NORMAL_ONE_SIDED * math.sqrt(variance)


def _uninformative_score(quality: QualityReference) -> list[str]:
    p_value = quality.information_p_value
    if p_value <= _MAX_P_VALUE:
        return []
    return [
        "on the validation rows the OOD score does not separate large errors from small ones "
        f"(p = {p_value:.2g})"
    ]


def _miscalibration(quality: QualityReference, window: Window) -> list[str]:
    """Reject windows in bins where the confidence was wrong on validation rows.

    Noise produces gaps as well; their expected size is subtracted (Bröcker, Quarterly Journal of
    the Royal Meteorological Society 138, 2012).
    """
    fractions = window.quality_counts / window.quality_counts.sum()
    noise = np.array(quality.variances) / np.maximum(np.array(quality.counts), 1)
    square = float(fractions @ (np.square(np.array(quality.residuals)) - noise))
    error = math.sqrt(max(0.0, square))
    if error <= _MAX_CALIBRATION_ERROR:
        return []
    return [
        f"the confidence was off by {error:.0%} on validation rows like these, expected at most "
        f"{_MAX_CALIBRATION_ERROR:.0%}"
    ]


def _too_few_labels(quality: QualityReference, variance: float) -> list[str]:
    """Reject estimates whose `variance`, in a window of _PROMISED_ROWS, breaks the promise."""
    half_width = _NORMAL * math.sqrt(variance)
    if half_width <= _PROMISED_ERROR:
        return []
    return [
        f"{sum(quality.counts):,} validation labels determine the accuracy of {_PROMISED_ROWS:,} "
        f"such rows to plus or minus {half_width:.1%}, expected at most {_PROMISED_ERROR:.0%}"
    ]


def _disagreement(
    reference: Reference, quality: QualityReference, window: Window, value: float
) -> list[str]:
    """Reject estimates that the bins of a single input feature contradict; name the feature.

    The model is a smooth curve of each number: it misses steps and curves with several turns.
    """
    max_gap = _MAX_GAP if quality.metric != "rmse" else _MAX_RELATIVE_GAP * value
    strongest, name = 0.0, ""
    for column, feature in enumerate(reference.inputs.features):
        stratum = quality.strata[column]
        rows = np.array(stratum.counts)
        is_known = rows > 0
        fractions = (window.counts(column) / window.num_rows)[is_known]
        variances = np.array(stratum.variances)[is_known] / rows[is_known]
        gap = abs(float(fractions @ np.array(stratum.residuals)[is_known]))
        deviation = math.sqrt(float(np.square(fractions) @ variances))
        strength = gap / max(deviation, 1e-12)
        if gap > max(max_gap, _MANY_STANDARD_ERRORS * deviation) and strength > strongest:
            strongest, name = strength, feature.name
    if not name:
        return []
    return [
        f"validation rows with such values of {name} were answered better or worse than the "
        "estimate assumes"
    ]
