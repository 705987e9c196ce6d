"""The protocol of `bench.loading`: a process prepares one loader and times it on request.

For each line on stdin the process times its loader for a second. This module imports only the
standard library, because it also runs in the environment of the other loaders.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MIN_SECONDS = 1.5
NUM_AHEAD = 8  # batches; two workers fetch two each, FFCV three


@dataclass(frozen=True)
class Case:
    """One case: JPEGs of one size, and the batches made from them."""

    name: str
    size_px: int
    batch_size: int
    stored_px: int  # of Slipway's packed images
    padding_px: int  # a random crop after padding; 0: a random resized crop instead


CASES = {case.name: case for case in (Case("P1", 224, 64, 256, 0), Case("P2", 28, 256, 28, 4))}


def serve(make: Callable[[], Callable[[], Iterable[int]]]) -> None:
    """Serve rounds of the loader that `make` creates. Prints `ready`, or the failure."""
    try:
        batches = _without_end(make())
        _timed(batches, 0.0)  # caches are filled, workers started, code compiled
    except BaseException as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:60]}", flush=True)
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        print(f"rate {_timed(batches, MIN_SECONDS)}", flush=True)


def _without_end(epoch: Callable[[], Iterable[int]]) -> Iterator[int]:
    while True:
        yield from epoch()


def _timed(batches: Iterator[int], seconds: float) -> float:
    """Return images per second, without batches that were prepared during another's turn."""
    for _ in range(NUM_AHEAD):
        next(batches)
    begin, count = time.perf_counter(), 0
    while True:
        count += next(batches)
        if (elapsed := time.perf_counter() - begin) >= seconds:
            return count / elapsed
