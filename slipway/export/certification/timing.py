"""How fast several models are, measured in turns: what disturbs the machine for a while then disturbs all of them.

Every round calls each model at each batch size, in an order that changes from round to round, so that a ratio is made of
neighbours. Nothing is drawn from a single call. A model too slow for the time limit is measured at fewer batch sizes.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Ratio
from slipway.data.store.packed import Inputs
from slipway.runtimes.runtime import Runner

FEWEST_CALLS_FOR_P99 = 100
_ROUNDS = 11
_MOST_CALLS = 20  # of one row, in one round: 220 in all
_FEWEST_CALLS = 3
_BLOCK_S = 0.003  # what is shorter is called several times in a row


@dataclass(frozen=True)
class Timings:
    """Seconds, by model: `calls` of one row in each round, and for each batch size one mean call in each round."""

    calls: dict[str, list[list[float]]]
    blocks: dict[str, dict[int, list[float]]]

    def p50_ms(self, name: str) -> float:
        """The median of all calls of one row."""
        return statistics.median(self._all_calls(name)) * 1000

    def p99_ms(self, name: str) -> float | None:
        """Their 99th percentile; None where there are fewer than 100."""
        calls = self._all_calls(name)
        return (
            float(np.quantile(calls, 0.99)) * 1000 if len(calls) >= FEWEST_CALLS_FOR_P99 else None
        )

    def rows_per_second(self, name: str) -> dict[int, float]:
        """The median over the rounds, by batch size."""
        return {
            size: size / statistics.median(seconds) for size, seconds in self.blocks[name].items()
        }

    def best_batch_size(self, name: str) -> int:
        """Where most rows are answered in a second."""
        speeds = self.rows_per_second(name)
        return max(speeds, key=lambda size: speeds[size])

    def latency(self, name: str, reference: str, confidence: float) -> Ratio:
        """How many times as fast as `reference` one row is answered."""
        pairs = zip(self.calls[reference], self.calls[name], strict=True)
        return median_ratio(
            [statistics.median(before) / statistics.median(after) for before, after in pairs],
            confidence,
        )

    def throughput(self, name: str, reference: str, confidence: float) -> Ratio:
        """How many times the rows of `reference` in a second, each at its best batch size."""
        size, reference_size = self.best_batch_size(name), self.best_batch_size(reference)
        pairs = zip(self.blocks[reference][reference_size], self.blocks[name][size], strict=True)
        return median_ratio(
            [(size / after) / (reference_size / before) for before, after in pairs], confidence
        )

    def _all_calls(self, name: str) -> list[float]:
        return [seconds for calls in self.calls[name] for seconds in calls]


def measure_in_turns(
    runners: Mapping[str, Runner],
    rows: Inputs,
    largest_batch: int,
    limit_s: float,
    confidence: float,
) -> Timings:
    """Time the models on batches of 1, 2, 4 ... rows, for about `limit_s` seconds, or longer where that is too short for an interval."""
    warm = _warm_up(runners, rows, largest_batch, limit_s)
    per_row = sum(seconds[1] for seconds in warm.values())
    fewest = fewest_rounds(confidence)
    num_rounds = max(_ROUNDS, fewest) if _ROUNDS * _FEWEST_CALLS * per_row < limit_s else fewest
    num_calls = min(_MOST_CALLS, max(_FEWEST_CALLS, int(0.3 * limit_s / (num_rounds * per_row))))
    timings = Timings(
        {name: [] for name in runners},
        {name: {size: [] for size in seconds} for name, seconds in warm.items()},
    )
    names = list(runners)
    for turn in range(num_rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            timings.calls[name].append(
                [_seconds(runners[name], _batch(rows, 1)) for _ in range(num_calls)]
            )
        for size in warm[names[0]]:
            batch = _batch(rows, size)
            for name in order:
                timings.blocks[name][size].append(_block(runners[name], batch, warm[name][size]))
    return timings


def median_ratio(ratios: Sequence[float], confidence: float) -> Ratio:
    """The median, and the bounds between which the true one lies, from order statistics: no distribution is assumed.

    W. J. Conover, Practical Nonparametric Statistics, 3rd edition (1999), section 3.2. ValueError for too few ratios.
    """
    number, ordered = len(ratios), sorted(ratios)
    tail = 0.0
    for place in range(number // 2 + 1):
        tail += math.comb(number, place) / 2**number
        if 1 - 2 * tail < confidence:
            break
    if place == 0:
        raise ValueError(
            f"{number} ratios have no interval at {confidence}, expected at least {fewest_rounds(confidence)}"
        )
    return Ratio(
        value=statistics.median(ordered), low=ordered[place - 1], high=ordered[number - place]
    )


def fewest_rounds(confidence: float) -> int:
    """The fewest rounds whose smallest and largest ratio enclose the true median with this confidence."""
    return math.ceil(1 - math.log2(1 - confidence))


def _warm_up(
    runners: Mapping[str, Runner], rows: Inputs, largest_batch: int, limit_s: float
) -> dict[str, dict[int, float]]:
    """Seconds of one call, by model and batch size, for as many sizes as the time limit allows."""
    found: dict[str, dict[int, float]] = {name: {} for name in runners}
    spent = 0.0
    for size in _sizes(largest_batch):
        batch = _batch(rows, size)
        for name, runner in runners.items():
            runner.run(batch)  # allocates
            found[name][size] = min(
                _seconds(runner, batch) for _ in range(2)
            )  # a machine may stall in one of them
        round_s = sum(max(seconds[size], _BLOCK_S) for seconds in found.values())
        spent += round_s
        if (spent + 2 * round_s) * _ROUNDS > 0.7 * limit_s:  # the next size would not fit any more
            break
    return found


def _sizes(largest: int) -> list[int]:
    powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return [*powers, largest]


def _block(runner: Runner, batch: NDArray[Any], expected_s: float) -> float:
    """Seconds of one call, the mean of as many as fill 3 ms."""
    num_calls = max(1, min(_MOST_CALLS, int(_BLOCK_S / max(expected_s, 1e-6))))
    start = time.perf_counter()
    for _ in range(num_calls):
        runner.run(batch)
    return (time.perf_counter() - start) / num_calls


def _seconds(runner: Runner, batch: NDArray[Any]) -> float:
    start = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - start


def _batch(rows: Inputs, size: int) -> NDArray[Any]:
    return np.ascontiguousarray(rows[np.arange(size) % len(rows)])
