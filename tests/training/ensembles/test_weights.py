"""Tests of greedy weights: members that complement each other get weight, others get none."""

import numpy as np
import pytest
import torch
from torch import Tensor

from slipway.training.ensembles.weights import Loss, equal_weights, greedy_weights

NUM_ROWS = 400
KEYS = np.random.default_rng(1).integers(0, 2**63, NUM_ROWS).astype(np.uint64)


def squared(deviations: list[float], shared: float = 0.0) -> Loss:
    """Return the loss of a weighted mean of outputs, which have independent and shared errors."""
    generator = np.random.default_rng(0)
    errors = generator.normal(size=(NUM_ROWS, len(deviations))) * deviations
    errors += shared * generator.normal(size=(NUM_ROWS, 1))
    rows = torch.from_numpy(errors).float()

    def loss(weights: Tensor, mask: Tensor) -> float:
        return float(((rows[mask] * weights).sum(dim=1) ** 2).mean())

    return loss


def test_greedy_weights_are_equal_for_equally_good_members() -> None:
    found = greedy_weights(3, KEYS, 7, squared([1.0, 1.0, 1.0]))
    assert found.weights == pytest.approx([1 / 3] * 3, abs=0.06)


def test_a_member_that_adds_only_noise_gets_no_weight() -> None:
    found = greedy_weights(2, KEYS, 7, squared([0.1, 20.0]))
    assert found.weights == [1.0, 0.0]


def test_the_expected_loss_of_greedy_weights_is_not_below_their_selection_loss() -> None:
    loss = squared([1.0] * 12, shared=0.5)
    found = greedy_weights(12, KEYS, 7, loss)
    fitted = loss(torch.tensor(found.weights), torch.ones(NUM_ROWS, dtype=torch.bool))
    assert found.expected_loss is not None
    assert found.expected_loss > fitted


def test_greedy_weights_depend_only_on_row_ids_and_seed() -> None:
    loss = squared([1.0, 1.1, 1.2])
    first, again, other = (greedy_weights(3, KEYS, seed, loss) for seed in (7, 7, 8))
    assert first == again != other


def test_equal_weights_sum_to_one() -> None:
    assert sum(equal_weights(3).weights) == pytest.approx(1)
