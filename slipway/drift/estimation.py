"""How good the model is on the traffic, before any label is there: accuracy, or RMSE, with an interval, or the reason why not.

The labels of the validation rows are carried over: how much more or less often the answers were right there than their confidence said
(how large the squared errors were, for numbers), by every feature of the rows. That holds where the kinds of rows come in other shares
(covariate shift), and where what is asked still looks like what was learned. It cannot hold where the world gives other labels to the
same rows (concept drift), or where features matter together in a way that none shows alone: only feedback shows that. Where the traffic
leaves the validation rows' region, or their labels are too few to tell, the estimate is marked invalid.
"""

import math

import numpy as np
from numpy.typing import NDArray

from slipway.drift.quality_reference import QualityReference
from slipway.drift.reference import Reference
from slipway.drift.window import Window
from slipway.system.contract import Contract

Float = NDArray[np.float64]

MIN_ROWS = 100  # of a window
_NORMAL = 1.959964  # of an interval of 95 %
_MAX_CALIBRATION_ERROR = (
    0.05  # of the confidence on validation rows, by root mean square over the traffic's bins
)
_LEAST_INFORMED = (
    0.01  # p-value: the mean squared errors of the outlier score's bins differ by more than chance
)
_MAX_DISAGREEMENT = 0.02  # of estimates by one feature or another, in points of accuracy
_MAX_DISAGREEMENT_OF_ERRORS = 0.1  # the same of a mean squared error, in parts of it
_FAR = 3.0  # standard errors: what noise hardly makes in any of some dozen features
_PROMISED, _PROMISED_ROWS = (
    0.02,
    5000,
)  # a valid accuracy is off by at most so much, in 95 of 100 windows of so many rows
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
        return _none(
            f"the bundle was exported with {reference.answers.rows} validation rows, too few to learn from"
        )
    if window.num_rows < MIN_ROWS:
        return _none(f"{window.num_rows} rows were seen, expected at least {MIN_ROWS}")
    counts = window.quality_counts
    shares, means, variances = (
        counts / counts.sum(),
        np.array(quality.residuals),
        np.array(quality.variances),
    )
    rows = np.maximum(np.array(quality.counts), 1)
    seen = [window.counts(column) for column in range(len(reference.features))]
    residual, open_variance = quality.adjustment.of(reference.features, seen)
    value = window.confidence_sum / window.num_rows + residual
    own_variance = float(shares @ variances)  # of one row's label
    # Of what the validation labels leave open, and of the labels that these rows will turn out to have.
    deviation = math.sqrt(open_variance + own_variance / window.num_rows)
    reasons = [
        reason
        for reason in (
            _unseen(reference, window),
            _uninformed(quality, shares, rows, means, variances),
        )
        if reason
    ]
    reasons += _differently_calibrated(reference, quality, window, value)
    if quality.metric == "accuracy":
        reasons += _left_open(quality, open_variance + own_variance / _PROMISED_ROWS)
    low, high = value - _NORMAL * deviation, value + _NORMAL * deviation
    if quality.metric == "rmse":
        value, low, high = (math.sqrt(max(0.0, square)) for square in (value, low, high))
    else:
        value, low, high = (min(1.0, max(0.0, share)) for share in (value, low, high))
    half = (high - low) / 2 / (value if quality.metric == "rmse" and value else 1)
    if half > _MAX_HALF_WIDTH:
        reasons.append(
            f"the interval is too wide to tell anything (plus or minus {half:.2f}, expected at most {_MAX_HALF_WIDTH})"
        )
    return Estimate(
        metric=quality.metric,
        value=value,
        low=low,
        high=high,
        valid=not reasons,
        reason="; ".join(reasons),
    )


def _none(reason: str) -> Estimate:
    return Estimate(metric=None, value=None, low=None, high=None, valid=False, reason=reason)


def _unseen(reference: Reference, window: Window) -> str:
    """Why the rows are too unlike the reference's to be judged by them; empty where they are not."""
    outliers = _surplus(
        window.num_outliers, window.num_rows, reference.answers.outliers, reference.answers.rows
    )
    if outliers > _MAX_STRANGE:
        return f"at least {outliers:.0%} more of the rows are outliers than of the validation rows"
    outside = _surplus(
        window.num_outside, window.num_rows, reference.inputs.outside, reference.inputs.rows
    )
    if outside > _MAX_STRANGE:
        return f"at least {outside:.0%} more of the rows than expected have an input outside the range of all training and validation rows"
    return ""


def _surplus(count: int, rows: int, own: int, own_rows: int) -> float:
    """The lower bound of how much larger the window's share is than the reference's (95 %, one-sided, normal)."""
    share, own_share = (count + 0.5) / (rows + 1), (own + 0.5) / (own_rows + 1)
    deviation = math.sqrt(share * (1 - share) / rows + own_share * (1 - own_share) / own_rows)
    return share - own_share - 1.645 * deviation


def _uninformed(
    quality: QualityReference, shares: Float, rows: Float, means: Float, variances: Float
) -> str:
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


def _left_open(quality: QualityReference, variance: float) -> list[str]:
    """Why what is promised cannot be kept: `variance` is the estimate's, in a window of `_PROMISED_ROWS`."""
    half = _NORMAL * math.sqrt(variance)
    if half <= _PROMISED:
        return []
    labels = f"{sum(quality.counts):,} validation labels tell the accuracy of {_PROMISED_ROWS:,} such rows"
    return [f"{labels} to plus or minus {half:.1%}, expected at most {_PROMISED:.0%}"]


def _differently_calibrated(
    reference: Reference, quality: QualityReference, window: Window, value: float
) -> list[str]:
    """The feature of the input, if there is one, by whose bins the estimate would still be another.

    The adjustment is a smooth curve of each number: what has steps or several turns is not in it, and is found here.
    """
    found = []
    for column, (feature, stratum) in enumerate(
        zip(reference.inputs.features, quality.strata, strict=True)
    ):
        shares = window.counts(column) / window.num_rows
        variances, rows = np.array(stratum.variances), np.array(stratum.counts)
        known = rows > 0
        if not known.any():
            continue
        gap = float(shares[known] @ np.array(stratum.residuals)[known])
        deviation = math.sqrt(float(np.square(shares[known]) @ (variances[known] / rows[known])))
        most = (
            _MAX_DISAGREEMENT
            if quality.metric == "accuracy"
            else _MAX_DISAGREEMENT_OF_ERRORS * value
        )
        if abs(gap) > max(most, _FAR * deviation):
            found.append((abs(gap) / max(deviation, 1e-12), feature.name))
    if not found:
        return []
    return [
        f"on validation rows with such a {max(found)[1]} the answers were better or worse than the estimate takes them to be"
    ]
