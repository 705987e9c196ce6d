"""Shapley values compared with their definition and with games of known values."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.predictor.explaining.shapley import Exact, Sampled, plan

WEIGHTS = np.array([3.0, -1.0, 0.5, 0.0, 2.0, 7.0, -4.0, 0.25, 1.0, 6.0, -2.0, 0.1])


def linear(coalitions: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A game in which each player adds its own weight to any coalition."""
    worths: NDArray[np.float64] = coalitions @ WEIGHTS[: coalitions.shape[1]]
    return worths


def entangled(coalitions: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A linear game plus 10 for the first two together, and 9 for the last three together."""
    return (
        linear(coalitions) + 10 * coalitions[:, :2].all(axis=1) + 9 * coalitions[:, -3:].all(axis=1)
    )


def by_definition(game: Any, num_players: int) -> NDArray[np.float64]:
    """The mean gain of each player over all orders."""
    orders = list(permutations(range(num_players)))
    gains = np.zeros(num_players)
    for order in orders:
        present = np.zeros((1, num_players), dtype=bool)
        for player in order:
            before = game(present)[0]
            present[0, player] = True
            gains[player] += game(present)[0] - before
    return gains / len(orders)


@pytest.mark.parametrize("num_players", [1, 2, 5])
def test_exact_shapley_values_match_the_definition(num_players: int) -> None:
    worths = dict(
        zip(
            map(bytes, Exact(num_players).coalitions),
            np.random.default_rng(1).normal(size=2**num_players),
            strict=True,
        )
    )

    def random_game(coalitions: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.array([worths[bytes(coalition)] for coalition in coalitions])

    planned = plan(num_players, 2**num_players, seed=0)
    assert isinstance(planned, Exact)
    found = planned.contributions(random_game(planned.coalitions))
    assert np.allclose(found.values, by_definition(random_game, num_players), atol=1e-12)
    assert not found.standard_errors.any()


def test_shapley_values_of_a_game_without_players_are_empty() -> None:
    planned = plan(0, 1, seed=0)
    assert planned is not None
    assert planned.coalitions.shape == (1, 0)
    assert planned.contributions(np.array([3.0])).values.shape == (0,)


def test_sampled_values_of_a_linear_game_are_its_weights_with_error_zero() -> None:
    planned = plan(12, 200, seed=3)
    assert isinstance(planned, Sampled)
    found = planned.contributions(linear(planned.coalitions))
    assert np.allclose(found.values, WEIGHTS, atol=1e-12)
    assert np.allclose(found.standard_errors, 0, atol=1e-12)


def test_sampled_values_are_within_their_standard_errors() -> None:
    truth = WEIGHTS + np.array([5.0, 5.0, *[0.0] * 7, 3.0, 3.0, 3.0])
    far = []
    for seed in range(40):
        planned = plan(12, 300, seed)
        assert planned is not None
        found = planned.contributions(entangled(planned.coalitions))
        assert found.values.sum() == pytest.approx(
            WEIGHTS.sum() + 19
        )  # all less none, whatever was drawn
        errors = np.abs(found.values - truth)
        assert (errors <= 5 * found.standard_errors + 1e-9).all()
        far.append((errors > 2 * found.standard_errors + 1e-9).mean())
    assert np.mean(far) < 0.12  # 5 % of a normal law; a few pairs of orders have a wider one


@pytest.mark.parametrize(("num_players", "most"), [(4, 15), (11, 128), (40, 1024), (200, 1000)])
def test_a_plan_has_at_most_the_allowed_coalitions_without_duplicates(
    num_players: int, most: int
) -> None:
    planned = plan(num_players, most, seed=5)
    assert planned is not None
    assert len(planned.coalitions) <= most
    assert len(np.unique(planned.coalitions, axis=0)) == len(planned.coalitions)
    assert (
        planned.coalitions.any(axis=1).sum() == len(planned.coalitions) - 1
    )  # nobody is one of them


def test_shapley_plan_with_too_few_coalitions_is_none() -> None:
    assert plan(200, 700, seed=0) is None
    assert plan(200, 800, seed=0) is not None


def test_the_same_seed_plans_the_same_coalitions() -> None:
    first, again, other = plan(12, 200, 1), plan(12, 200, 1), plan(12, 200, 2)
    assert first is not None
    assert again is not None
    assert other is not None
    assert np.array_equal(first.coalitions, again.coalitions)
    assert not np.array_equal(first.coalitions, other.coalitions)
