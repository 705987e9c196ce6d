"""Stateless random numbers: each is a pure function of (seed, epoch, sample id, stream).

There is no generator state to save, so a resumed run, another number of workers or another file
order draws the same numbers. The numbers come from SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"), which is not cryptographically secure.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def id_keys(ids: Sequence[str]) -> NDArray[np.uint64]:
    """Return the keys (N,) uint64 of samples: the first 16 hexadecimal digits of each id.

    The k-th of equal rows, whose id ends in "-k", has a key of its own.
    """
    keys = np.array([int(sample_id[:16], 16) for sample_id in ids], dtype=np.uint64)
    numbers = (sample_id.partition("-")[2] for sample_id in ids)
    steps = np.array([int(number or 1) - 1 for number in numbers], dtype=np.uint64)
    return keys ^ np.where(steps > 0, _mix(steps), np.uint64(0))


def uniform(seed: int, epoch: int, keys: NDArray[np.uint64], stream: str) -> NDArray[np.float64]:
    """Return (N,) float64 in [0, 1), independent for different seeds, epochs, keys or streams.

    `stream` names the use of the numbers, such as "order" or "rotation", so that two uses never
    share numbers.
    """
    start = hashlib.sha256(f"{seed}/{epoch}/{stream}".encode()).digest()
    state = keys ^ np.uint64(int.from_bytes(start[:8], "little"))
    return (_mix(_mix(state)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the indices (N,) int64 of samples in random order.

    The same keys in another sequence give the same order of samples.
    """
    return drawn_order(seed, epoch, keys, "order")


def drawn_order(seed: int, epoch: int, keys: NDArray[np.uint64], stream: str) -> NDArray[np.int64]:
    """Return the indices (N,) int64 of samples in the random order of one stream."""
    return np.lexsort((keys, uniform(seed, epoch, keys, stream)))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = state + _GOLDEN_GAMMA
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
