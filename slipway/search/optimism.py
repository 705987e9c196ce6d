"""Estimates by how much the validation score of a search's winner is too good: its optimism.

The winner is chosen on the validation rows, so a trial that is lucky on them wins too often. The
estimate is the bootstrap bias correction of I. Tsamardinos, E. Greasidou and G. Borboudakis
(Bootstrapping the out-of-sample predictions for efficient and accurate cross-validation, Machine
Learning 107, 2018, 1895-1922): choose the best trial on rows drawn with replacement, measure it on
the rows that were not drawn, and repeat. With one trial the optimism is 0 except for chance. Trials
that make the same errors increase it little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.kinds.registry import Task, kind_of

_RESAMPLES = 300


@dataclass(frozen=True)
class Optimism:
    """The winner's validation score, and its expected score on new rows, with an interval."""

    num_trials: int
    score: float
    expected: float
    low: float  # bounds of the middle 95 % of the resamples
    high: float

    @property
    def amount(self) -> float:
        """Validation score minus expected score, in the unit of the metric."""
        return abs(self.score - self.expected)


def expected_optimism(
    task: Task,
    metric: str,
    targets: NDArray[np.float64],
    outputs: Sequence[NDArray[np.float32]],
    *,
    maximize: bool,
    top_k: int | None = None,
    seed: int = 0,
) -> Optimism:
    """Estimate the optimism of choosing the best trial on the validation rows.

    Args:
        targets: (N,) targets of the validation rows.
        outputs: for each trial that was trained to its end, its predictions (N, K).
    """
    make = kind_of(task).target.load_part("scores")
    answers = [make(targets, output, top_k) for output in outputs]
    generator, count = np.random.default_rng(seed), len(targets)
    sign = 1.0 if maximize else -1.0
    found = []
    for _ in range(_RESAMPLES):
        drawn = generator.integers(count, size=count)
        others = np.setdiff1d(np.arange(count), drawn)
        if len(others) < 2:
            continue
        chosen = int(np.argmax([sign * _score(answer, drawn, metric) for answer in answers]))
        found.append(_score(answers[chosen], others, metric))
    every = np.arange(count)
    score = sign * max(sign * _score(answer, every, metric) for answer in answers)
    values = np.array([value for value in found if np.isfinite(value)])
    if not len(values):
        return Optimism(len(outputs), score, score, score, score)
    low, high = np.quantile(values, [0.025, 0.975])
    return Optimism(len(outputs), score, float(values.mean()), float(low), float(high))


def read_answers(paths: Mapping[int, Path]) -> dict[int, tuple[Any, Any]]:
    """Read (targets, outputs) by trial number; trials whose file is missing are left out."""
    found = {}
    for trial, path in paths.items():
        if path.is_file():
            with np.load(path, allow_pickle=False) as arrays:
                found[trial] = arrays["targets"], arrays["outputs"]
    return found


def _score(answers: Any, rows: NDArray[np.int64], metric: str) -> float:
    return float(answers.scores(rows[None], [metric])[metric][0])
