"""The optimism of the best of several trials, against trials whose true quality is known."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.search.optimism import expected_optimism

ROWS, TRUE = 400, 0.8


def answers(generator: np.random.Generator, targets: NDArray[np.float64]) -> NDArray[np.float32]:
    """(N, 2) probabilities of a trial that is right for each row with probability `TRUE`."""
    is_right = generator.random(len(targets)) < TRUE
    right = np.where(is_right, targets, 1 - targets).astype(int)
    return np.where(np.arange(2) == right[:, np.newaxis], 0.9, 0.1).astype(np.float32)


def test_the_expected_score_is_near_the_truth_if_no_trial_is_really_better() -> None:
    generator = np.random.default_rng(1)
    targets = generator.integers(2, size=ROWS).astype(np.float64)
    expected, scores = [], []
    for seed in range(8):
        outputs = [answers(generator, targets) for _ in range(20)]
        found = expected_optimism(
            "image_classification", "accuracy", targets, outputs, maximize=True, seed=seed
        )
        expected.append(found.expected)
        scores.append(found.score)
    assert np.mean(scores) - TRUE > 0.025, "the best of 20 looks better than it is"
    assert np.mean(expected) == pytest.approx(TRUE, abs=0.012)


def test_trials_with_equal_answers_have_no_optimism() -> None:
    generator = np.random.default_rng(2)
    targets = generator.integers(2, size=ROWS).astype(np.float64)
    one = answers(generator, targets)
    found = expected_optimism(
        "image_classification", "accuracy", targets, [one] * 20, maximize=True
    )
    assert found.amount < 0.003


def test_an_error_that_is_minimized_is_expected_to_be_larger() -> None:
    generator = np.random.default_rng(3)
    targets = generator.normal(size=ROWS)
    outputs = [
        (targets + generator.normal(size=ROWS))[:, np.newaxis].astype(np.float32) for _ in range(10)
    ]
    found = expected_optimism("table_regression", "rmse", targets, outputs, maximize=False)
    assert found.expected > found.score
