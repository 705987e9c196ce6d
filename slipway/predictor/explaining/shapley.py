"""Shapley values: the mean contribution of each player to the value of a coalition.

For an explanation, the players are the columns of a row. A coalition is the set of columns that
keep the row's values; the others take those of a background row. Its value is the model's output,
in the mean over the background rows. So the values are relative to the mean output for these rows
(the interventional value function: Strumbelj and Kononenko 2014, "Explaining prediction models and
individual predictions with feature contributions"; Lundberg and Lee 2017, "A Unified Approach to
Interpreting Model Predictions"). The method is that of Shapley 1953, "A Value for n-Person Games".

With few players all coalitions are evaluated, and the values are exact for the background. With
many, random orders of the players are drawn for each background row; a player's value is its mean
gain when it joins those before it (Castro, Gomez and Tejada 2009, "Polynomial calculation of the
Shapley value based on sampling"). If a background row has several orders, each order is paired with
its reverse, which cancels much of the noise (Mitchell et al. 2022, "Sampling Permutations for
Shapley Value Estimation"); the standard error is that of the mean over pairs or single orders.
Either way the values add up to the value of all players minus that of none.
"""

from dataclasses import dataclass
from functools import cached_property
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_FEWEST_ORDERS = 4  # or two pairs; fewer have no usable standard error


@dataclass(frozen=True)
class Contributions:
    """Shapley values and standard errors, both float64 (players,)."""

    values: NDArray[np.float64]
    standard_errors: NDArray[np.float64]  # 0 where the values are exact


@dataclass(frozen=True)
class Exact:
    """A plan that evaluates every coalition of `num_players` players, for exact values."""

    num_players: int
    num_rows: int = 1  # background rows
    method: Literal["exact", "sampled"] = "exact"
    num_orders: int | None = None

    @cached_property
    def coalitions(self) -> NDArray[np.bool_]:
        """All coalitions as a mask (rows, 2 ** players, players), equal for all background rows.

        Coalition n contains player i if bit i of n is set.
        """
        numbers = np.arange(1 << self.num_players)[:, np.newaxis]
        every = (numbers >> np.arange(self.num_players) & 1).astype(bool)
        return np.broadcast_to(every, (self.num_rows, *every.shape))

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """Compute Shapley values from `worths` (rows, coalitions), the value of each coalition."""
        num_players, sizes = self.num_players, self.coalitions[0].sum(axis=1)
        weights = np.array(
            [
                factorial(size) * factorial(num_players - size - 1) / factorial(num_players)
                for size in range(num_players)
            ]
        )
        values, mean = np.zeros(num_players), worths.mean(axis=0)
        for player in range(num_players):
            without = np.flatnonzero(~self.coalitions[0, :, player])
            values[player] = weights[sizes[without]] @ (
                mean[without | (1 << player)] - mean[without]
            )
        return Contributions(values, np.zeros(num_players))


@dataclass(frozen=True)
class Sampled:
    """A plan that evaluates the coalitions along random orders of the players, for estimates.

    `orders` are (background rows, orders, players): one order each, or pairs of an order and its
    reverse, one after the other.
    """

    orders: NDArray[np.intp]
    method: Literal["exact", "sampled"] = "sampled"

    @property
    def num_rows(self) -> int:
        """The number of background rows that are used."""
        return len(self.orders)

    @property
    def num_orders(self) -> int:
        """The number of orders of the players, with the reversed ones."""
        return int(self.orders[..., 0].size)

    @cached_property
    def coalitions(self) -> NDArray[np.bool_]:
        """The coalitions along the orders of each background row, (rows, coalitions, players).

        Along an order the coalition grows by one player at each step, from nobody to all.
        """
        num_rows, _, num_players = self.orders.shape
        ranks = np.argsort(self.orders, axis=2)[:, :, np.newaxis]  # the step at which each joins
        chains = ranks < np.arange(num_players + 1)[:, np.newaxis]
        return chains.reshape(num_rows, -1, num_players)

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """Estimate Shapley values from `worths` (rows, coalitions), the value of each coalition."""
        num_rows, num_orders, num_players = self.orders.shape
        gains = np.empty(self.orders.shape)
        steps = np.diff(worths.reshape(num_rows, num_orders, num_players + 1), axis=2)
        np.put_along_axis(gains, self.orders, steps, axis=2)
        paired = 2 if num_orders > 1 else 1
        draws = gains.reshape(-1, paired, num_players).mean(axis=1)
        errors = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
        return Contributions(draws.mean(axis=0), errors)


def plan(num_players: int, num_rows: int, most_values: int, seed: int) -> Exact | Sampled | None:
    """Choose the coalitions to evaluate with each of at most `num_rows` background rows.

    They have at most `most_values` different values; sampled ones leave a quarter of these to the
    caller. Returns Exact if all coalitions fit, else Sampled; None if too few fit for an estimate.
    If not even one order fits for each background row, only the first rows are used.
    """
    if not num_players or num_rows << min(num_players, 62) <= most_values:
        return Exact(num_players, num_rows)
    # All players together have one value for all background rows, nobody one for each.
    most = most_values - most_values // 4 - 1
    used = min(num_rows, most // num_players)
    num_orders = (most // used - 1) // max(1, num_players - 1) if used else 0
    num_pairs = num_orders // 2
    if used * num_orders < _FEWEST_ORDERS:
        return None
    players = np.tile(np.arange(num_players), (used, max(1, num_pairs), 1))
    forward = np.random.default_rng(seed).permuted(players, axis=2)
    if not num_pairs:
        return Sampled(forward)
    pairs = np.stack([forward, forward[:, :, ::-1]], axis=2)
    return Sampled(pairs.reshape(used, 2 * num_pairs, num_players))
