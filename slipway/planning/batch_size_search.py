"""The largest batch of a device that fits, and the fastest by rows per second.

On a GPU a batch fits when a few steps of it run; on the CPU, where the system would kill the process instead of telling it, when the
memory plan says so. Sizes are powers of two, up to the number of training rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_TIMED_STEPS = 8
_NEAR = 0.95  # of the best rate: smaller batches as good as it are preferred


@dataclass(frozen=True)
class BatchSizeTrial:
    """One size: its predicted memory where it was predicted, its rate where it ran."""

    rows: int
    predicted_bytes: int | None
    rows_per_second: float | None  # None: it does not fit


def candidate_sizes(most_rows: int) -> list[int]:
    """Powers of two up to `most_rows`, the largest that `most_rows` allows among them."""
    return [1 << power for power in range(most_rows.bit_length()) if 1 << power <= most_rows]


def search(
    sizes: Sequence[int],
    predict: Callable[[int], int] | None,
    available_bytes: int | None,
    step_seconds: Callable[[int, int], float],
    reserve: float = 0.9,
) -> list[BatchSizeTrial]:
    """Try `sizes` from small to large until one does not fit. `step_seconds(rows, most_steps)` runs real steps.

    `predict` gives a process's bytes; no more than `reserve` of `available_bytes` are used.
    """
    trials: list[BatchSizeTrial] = []
    for rows in sizes:
        predicted = predict(rows) if predict else None
        fits = (
            predicted is None or available_bytes is None or predicted <= reserve * available_bytes
        )
        rate = _rate(rows, step_seconds) if fits else None
        trials.append(BatchSizeTrial(rows, predicted, rate))
        if rate is None:
            break
    return trials


def largest(trials: Sequence[BatchSizeTrial]) -> int | None:
    """The most rows that fit; None where not even the smallest do."""
    return max((trial.rows for trial in trials if trial.rows_per_second is not None), default=None)


def fastest(trials: Sequence[BatchSizeTrial]) -> int | None:
    """The smallest size whose rate is within 5 % of the best: what is faster than that is noise."""
    rates = {
        trial.rows: trial.rows_per_second for trial in trials if trial.rows_per_second is not None
    }
    return min(
        (rows for rows, rate in rates.items() if rate >= _NEAR * max(rates.values())), default=None
    )


def _rate(rows: int, step_seconds: Callable[[int, int], float]) -> float | None:
    try:
        return rows / step_seconds(rows, _TIMED_STEPS)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
