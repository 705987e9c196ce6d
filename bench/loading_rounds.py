"""The protocol of `bench.loading`: a process that makes one loader ready and then, for each line it reads, times it for a second.

Only the standard library, since it runs in the peers' environment too.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

MIN_SECONDS = 1.0


@dataclass(frozen=True)
class Case:
    """What is loaded: JPEGs of one size, and what comes out of them."""

    name: str
    size_px: int
    batch_size: int
    stored_px: int  # of Slipway's packed images
    padding_px: int  # a random crop after padding; 0: a random resized crop instead


CASES = {case.name: case for case in (Case("P1", 224, 64, 256, 0), Case("P2", 28, 256, 28, 4))}


def serve(make: Callable[[], Callable[[], int]]) -> None:
    """`make` gives a function that runs one epoch and returns its number of images. Prints `ready`, or why it is not."""
    try:
        epoch = make()
        epoch()  # caches are filled, workers started, code compiled
    except BaseException as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < MIN_SECONDS:
            count += epoch()
            seconds = time.perf_counter() - begin
        print(f"rate {count / seconds}", flush=True)
