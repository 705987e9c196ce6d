"""The user's own metrics, `evaluate.metrics`: functions of targets and outputs, with intervals.

A function takes targets and outputs, and returns one number. The arguments depend on the target:

    classes: class indices (N,) int64, and probabilities (N, K)
    several labels: 0 or 1 (N, K) int64, and probabilities (N, K)
    numbers: targets (N,), and values (N,)

The function may raise an error or return NaN for rows that do not define the metric, such as a
resample with rows of one class only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.kinds.code_digest import user_code
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Float, Resampling, percentiles, resampled_rows
from slipway.system.errors import MetricError, UnavailableError
from slipway.system.user_code import UserCode, definition_place, failure, import_named

_FEWEST_DEFINED = 0.5  # fraction of the resamples that must have a value for an interval


@dataclass(frozen=True)
class UserMetric:
    """A metric computed by the user's function."""

    code: UserCode
    function: Callable[[NDArray[np.generic], Float], float]

    @property
    def name(self) -> str:
        """The function's name, which gates and reports use."""
        return self.code.name.partition(":")[2]

    def score(self, task: Task, targets: NDArray[Any], outputs: NDArray[np.floating]) -> float:
        """Call the function with targets (N,) and outputs (N, K) or (N, 1).

        Raises MetricError with the user's line if it fails or does not return a finite number.
        """
        has_classes = kind_of(task).target.has_classes
        values = np.asarray(outputs, np.float64)
        try:
            found = self.function(
                targets.astype(np.int64) if has_classes else targets.astype(np.float64),
                values if has_classes else values.reshape(len(targets)),
            )
        except Exception as error:
            raise MetricError(
                f"{self._what} raised {failure(error, self.function)} on {len(targets)} rows. "
                f"{self._expected(task)} Correct the function."
            ) from error
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            place = definition_place(self.function)
            raise MetricError(
                f"{self._what}{f' ({place})' if place else ''} returned {found!r} on "
                f"{len(targets)} rows, expected one finite number. {self._expected(task)} "
                "Correct the function."
            )
        return number

    def measure(
        self,
        task: Task,
        targets: NDArray[Any],
        outputs: NDArray[np.floating],
        resampling: Resampling,
    ) -> Metric:
        """Score all rows, with a bootstrap interval. Raises MetricError as `score` does."""
        value = self.score(task, targets, outputs)
        scores = np.full(resampling.num_samples, np.nan)
        lines = (line for chunk in resampled_rows(len(targets), resampling) for line in chunk)
        fault: MetricError | None = None
        for place, line in enumerate(lines):
            try:
                scores[place] = self.score(task, targets[line], outputs[line])
            except MetricError as error:
                fault = error
        if fault and np.isfinite(scores).mean() < _FEWEST_DEFINED:
            raise MetricError(f"more than half of the resamples have no value: {fault}")
        low, high = percentiles(scores, resampling.confidence)
        return Metric(
            value=value, low=low, high=high, confidence=resampling.confidence, rows=len(targets)
        )

    @property
    def _what(self) -> str:
        return f"evaluate.metrics {self.code.name!r}"

    @staticmethod
    def _expected(task: Task) -> str:
        takes = "numbers (rows,) and values (rows,)"
        target = kind_of(task).target
        if target.several:
            takes = "labels, 0 or 1, and probabilities, both (rows, labels)"
        elif target.has_classes:
            takes = "class indices (rows,) and probabilities (rows, classes)"
        return f"It is called with {takes}."


def load_user_metrics(names: Sequence[str]) -> list[UserMetric]:
    """Import the functions `names`; UnavailableError if one cannot be imported or called."""
    metrics = []
    for code in user_code(Path(), "evaluate.metrics", names):
        function = import_named(code.name)
        if not callable(function):
            raise UnavailableError(
                f"{code.key} {code.name!r} is {type(function).__name__}, expected a function of "
                "targets and outputs. Correct the name or the module."
            )
        metrics.append(UserMetric(code, function))
    return metrics


def measure_user_metrics(
    metrics: Sequence[UserMetric],
    task: Task,
    targets: NDArray[Any],
    outputs: NDArray[np.floating],
    resampling: Resampling,
) -> dict[str, Metric]:
    """Measure the `metrics` that are defined on these rows, by name."""
    found = {}
    for metric in metrics:
        try:
            found[metric.name] = metric.measure(task, targets, outputs, resampling)
        except MetricError:
            continue
    return found
