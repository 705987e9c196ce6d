"""Shapley values: the mean contribution of each player to the value of a coalition.

For an explanation, the players are the columns of a row. A coalition is the set of columns that
keep the row's values, and its value is the model's output. The method is that of Shapley 1953, "A
Value for n-Person Games". With few players all coalitions are evaluated, and the values are exact.
With many, random orders of the players are drawn; a player's value is its mean gain when it joins
those before it (Castro, Gomez and Tejada 2009, "Polynomial calculation of the Shapley value based
on sampling"). Each order is paired with its reverse, which cancels much of the noise (Mitchell et
al. 2022, "Sampling Permutations for Shapley Value Estimation"); the standard error is that of the
mean over the pairs. Either way the values add up to the value of all players minus that of none.
"""

from dataclasses import dataclass
from functools import cached_property
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_FEWEST_PAIRS = 2  # of orders; a single pair has no standard error


@dataclass(frozen=True)
class Contributions:
    """Shapley values and standard errors, both float64 (players,)."""

    values: NDArray[np.float64]
    standard_errors: NDArray[np.float64]  # 0 where the values are exact


@dataclass(frozen=True)
class Exact:
    """A plan that evaluates every coalition of `num_players` players, for exact values."""

    num_players: int
    method: Literal["exact", "sampled"] = "exact"
    num_orders: int | None = None

    @cached_property
    def coalitions(self) -> NDArray[np.bool_]:
        """All coalitions as a mask (2 ** players, players).

        Coalition n contains player i if bit i of n is set.
        """
        numbers = np.arange(1 << self.num_players)[:, np.newaxis]
        return (numbers >> np.arange(self.num_players) & 1).astype(bool)

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """Compute Shapley values from `worths` (coalitions,), the value of each coalition."""
        num_players, sizes = self.num_players, self.coalitions.sum(axis=1)
        weights = np.array(
            [
                factorial(size) * factorial(num_players - size - 1) / factorial(num_players)
                for size in range(num_players)
            ]
        )
        values = np.zeros(num_players)
        for player in range(num_players):
            without = np.flatnonzero(~self.coalitions[:, player])
            values[player] = weights[sizes[without]] @ (
                worths[without | (1 << player)] - worths[without]
            )
        return Contributions(values, np.zeros(num_players))


@dataclass(frozen=True)
class Sampled:
    """A plan that evaluates the coalitions along random orders of the players, for estimates.

    `orders` (pairs, 2, players) are pairs of an order and its reverse.
    """

    orders: NDArray[np.intp]
    method: Literal["exact", "sampled"] = "sampled"

    @property
    def num_orders(self) -> int:
        """The number of orders of the players, with the reversed ones."""
        return 2 * len(self.orders)

    @property
    def coalitions(self) -> NDArray[np.bool_]:
        """The coalitions to evaluate, as a mask (coalitions, players) without duplicates."""
        return self._distinct[0]

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """Estimate Shapley values from `worths` (coalitions,), the value of each coalition."""
        num_pairs, _, num_players = self.orders.shape
        chains = worths[self._distinct[1]].reshape(num_pairs, 2, num_players + 1)
        gains = np.empty((num_pairs, 2, num_players))
        np.put_along_axis(gains, self.orders, np.diff(chains, axis=2), axis=2)
        pairs = gains.mean(axis=1)
        return Contributions(pairs.mean(axis=0), pairs.std(axis=0, ddof=1) / np.sqrt(num_pairs))

    @cached_property
    def _distinct(self) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """The distinct coalitions (coalitions, players), and the steps of the orders as indices.

        Along an order, the coalition grows by one player at each step; the flat array of indices
        has the coalition's position at each step of each order.
        """
        num_players = self.orders.shape[2]
        # (pairs, 2, 1, players): the step at which each player joins.
        ranks = np.argsort(self.orders, axis=2)[:, :, np.newaxis]
        steps = np.arange(num_players + 1)[:, np.newaxis]
        chains = (ranks < steps).reshape(-1, num_players)
        packed, steps_of = np.unique(np.packbits(chains, axis=1), axis=0, return_inverse=True)
        return np.unpackbits(packed, axis=1, count=num_players).astype(bool), steps_of.reshape(-1)


def plan(num_players: int, most_coalitions: int, seed: int) -> Exact | Sampled | None:
    """Choose at most `most_coalitions` coalitions to evaluate.

    Returns Exact if all coalitions fit, else Sampled; None if too few fit for an estimate.
    """
    if 1 << min(num_players, 62) <= most_coalitions:
        return Exact(num_players)
    # The empty and the full coalition are part of each order and evaluated once.
    num_pairs = (most_coalitions - 2) // (2 * (num_players - 1))
    if num_pairs < _FEWEST_PAIRS:
        return None
    players = np.tile(np.arange(num_players), (num_pairs, 1))
    forward = np.random.default_rng(seed).permuted(players, axis=1)
    return Sampled(np.stack([forward, forward[:, ::-1]], axis=1))
