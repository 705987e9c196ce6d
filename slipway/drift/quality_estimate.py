"""Estimates a window's accuracy or RMSE without labels, with an interval.

The validation rows show, for each feature, how much better or worse answers are than their
confidence claims (for numbers: the squared errors). The estimate transfers this to the window. It
is right under covariate shift, as long as inputs resemble those of the training. It is wrong if
equal rows now have different labels (concept drift), or if only combinations of features matter;
only feedback reveals that. If the traffic leaves the range of the validation rows, or if there are
too few validation labels, the estimate is marked as invalid.
"""

import math

import numpy as np

from slipway.drift.quality_reference import QualityReference
from slipway.drift.reference import Reference
from slipway.drift.window import Window
from slipway.system.contract import Contract

MIN_ROWS = 100  # smallest window with an estimate
_NORMAL = 1.959964  # half width of a 95 % interval, in standard errors
_NORMAL_ONE_SIDED = 1.645  # distance of a one-sided 95 % bound, in standard errors
_MAX_CALIBRATION_ERROR = 0.05  # root mean square over the bins, weighted by traffic
# Largest p-value of the hypothesis that the OOD score does not predict squared errors.
_MAX_P_VALUE = 0.01
_MAX_GAP = 0.02  # accuracy: largest deviation that a single feature's bins may show
_MAX_RELATIVE_GAP = 0.1  # mean squared error: the same, as a fraction of it
_MANY_STANDARD_ERRORS = 3.0  # noise rarely exceeds it in any of a dozen features
# In 95 % of windows with _PROMISED_ROWS rows, a valid accuracy is off by at most _PROMISED_ERROR.
_PROMISED_ERROR, _PROMISED_ROWS = 0.02, 5000
_MAX_HALF_WIDTH = 0.1  # half width of the interval of an accuracy; relative for an RMSE
_MAX_UNUSUAL = 0.05  # fraction of rows unlike the reference, beyond the reference's own


class Estimate(Contract):
    """Estimated quality of a window, with an interval.

    95 % of valid intervals contain the quality that labels of exactly these rows would show.
    """

    metric: str | None  # such as "accuracy" or "rmse"; null if nothing could be estimated
    value: float | None
    low: float | None
    high: float | None
    valid: bool
    reason: str  # reason for an invalid estimate; empty if valid


def estimate_quality(reference: Reference, window: Window) -> Estimate:
    """Estimate the quality of a window's answers.

    An invalid estimate still has numbers, for display; do not base decisions on them.
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
    label_variance = float(fractions @ np.array(quality.variances))  # variance of one row's label
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
    """Return a reason if too many rows of the window are unlike the reference rows; else []."""
    inputs, answers = reference.inputs, reference.answers
    unlike = _surplus(window.num_ood, window.num_rows, answers.ood_rows, answers.rows)
    if unlike > _MAX_UNUSUAL:
        return [f"at least {unlike:.0%} more of the rows are OOD than of the validation rows"]
    outside = _surplus(window.num_outside, window.num_rows, inputs.outside, inputs.rows)
    if outside > _MAX_UNUSUAL:
        return [
            f"at least {outside:.0%} more of the rows than expected have an input outside the "
            "range of all training and validation rows"
        ]
    return []


def _surplus(count: int, rows: int, reference_count: int, reference_rows: int) -> float:
    """Return a lower 95 % bound of the window's fraction minus the reference's (normal)."""
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
    """Return a reason if validation rows with such confidences were miscalibrated; else [].

    Noise alone also causes deviations; their expected square is subtracted (Bröcker, Quarterly
    Journal of the Royal Meteorological Society 138, 2012).
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
    """Return a reason if the validation labels are too few for the promised error; else [].

    `variance` is that of the estimate in a window of _PROMISED_ROWS rows.
    """
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
    """Return a reason that names the input feature that contradicts the estimate most; else [].

    A feature contradicts it if the validation residuals in its bins predict another quality.
    The estimate's model is a smooth curve in each number: it misses steps and repeated turns.
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
