"""Times several models alternately, so that a disturbance of the machine affects all equally.

Every round calls each model at each batch size, in an order that changes from round to round. A
ratio of two models is formed within a round. No figure comes from a single call. A model that is
too slow for the time limit is measured at fewer batch sizes.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract, Ratio
from slipway.config.sections import MeasuringParams
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.export.graphs.graph import export_graph
from slipway.kinds.registry import kind_of
from slipway.reports.evaluation.members import Speed
from slipway.runtimes.runtime import Runner, open_onnx
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.calibration import Calibrator

FEWEST_CALLS_FOR_P99 = 100
_ROUNDS = 11
_MAX_CALLS = 20  # most calls with one row in each round: 220 in all
_MIN_CALLS = 3
_BLOCK_S = 0.003  # shorter calls are repeated to fill this time
_OPSET, _SPEEDS_S, _SPEED_BATCH = 18, 5.0, 64  # used for graphs that are only timed


@dataclass(frozen=True)
class Timings:
    """Measured seconds by model and round: `calls` with one row, and the mean per batch size."""

    calls: dict[str, list[list[float]]]
    blocks: dict[str, dict[int, list[float]]]

    def p50_ms(self, name: str) -> float:
        """Return the median of all calls with one row."""
        return statistics.median(self._all_calls(name)) * 1000

    def p99_ms(self, name: str) -> float | None:
        """Return the 99th percentile of all calls with one row; None for fewer than 100."""
        calls = self._all_calls(name)
        if len(calls) < FEWEST_CALLS_FOR_P99:
            return None
        return float(np.quantile(calls, 0.99)) * 1000

    def rows_per_second(self, name: str) -> dict[int, float]:
        """Return the median throughput by batch size."""
        return {
            size: size / statistics.median(seconds) for size, seconds in self.blocks[name].items()
        }

    def best_batch_size(self, name: str) -> int:
        """Return the batch size with the highest throughput."""
        speeds = self.rows_per_second(name)
        return max(speeds, key=lambda size: speeds[size])

    def latency(self, name: str, reference: str, confidence: float) -> Ratio:
        """Return the speed-up of `name` over `reference` for one row."""
        pairs = zip(self.calls[reference], self.calls[name], strict=True)
        ratios = [statistics.median(before) / statistics.median(after) for before, after in pairs]
        return median_ratio(ratios, confidence)

    def throughput(self, name: str, reference: str, confidence: float) -> Ratio:
        """Return the speed-up of `name` over `reference` in rows per second.

        Each is timed at its best batch size.
        """
        size, reference_size = self.best_batch_size(name), self.best_batch_size(reference)
        pairs = zip(self.blocks[reference][reference_size], self.blocks[name][size], strict=True)
        ratios = [(size / after) / (reference_size / before) for before, after in pairs]
        return median_ratio(ratios, confidence)

    def _all_calls(self, name: str) -> list[float]:
        return [seconds for calls in self.calls[name] for seconds in calls]


def measure_in_turns(
    runners: Mapping[str, Runner],
    rows: Inputs,
    max_batch_size: int,
    limit_s: float,
    confidence: float,
) -> Timings:
    """Time the models on batches of 1, 2, 4 ... rows for about `limit_s` seconds.

    Takes longer if `limit_s` is too short for a confidence interval.
    """
    warm = _warm_up(runners, rows, max_batch_size, limit_s)
    per_row = sum(seconds[1] for seconds in warm.values())
    num_rounds = fewest_rounds(confidence)
    if _ROUNDS * _MIN_CALLS * per_row < limit_s:
        num_rounds = max(_ROUNDS, num_rounds)
    num_calls = min(_MAX_CALLS, max(_MIN_CALLS, int(0.3 * limit_s / (num_rounds * per_row))))
    timings = Timings(
        {name: [] for name in runners},
        {name: {size: [] for size in seconds} for name, seconds in warm.items()},
    )
    names, row = list(runners), repeated_rows(rows, 1)
    for turn in range(num_rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            calls = [seconds_of(runners[name], row) for _ in range(num_calls)]
            timings.calls[name].append(calls)
        for size in warm[names[0]]:
            batch = repeated_rows(rows, size)
            for name in order:
                timings.blocks[name][size].append(_block(runners[name], batch, warm[name][size]))
    return timings


def member_speeds(
    networks: Mapping[str, Network],
    train: PackedSplit,
    val: PackedSplit,
    params: MeasuringParams,
    seed: int,
) -> dict[str, Speed]:
    """Time the fp32 graph of each network on the CPU."""
    runners: dict[str, Runner] = {}
    for name, network in networks.items():
        fitted, spec = Calibrator(network, params, seed, "cpu").fit(train, val), network.spec
        target = kind_of(spec.task).target
        head, temperature = target.load_part("head"), fitted.calibration.temperature
        graph = export_graph(
            CalibratedNetwork(network, head, temperature, fitted.score).eval(),
            spec.input,
            OutputContract(kind=target.output, labels=spec.classes),
            opset=_OPSET,
            max_batch_size=_SPEED_BATCH,
        )
        runners[name] = open_onnx(
            graph, variant="fp32", precision="fp32", provider="cpu", num_threads=0
        )
    timings = measure_in_turns(runners, val.inputs, _SPEED_BATCH, _SPEEDS_S, params.confidence)
    return {
        name: Speed(
            latency_ms=timings.p50_ms(name),
            rows_per_second=max(timings.rows_per_second(name).values()),
        )
        for name in networks
    }


def median_ratio(ratios: Sequence[float], confidence: float) -> Ratio:
    """Return the median with its interval from order statistics, which assume no distribution.

    W. J. Conover, Practical Nonparametric Statistics, 3rd edition (1999), section 3.2.

    Raises:
        ValueError: too few ratios for an interval.
    """
    number, ordered = len(ratios), sorted(ratios)
    tail = 0.0
    for rank in range(number // 2 + 1):
        tail += math.comb(number, rank) / 2**number
        if 1 - 2 * tail < confidence:
            break
    if rank == 0:
        raise ValueError(
            f"a {100 * confidence:g} % confidence interval needs at least "
            f"{fewest_rounds(confidence)} ratios, but there are {number}: measure more rounds"
        )
    return Ratio(
        value=statistics.median(ordered), low=ordered[rank - 1], high=ordered[number - rank]
    )


def fewest_rounds(confidence: float) -> int:
    """Return the smallest number of ratios whose extremes enclose the median at this confidence."""
    return math.ceil(1 - math.log2(1 - confidence))


def seconds_of(runner: Runner, batch: NDArray[Any]) -> float:
    """Return the wall-clock seconds of one call of the model."""
    start = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - start


def repeated_rows(rows: Inputs, size: int) -> NDArray[Any]:
    """Return `size` rows, repeated from the start if there are fewer."""
    return np.ascontiguousarray(rows[np.arange(size) % len(rows)])


def _warm_up(
    runners: Mapping[str, Runner], rows: Inputs, max_batch_size: int, limit_s: float
) -> dict[str, dict[int, float]]:
    """Time one call of each model and batch size, for as many sizes as the time limit allows."""
    found: dict[str, dict[int, float]] = {name: {} for name in runners}
    spent = 0.0
    powers = [2**power for power in range(max_batch_size.bit_length())]
    for size in [*(power for power in powers if power < max_batch_size), max_batch_size]:
        batch = repeated_rows(rows, size)
        for name, runner in runners.items():
            runner.run(batch)  # the first run allocates memory
            # The shorter of two, because the machine may stall in one of them.
            found[name][size] = min(seconds_of(runner, batch) for _ in range(2))
        round_s = sum(max(seconds[size], _BLOCK_S) for seconds in found.values())
        spent += round_s
        if (spent + 2 * round_s) * _ROUNDS > 0.7 * limit_s:  # no time is left for the next size
            break
    return found


def _block(runner: Runner, batch: NDArray[Any], expected_s: float) -> float:
    """Call the model for about `_BLOCK_S` seconds, at most `_MAX_CALLS` times.

    Returns the seconds per call.
    """
    num_calls = max(1, min(_MAX_CALLS, int(_BLOCK_S / max(expected_s, 1e-6))))
    start = time.perf_counter()
    for _ in range(num_calls):
        runner.run(batch)
    return (time.perf_counter() - start) / num_calls
