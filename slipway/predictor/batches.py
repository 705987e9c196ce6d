"""Pads batches to the sizes that were warmed up."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers

Run = Callable[[NDArray[Any]], Answers]


def padded(run: Run, max_batch_size: int) -> Run:
    """Wrap `run` so that it receives batches padded with zeros to a few sizes only.

    The sizes are the powers of two below `max_batch_size`, and `max_batch_size` itself. A runtime
    that plans each batch size separately was warmed up with exactly these. The answers to padded
    rows are dropped.
    """

    def run_padded(batch: NDArray[Any]) -> Answers:
        num_rows = len(batch)
        missing = min(next_power_of_two(num_rows), max_batch_size) - num_rows
        padding: Any = [(0, missing)] + [(0, 0)] * (batch.ndim - 1)
        return Answers(*(part[:num_rows] for part in run(np.pad(batch, padding))))

    return run_padded


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
