"""How good the model is on the traffic, before any label is there: accuracy, or RMSE, with an interval, or the reason why not.

The labels of the validation rows are carried over: in each bin of the confidence (of the outlier score, for numbers) the answers are taken
to be right as often as they were there. That holds where the kinds of rows come in other shares (covariate shift), and where what
is asked still looks like what was learned. It cannot hold where the world gives other labels to the same rows (concept drift): only
feedback shows that. Where the traffic leaves the validation rows' region the estimate is marked invalid.
"""

import math

import numpy as np
from numpy.typing import NDArray

from slipway.contract import Contract
from slipway.drift.quality_reference import QualityReference
from slipway.drift.reference import Reference
from slipway.drift.window import Window

Float = NDArray[np.float64]

MIN_ROWS = 100  # of a window
_NORMAL = 1.959964  # of an interval of 95 %
_MAX_CALIBRATION_ERROR = 0.05  # of the confidence on validation rows, by root mean square over the traffic's bins
_LEAST_INFORMED = 0.01  # p-value: the mean squared errors of the outlier score's bins differ by more than chance
_MAX_DISAGREEMENT = 0.02  # of estimates by one feature or another, in points of accuracy
_MAX_DISAGREEMENT_OF_ERRORS = 0.1  # the same of a mean squared error, in parts of it
_FAR = 3.0  # standard errors: what noise hardly makes in any of some dozen features
_MAX_HALF_WIDTH = 0.1  # of the interval of an accuracy; of an RMSE in parts of it
_MAX_STRANGE = 0.05  # share of rows unlike the reference's, beyond what the reference has itself


class Estimate(Contract):
    """What the quality is without labels; `low` and `high` hold what feedback on these very rows would find, in 95 of 100 windows."""

    metric: str | None  # "accuracy" or "rmse"; null where there is no estimate at all
    value: float | None
    low: float | None
    high: float | None
    valid: bool
    reason: str  # why it is not valid; empty where it is


def estimate_quality(reference: Reference, window: Window) -> Estimate:
    """From the window alone. An estimate that is not valid keeps its numbers where there are any, for a look, never for a decision."""
    quality = reference.answers.quality
    if quality is None:
        return _none(f"the bundle was exported with {reference.answers.rows} validation rows, too few to learn from")
    if window.num_rows < MIN_ROWS:
        return _none(f"{window.num_rows} rows were seen, expected at least {MIN_ROWS}")
    counts = window.quality_counts
    shares, means, variances = counts / counts.sum(), np.array(quality.residuals), np.array(quality.variances)
    rows = np.maximum(np.array(quality.counts), 1)
    value = window.confidence_sum / window.num_rows + float(shares @ quality.corrections)
    # Of the labels that the bins were learned from, and of the labels that these rows will turn out to have.
    deviation = math.sqrt(float(np.square(shares) @ (variances / rows)) + float(shares @ variances) / window.num_rows)
    reasons = [reason for reason in (_unseen(reference, window), _uninformed(quality, shares, rows, means, variances)) if reason]
    reasons += _differently_calibrated(reference, quality, window, value)
    low, high = value - _NORMAL * deviation, value + _NORMAL * deviation
    if quality.metric == "rmse":
        value, low, high = (math.sqrt(max(0.0, square)) for square in (value, low, high))
    else:
        value, low, high = (min(1.0, max(0.0, share)) for share in (value, low, high))
    half = (high - low) / 2 / (value if quality.metric == "rmse" and value else 1)
    if half > _MAX_HALF_WIDTH:
        reasons.append(f"the interval is too wide to tell anything (plus or minus {half:.2f}, expected at most {_MAX_HALF_WIDTH})")
    return Estimate(metric=quality.metric, value=value, low=low, high=high, valid=not reasons, reason="; ".join(reasons))


def _none(reason: str) -> Estimate:
    return Estimate(metric=None, value=None, low=None, high=None, valid=False, reason=reason)


def _unseen(reference: Reference, window: Window) -> str:
    """Why the rows are too unlike the reference's to be judged by them; empty where they are not."""
    outliers = _surplus(window.num_outliers, window.num_rows, reference.answers.outliers, reference.answers.rows)
    if outliers > _MAX_STRANGE:
        return f"at least {outliers:.0%} more of the rows are outliers than of the validation rows"
    outside = _surplus(window.num_outside, window.num_rows, reference.inputs.outside, reference.inputs.rows)
    if outside > _MAX_STRANGE:
        return f"at least {outside:.0%} more of the rows than expected have an input outside the range of all training and validation rows"
    return ""


def _surplus(count: int, rows: int, own: int, own_rows: int) -> float:
    """The lower bound of how much larger the window's share is than the reference's (95 %, one-sided, normal)."""
    share, own_share = (count + 0.5) / (rows + 1), (own + 0.5) / (own_rows + 1)
    deviation = math.sqrt(share * (1 - share) / rows + own_share * (1 - own_share) / own_rows)
    return share - own_share - 1.645 * deviation


def _uninformed(quality: QualityReference, shares: Float, rows: Float, means: Float, variances: Float) -> str:
    """Why the score does not tell how good an answer is; empty where it does."""
    if quality.metric == "rmse":
        p_value = quality.information_p_value
        if p_value > _LEAST_INFORMED:
            return f"on the validation rows the outlier score does not tell large errors from small ones (p = {p_value:.2g})"
        return ""
    # Noise makes gaps as well: its expected part is taken off (Broecker, Quarterly Journal of the Royal Meteorological Society 138, 2012).
    error = math.sqrt(max(0.0, float(shares @ (np.square(means) - variances / rows))))
    if error > _MAX_CALIBRATION_ERROR:
        return f"the confidence was off by {error:.0%} on validation rows like these, expected at most {_MAX_CALIBRATION_ERROR:.0%}"
    return ""


def _differently_calibrated(reference: Reference, quality: QualityReference, window: Window, value: float) -> list[str]:
    """The feature of the input, if there is one, by whose bins the estimate would be another: the score is not worth the same everywhere.

    That is how a network that is surer of, say, rows of high contrast than it may be, is found where such rows become common.
    """
    found = []
    for column, (feature, stratum) in enumerate(zip(reference.inputs.features, quality.strata, strict=True)):
        shares = window.counts(column) / window.num_rows
        variances, rows = np.array(stratum.variances), np.array(stratum.counts)
        known = rows > 0
        if not known.any():
            continue
        gap = float(shares[known] @ np.array(stratum.residuals)[known])
        deviation = math.sqrt(float(np.square(shares[known]) @ (variances[known] / rows[known])))
        most = _MAX_DISAGREEMENT if quality.metric == "accuracy" else _MAX_DISAGREEMENT_OF_ERRORS * value
        if abs(gap) > max(most, _FAR * deviation):
            found.append((abs(gap) / max(deviation, 1e-12), feature.name))
    if not found:
        return []
    return [f"on validation rows with such a {max(found)[1]} the answers were better or worse than the estimate takes them to be"]
