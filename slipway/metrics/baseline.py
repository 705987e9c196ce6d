"""Baseline: the trivial predictor that every metric is compared with.

It gives each row the same answer, fitted on training rows: the class frequencies, or the mean
target.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.kinds.registry import Task, is_classification, metric_names
from slipway.metrics.scores import ClassAnswers, ValueAnswers, why_absent


def baseline_scores(
    task: Task,
    train_targets: NDArray[np.float64],
    targets: NDArray[np.float64],
    num_classes: int,
    top_k: int | None,
) -> dict[str, float]:
    """Compute each metric of `task` that the test `targets` (N,) define, for the baseline."""
    answers: ClassAnswers | ValueAnswers
    if is_classification(task):
        shares = np.bincount(train_targets.astype(np.int64), minlength=num_classes)
        probabilities = np.tile(shares / shares.sum(), (len(targets), 1))
        answers = ClassAnswers(targets, probabilities, top_k)
    else:
        answers = ValueAnswers(targets, np.full(len(targets), train_targets.mean()))
    absent = why_absent(task, targets, num_classes, top_k)
    names = [name for name in metric_names(task) if name not in absent]
    found = answers.scores(np.arange(len(targets))[None], names)
    return {name: float(found[name][0]) for name in names}
