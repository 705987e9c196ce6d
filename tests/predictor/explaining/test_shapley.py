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
    worths: NDArray[np.float64] = coalitions @ WEIGHTS[: coalitions.shape[-1]]
    return worths


def entangled(coalitions: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A linear game plus 10 for the first two together, and 9 for the last three together."""
    return (
        linear(coalitions)
        + 10 * coalitions[..., :2].all(axis=-1)
        + 9 * coalitions[..., -3:].all(axis=-1)
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
            map(bytes, Exact(num_players).coalitions[0]),
            np.random.default_rng(1).normal(size=2**num_players),
            strict=True,
        )
    )

    def random_game(coalitions: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.array([worths[bytes(coalition)] for coalition in coalitions])

    planned = plan(num_players, 1, 2**num_players, seed=0)
    assert isinstance(planned, Exact)
    found = planned.contributions(random_game(planned.coalitions[0])[np.newaxis])
    assert np.allclose(found.values, by_definition(random_game, num_players), atol=1e-12)
    assert not found.standard_errors.any()


def test_shapley_values_of_a_game_without_players_are_empty() -> None:
    planned = plan(0, 1, 4, seed=0)
    assert planned is not None
    assert planned.coalitions.shape == (1, 1, 0)
    assert planned.contributions(np.array([[3.0]])).values.shape == (0,)


def test_sampled_values_of_a_linear_game_are_its_weights_with_error_zero() -> None:
    planned = plan(12, 1, 200, seed=3)
    assert isinstance(planned, Sampled)
    found = planned.contributions(linear(planned.coalitions))
    assert np.allclose(found.values, WEIGHTS, atol=1e-12)
    assert np.allclose(found.standard_errors, 0, atol=1e-12)


def test_sampled_values_are_within_their_standard_errors() -> None:
    truth = WEIGHTS + np.array([5.0, 5.0, *[0.0] * 7, 3.0, 3.0, 3.0])
    far = []
    for seed in range(40):
        planned = plan(12, 1, 400, seed)
        assert planned is not None
        found = planned.contributions(entangled(planned.coalitions))
        assert found.values.sum() == pytest.approx(
            WEIGHTS.sum() + 19
        )  # all less none, whatever was drawn
        errors = np.abs(found.values - truth)
        assert (errors <= 5 * found.standard_errors + 1e-9).all()
        far.append((errors > 2 * found.standard_errors + 1e-9).mean())
    assert np.mean(far) < 0.12  # 5 % of a normal law; a few pairs of orders have a wider one


@pytest.mark.parametrize(
    ("num_players", "num_rows", "most"),
    [
        (11, 1, 128),
        (40, 1, 1024),
        (8, 32, 1024),
        (30, 32, 1024),
        (8, 32, 64),
        (3, 9, 64),
    ],
)
def test_a_plan_has_at_most_the_allowed_values(num_players: int, num_rows: int, most: int) -> None:
    planned = plan(num_players, num_rows, most, seed=5)
    assert isinstance(planned, Sampled)
    masks = planned.coalitions
    assert len(masks) == planned.num_rows <= num_rows
    assert not masks[:, 0].any()  # nobody, and at last all
    assert masks[:, num_players].all()
    distinct = {(row, bytes(mask)) for row, own in enumerate(masks) for mask in own}
    assert len(distinct) - planned.num_rows + 1 <= most - most // 4


def test_each_background_row_has_the_same_number_of_orders() -> None:
    planned = plan(8, 32, 1024, seed=1)
    assert planned is not None
    assert planned.num_rows == 32
    assert planned.num_orders == 64  # a pair for each


def test_shapley_plan_with_too_few_values_is_none() -> None:
    assert plan(200, 1, 900, seed=0) is None
    assert plan(200, 1, 1100, seed=0) is not None
    assert plan(300, 32, 1024, seed=0) is None


@pytest.mark.parametrize(("most", "method"), [(1024, "sampled"), (10_000, "exact")])
def test_values_are_relative_to_the_mean_over_the_background_rows(most: int, method: str) -> None:
    rng = np.random.default_rng(4)
    row, background = rng.normal(size=6), rng.normal(size=(40, 6))
    planned = plan(6, len(background), most, seed=2)
    assert planned is not None
    assert planned.method == method
    blended = np.where(planned.coalitions, row, background[:, np.newaxis])
    linear_values = planned.contributions(blended.sum(axis=2)).values
    assert np.allclose(linear_values, row - background.mean(axis=0))
    product_values = planned.contributions(blended.prod(axis=2)).values
    assert product_values.sum() == pytest.approx(row.prod() - background.prod(axis=1).mean())


def test_the_same_seed_plans_the_same_coalitions() -> None:
    first, again, other = plan(12, 3, 200, 1), plan(12, 3, 200, 1), plan(12, 3, 200, 2)
    assert first is not None
    assert again is not None
    assert other is not None
    assert np.array_equal(first.coalitions, again.coalitions)
    assert not np.array_equal(first.coalitions, other.coalitions)
