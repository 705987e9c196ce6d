"""What the answers are worth, measured on test rows: calibration, sets or intervals that hold the truth, rows taken for outliers.

The calibration error is the expected one of Naeini, Cooper and Hauskrecht 2015 ("Obtaining Well Calibrated Probabilities Using Bayesian
Binning") over 15 bins of equal width, as Guo et al. 2017 measure it. Few rows alone make it larger than 0, however good the network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.bundle import Metric
from slipway.calibration import Answers, Calibration
from slipway.calibration_fitting import softmax
from slipway.metrics import Resampling, log_losses, wilson_interval

Float = NDArray[np.float64]
_NUM_BINS = 15
_MOST_POINTS = 200  # of a curve


@dataclass(frozen=True)
class Worth:
    """The answers to the test rows, how they were made, and the metrics of what they are worth."""

    calibration: Calibration
    targets: Float  # (N,) class index, or the number itself
    answers: Answers
    before: NDArray[np.float32] | None  # (N, K) probabilities without the temperature; None for a numeric target
    resampling: Resampling

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """By name; what is measured "before" is without the temperature."""
        held, outliers = self.is_held, self.calibration.is_outlier(self.answers.scores)
        shares = {"coverage": self._share(held)} if held is not None else {}
        return shares | self._means() | {"outliers": self._share(outliers)}

    @cached_property
    def is_held(self) -> NDArray[np.bool_] | None:
        """(N,) whether each row's set or interval has the truth; None where there is no interval."""
        if self.before is not None:
            sets = self.calibration.prediction_sets(self.answers.outputs)
            return np.asarray(sets[np.arange(len(sets)), self.targets.astype(np.int64)])
        half = self.calibration.conformal.threshold
        return None if half is None else np.asarray(self.losses <= half)

    @cached_property
    def losses(self) -> Float:
        """(N,) 1 where the label is wrong, else 0; or the absolute error."""
        if self.before is not None:
            return np.asarray(self.answers.outputs.argmax(axis=1) != self.targets, dtype=np.float64)
        return np.asarray(np.abs(self.answers.outputs[:, 0].astype(np.float64) - self.targets))

    def content(self) -> dict[str, Any]:
        """For `metrics/evaluate.json`: flat keys, which DVC shows, and a list with the intervals, which it skips."""
        named = [{"name": name, **metric.model_dump()} for name, metric in self.metrics.items()]
        return {**{name: metric.value for name, metric in self.metrics.items() if "before" not in name}, "calibration": named}

    def reliability(self, probabilities: NDArray[np.float32]) -> tuple[Float, Float]:
        """Mean confidence and accuracy of each bin that has rows."""
        confidence, bins = probabilities.max(axis=1).astype(np.float64), _bins(probabilities)
        right, counts = probabilities.argmax(axis=1) == self.targets, np.bincount(bins, minlength=_NUM_BINS)
        seen = counts > 0
        sums = (np.bincount(bins, weights=values, minlength=_NUM_BINS) for values in (confidence, right.astype(np.float64)))
        mean_confidence, accuracy = (total[seen] / counts[seen] for total in sums)
        return mean_confidence, accuracy

    def risk_curve(self, doubt: NDArray[np.floating]) -> tuple[Float, Float]:
        """Share of rows that are answered, the least doubtful first, and the mean loss of these."""
        losses = self.losses[np.argsort(doubt, kind="stable")]
        risk = losses.cumsum() / np.arange(1, len(losses) + 1)
        points = np.unique(np.linspace(max(len(losses) // 100, 1) - 1, len(losses) - 1, _MOST_POINTS).astype(np.int64))
        return (points + 1) / len(losses), risk[points]

    def _share(self, is_so: NDArray[np.bool_]) -> Metric:
        low, high = wilson_interval(int(is_so.sum()), len(is_so), self.resampling.confidence)
        return Metric(value=float(is_so.mean()), low=low, high=high, confidence=self.resampling.confidence, rows=len(is_so))

    def _means(self) -> dict[str, Metric]:
        """Everything whose interval is made by resampling rows."""
        if self.before is None:
            return {}
        sizes = self.calibration.prediction_sets(self.answers.outputs).sum(axis=1).astype(np.float64)
        measures = {"set_size": lambda rows: sizes[rows].mean(), "calibration_error": self._error_of(self.answers.outputs)}
        measures |= {"calibration_error_before": self._error_of(self.before), "log_loss_before": self._loss_of(self.before)}
        generator, num_rows = np.random.default_rng(self.resampling.seed), len(self.targets)
        draws = [generator.integers(num_rows, size=num_rows) for _ in range(self.resampling.num_samples)]
        return {name: self._interval(measure, draws) for name, measure in measures.items()}

    def _interval(self, measure: Callable[[NDArray[np.int64]], float], draws: list[NDArray[np.int64]]) -> Metric:
        confidence, num_rows = self.resampling.confidence, len(self.targets)
        low, high = np.quantile([measure(rows) for rows in draws], [(1 - confidence) / 2, (1 + confidence) / 2])
        value = float(measure(np.arange(num_rows)))
        return Metric(value=value, low=float(low), high=float(high), confidence=confidence, rows=num_rows)

    def _error_of(self, probabilities: NDArray[np.float32]) -> Callable[[NDArray[np.int64]], float]:
        bins, right = _bins(probabilities), probabilities.argmax(axis=1) == self.targets
        gaps = right - probabilities.max(axis=1).astype(np.float64)
        return lambda rows: float(np.abs(np.bincount(bins[rows], weights=gaps[rows], minlength=_NUM_BINS)).sum() / len(rows))

    def _loss_of(self, probabilities: NDArray[np.float32]) -> Callable[[NDArray[np.int64]], float]:
        losses = log_losses(self.targets, probabilities)
        return lambda rows: float(losses[rows].mean())


def uncalibrated(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, K) logits to the probabilities they would be without a temperature."""
    return softmax(logits).astype(np.float32)


def _bins(probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
    """(N,) which bin of confidence each row is in."""
    confidence = probabilities.max(axis=1).astype(np.float64)
    return np.asarray(np.minimum((confidence * _NUM_BINS).astype(np.int64), _NUM_BINS - 1))
