"""Params, journals and comparisons of the loop's tests."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.config.loop import LoopParams
from slipway.loop.comparison import CandidateComparison, compare_models
from slipway.loop.journal import JOURNAL, Cycle, append_step, cycles, read_journal
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.reference_comparison import ReferenceAnswers
from slipway.reports.evaluation.slice_scores import RowAnswers

DAY_S = 86400.0
SECTION: dict[str, Any] = {
    "triggers": {"drift": True, "objective": None, "new_labels": None},
    "min_labels": 100,
    "pause_days": 7.0,
    "start": "scratch",
    "max_forgetting": 0.01,
    "require_gain": True,
    "min_keys": 1,
    "trusted_keys": [],
    "shadow_requests": 50,
    "decision_days": 7.0,
    "approvers": [],
    "webhook": None,
    "canary": {"steps": [0.1, 1.0], "hold_seconds": 0, "hold_requests": 20},
}


def loop_params(**changes: Any) -> LoopParams:
    """Return the settings of the tests with some changed."""
    return LoopParams.model_validate({**SECTION, **changes})


def write_steps(
    folder: Path, steps: dict[str, dict[str, Any]], cycle: int = 1, now: float = 1000.0
) -> Cycle:
    """Append steps by name to the journal in `folder`; return their cycle."""
    for what, detail in steps.items():
        append_step(folder / JOURNAL, cycle, what, detail, now)  # type: ignore[arg-type]
    return cycles(read_journal(folder / JOURNAL))[-1]


def classes(targets: NDArray[np.float64], accuracy: float, seed: int) -> NDArray[np.float32]:
    """(N, 2) answers of which a fraction `accuracy` is right, at random."""
    random = np.random.default_rng(seed)
    is_right = random.random(len(targets)) < accuracy
    answers = np.where(is_right, targets, 1 - targets).astype(int)
    outputs = np.full((len(targets), 2), 0.1, np.float32)
    outputs[np.arange(len(targets)), answers] = 0.9
    return outputs


def comparison(
    served: tuple[float, float],
    candidate: tuple[float, float],
    keys: dict[str, int] | None = None,
    *,
    num_old: int = 1000,
    outputs_of_key: dict[str, tuple[float, float]] | None = None,
    is_ordered: bool = False,
) -> CandidateComparison:
    """Compare two models of known accuracy on (old, recent) rows.

    `outputs_of_key` replaces the accuracies (served, candidate) on the recent rows of a key. With
    `is_ordered` the rows of the last key are the newest.
    """
    keys = {"a": 150, "b": 150} if keys is None else keys
    names = [None] * num_old + [key for key, count in keys.items() for _ in range(count)]
    targets = np.random.default_rng(1).integers(2, size=len(names)).astype(np.float64)
    answers = []
    for side, (old, recent) in enumerate((served, candidate)):
        outputs = np.empty((len(names), 2), np.float32)
        for part in dict.fromkeys(names):
            rows = np.array([name == part for name in names])
            accuracy = old if part is None else recent
            if outputs_of_key and part in outputs_of_key:
                accuracy = outputs_of_key[part][side]
            seed = 10 * side + list(dict.fromkeys(names)).index(part)
            outputs[rows] = classes(targets[rows], accuracy, seed)
        answers.append(outputs)
    reference = ReferenceAnswers(
        "served", "1", "cpu", answers[0], np.zeros(len(names), bool), None, "unknown"
    )
    own = RowAnswers("image_classification", targets, answers[1])
    times = np.arange(len(names)) if is_ordered else np.random.default_rng(5).random(len(names))
    return compare_models(reference, own, names, times.tolist(), Resampling(7, 500, 0.95))
