"""NumPy's ways to choose and to sort rows, for arrays that lie in files: nothing that grows with the rows is held in memory.

Results are scratch arrays as well (`scratch_tables`). Only a run of equal keys has to fit into memory.
"""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch_tables import scratch_array

_CHUNK_ROWS = 1 << 16
_32, _LOW_32 = np.uint64(32), np.uint64(0xFFFFFFFF)

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


def parts_of(num_rows: int, size: int = _CHUNK_ROWS) -> Iterator[slice]:
    """Slices of at most `size` rows, in order, that are all of the rows."""
    return (slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size))


def full(num_rows: int, value: int | bool, dtype: type[np.generic]) -> NDArray[Any]:
    """(N,) the same value."""
    array = scratch_array((num_rows,), dtype)
    array[:] = value
    return array


def taken(values: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """`values[rows]`."""
    found = scratch_array((len(rows), *values.shape[1:]), values.dtype.type)
    for part in parts_of(len(rows)):
        found[part] = values[rows[part]]
    return found


def rows_where(mask: Mask) -> Rows:
    """`np.flatnonzero(mask)`."""
    found, end = scratch_array((int(np.count_nonzero(mask)),), np.int64), 0
    for part in parts_of(len(mask)):
        rows = np.flatnonzero(mask[part])
        found[end : end + len(rows)] = rows + part.start
        end += len(rows)
    return found


def order_of(*keys: NDArray[np.uint64]) -> Rows:
    """(N,) the rows, fewer than 2^32, by (N,) keys: the first decides, the next where it is equal, then the number of the row."""
    packed = scratch_array(
        (len(keys[0]),), np.uint64
    )  # the upper half of the first key, and the row
    for part in parts_of(len(packed)):
        rows = np.arange(part.start, part.stop, dtype=np.uint64)
        packed[part] = (keys[0][part].astype(np.uint64) & ~_LOW_32) | rows
    packed.sort()
    for part in uncut(len(packed), lambda part: packed[part] >> _32):
        upper, rows = packed[part] >> _32, packed[part] & _LOW_32
        follows = upper[1:] == upper[:-1]
        tied = (
            np.flatnonzero(np.append(follows, False) | np.append(False, follows))
            if follows.any()
            else np.zeros(0, np.int64)
        )
        among = rows[tied]
        rows[tied] = among[
            np.lexsort([among, *(key[among] for key in reversed(keys)), upper[tied]])
        ]
        packed[part] = rows
    return packed.view(np.int64)


def uncut(num_rows: int, keys_at: Callable[[slice], NDArray[np.uint64]]) -> Iterator[slice]:
    """Slices of some rows each, none of which ends between two rows of equal keys; equal keys lie together."""
    begin = 0
    while begin < num_rows:
        end = min(begin + _CHUNK_ROWS, num_rows)
        last = keys_at(slice(end - 1, end))
        while end < num_rows:
            same = keys_at(slice(end, min(end + _CHUNK_ROWS, num_rows))) == last
            num_same = len(same) if same.all() else int(np.argmin(same))
            end += num_same
            if num_same < len(same):
                break
        yield slice(begin, end)
        begin = end


class ScratchSet:
    """A set of numbers that grows in a file, which must be new; several threads may add to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count, self._lock = file, 0, Lock()

    def add(self, numbers: NDArray[np.uint64]) -> None:
        """Add them; some may be there already."""
        with self._lock:
            self._file.write(np.ascontiguousarray(numbers).data)
            self._count += len(numbers)

    def rising(self) -> NDArray[np.uint64]:
        """Each number once. Nothing may be added afterwards."""
        self._file.flush()
        if not self._count:
            return np.zeros(0, np.uint64)
        numbers = np.asarray(np.memmap(self._file, np.uint64, "r+", shape=(self._count,)))
        numbers.sort()
        end = 0
        for part in parts_of(len(numbers)):
            piece = np.unique(numbers[part])
            piece = piece[1:] if end and piece[0] == numbers[end - 1] else piece
            numbers[end : end + len(piece)] = piece
            end += len(piece)
        return numbers[:end]
