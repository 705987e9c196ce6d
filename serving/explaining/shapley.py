"""Shapley values: what each of several players adds to the worth of all of them (Shapley 1953, "A Value for n-Person Games").

Of few players all coalitions are asked for, and the values are exact. Of many, random orders are drawn and each player's value is its mean
gain when it joins (Castro, Gomez and Tejada 2009, "Polynomial calculation of the Shapley value based on sampling"). Each order comes with
its reverse, which cancels much of the noise (Mitchell et al. 2022, "Sampling Permutations for Shapley Value Estimation"), and
the standard error is that of the mean over these pairs. Either way the values add up to the worth of all less that of none.
"""

from dataclasses import dataclass
from functools import cached_property
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_FEWEST_PAIRS = 2  # of orders: without a second one there is no standard error


@dataclass(frozen=True)
class Contributions:
    """What each player adds; float64 (players,) both."""

    values: NDArray[np.float64]
    standard_errors: NDArray[np.float64]  # 0 where the values are exact


@dataclass(frozen=True)
class Exact:
    """All coalitions of `num_players`."""

    num_players: int
    method: Literal["exact", "sampled"] = "exact"
    num_orders: int | None = None

    @cached_property
    def coalitions(self) -> NDArray[np.bool_]:
        """(2 ** players, players), whether each player is in it; player i is bit i of the coalition's number."""
        numbers = np.arange(1 << self.num_players)[:, np.newaxis]
        return (numbers >> np.arange(self.num_players) & 1).astype(bool)

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """From the worth of each coalition."""
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
    """Coalitions along `orders`, (pairs, 2, players): each pair is an order of the players and its reverse."""

    orders: NDArray[np.intp]
    method: Literal["exact", "sampled"] = "sampled"

    @property
    def num_orders(self) -> int:
        """Orders of the players that were drawn, with their reverses."""
        return 2 * len(self.orders)

    @property
    def coalitions(self) -> NDArray[np.bool_]:
        """(coalitions, players), each once."""
        return self._distinct[0]

    def contributions(self, worths: NDArray[np.float64]) -> Contributions:
        """From the worth of each coalition."""
        num_pairs, _, num_players = self.orders.shape
        chains = worths[self._distinct[1]].reshape(num_pairs, 2, num_players + 1)
        gains = np.empty((num_pairs, 2, num_players))
        np.put_along_axis(gains, self.orders, np.diff(chains, axis=2), axis=2)
        pairs = gains.mean(axis=1)
        return Contributions(pairs.mean(axis=0), pairs.std(axis=0, ddof=1) / np.sqrt(num_pairs))

    @cached_property
    def _distinct(self) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """The coalitions, and for each step along each order, from nobody to all, which one it is."""
        num_players = self.orders.shape[2]
        ranks = np.argsort(self.orders, axis=2)[
            :, :, np.newaxis
        ]  # (pairs, 2, 1, players): when each player joins
        steps = np.arange(num_players + 1)[:, np.newaxis]
        chains = (ranks < steps).reshape(-1, num_players)
        packed, steps_of = np.unique(np.packbits(chains, axis=1), axis=0, return_inverse=True)
        return np.unpackbits(packed, axis=1, count=num_players).astype(bool), steps_of.reshape(-1)


def plan(num_players: int, most_coalitions: int, seed: int) -> Exact | Sampled | None:
    """Which coalitions to ask for, at most `most_coalitions`; None where these are too few to say anything."""
    if 1 << min(num_players, 62) <= most_coalitions:
        return Exact(num_players)
    num_pairs = (most_coalitions - 2) // (
        2 * (num_players - 1)
    )  # nobody and all are in each order, and asked for once
    if num_pairs < _FEWEST_PAIRS:
        return None
    players = np.tile(np.arange(num_players), (num_pairs, 1))
    forward = np.random.default_rng(seed).permuted(players, axis=1)
    return Sampled(np.stack([forward, forward[:, ::-1]], axis=1))
