"""Shuffles data larger than memory by blocks, and reads the blocks ahead.

The packed store is cut into blocks of consecutive rows. Each epoch draws the order of the blocks,
and shuffles the rows of the blocks that fit in the buffer together. The store is sorted by the
digests of the rows' content, so a block is a random sample of the data already. The order is a
function of the seed, the epoch, the ids and the sizes below, never of processes or time.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import FileSpan, Inputs, file_span, stored_bytes
from slipway.system.errors import IntegrityError

_BLOCK_BYTES = 8 << 20  # bytes read at a time, so many that slow seeks hardly matter
_BLOCKS_TOGETHER = 8  # fewest blocks that are shuffled together
_READ_BYTES = 1 << 20  # bytes read by one system call


@dataclass(frozen=True)
class BlockShuffle:
    """Block sizes in rows: rows read at a time, and rows shuffled together."""

    block: int
    window: int

    def order(
        self, seed: int, epoch: int, keys: NDArray[np.uint64], part_rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the order of all rows in an epoch, (N,).

        `part_rows` are the numbers of rows in the files.
        """
        ends = np.cumsum(part_rows)
        begins = np.concatenate(
            [
                np.arange(end - rows, end, self.block)
                for rows, end in zip(part_rows, ends.tolist(), strict=True)
            ]
        )
        sizes = np.diff(np.append(begins, ends[-1]))
        drawn = np.lexsort((keys[begins], uniform(seed, epoch, keys[begins], "blocks")))
        rows = np.concatenate([np.arange(begins[n], begins[n] + sizes[n]) for n in drawn])
        windows = np.arange(len(rows)) // self.window
        draws = uniform(seed, epoch, keys[rows], "order")
        return np.asarray(rows[np.lexsort((keys[rows], draws, windows))])


def block_shuffle(inputs: Sequence[Inputs], buffer_mib: int) -> BlockShuffle:
    """Return block sizes for which the rows in use and those read ahead fill `buffer_mib` MiB."""
    num_rows = sum(map(len, inputs))
    row_bytes = max(1, -(-sum(map(stored_bytes, inputs)) // max(1, num_rows)))
    window_bytes = (buffer_mib << 20) // 2
    block_bytes = min(_BLOCK_BYTES, window_bytes // _BLOCKS_TOGETHER)
    block = max(1, block_bytes // row_bytes)
    return BlockShuffle(block, max(block, window_bytes // row_bytes))


class ReadAhead:
    """Reads blocks into the page cache before their rows are used, and drops them afterwards.

    A thread reads whole blocks in the order of the file. Loader processes have a thread each, and
    share the pages.
    """

    def __init__(self, inputs: Sequence[Inputs], block: int) -> None:
        self._inputs, self._block = list(inputs), block
        self._spans: list[FileSpan | None] = []
        self._first_blocks = [0]  # number of each file's first block
        for part in self._inputs:
            begins = range(0, len(part), block)
            spans = [file_span(part, begin, min(begin + block, len(part))) for begin in begins]
            self._spans.extend(spans)
            self._first_blocks.append(len(self._spans))
        self._starts = np.cumsum([0, *map(len, self._inputs)])
        self._reader: tuple[int, _Reader] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadAhead, (self._inputs, self._block)

    @property
    def place(self) -> Any:
        """The `place` of this process's last call of `move`, or None before the first call."""
        return self._current_reader().place

    def move(self, place: Any, now: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Start reading the blocks of the rows `now`, then of `following`; drop all other blocks.

        Returns at once. The property `place` returns the argument `place` of the last call.
        """
        self._current_reader().plan(place, self._blocks_of(now), self._blocks_of(following))

    def wait(self) -> None:
        """Wait until the rows `now` of the last call of `move` are in memory.

        Raises OSError if the disk fails, IntegrityError if a file is shorter than it was.
        """
        self._current_reader().wait()

    def _blocks_of(self, rows: NDArray[np.int64]) -> list[int]:
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        within = (rows - self._starts[parts]) // self._block
        blocks = np.unique(np.asarray(self._first_blocks)[parts] + within).tolist()
        return [block for block in blocks if self._spans[block] is not None]

    def _current_reader(self) -> "_Reader":
        """Return this process's reader; a fork copies the reader but not its thread."""
        if self._reader is None or self._reader[0] != os.getpid():
            self._reader = (os.getpid(), _Reader(self._spans))
        return self._reader[1]


class _Reader:
    """The thread of one process that reads and drops blocks."""

    def __init__(self, spans: Sequence[FileSpan | None]) -> None:
        self.place: Any = None
        self._spans = spans
        self._changed = threading.Condition()
        self._now: frozenset[int] = frozenset()
        self._wanted: list[int] = []  # blocks in the order of reading
        self._ready: set[int] = set()
        self._error: OSError | IntegrityError | None = None
        threading.Thread(target=self._run, name="slipway-read-ahead", daemon=True).start()

    def plan(self, place: Any, now: Sequence[int], following: Sequence[int]) -> None:
        self.place = place
        wanted = list(dict.fromkeys([*now, *following]))
        with self._changed:
            self._now, self._wanted = frozenset(now), wanted
            unused = self._ready - set(wanted)
            self._ready -= unused
            self._changed.notify_all()
        for block in unused:
            _drop(self._spans[block])

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._now <= self._ready)
            if self._error:
                raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._unread)
                block, *further = self._unread()
            try:
                _read(self._spans[block], self._spans[further[0]] if further else None)
            except (OSError, IntegrityError) as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if is_wanted := block in self._wanted:
                    self._ready.add(block)
                    self._changed.notify_all()
            if not is_wanted:
                _drop(self._spans[block])

    def _unread(self) -> list[int]:
        return [block for block in self._wanted if block not in self._ready]


def _read(span: FileSpan | None, following: FileSpan | None) -> None:
    """Read the block `span` into the page cache, and ask the system to prefetch `following`."""
    assert span is not None
    descriptor = os.open(span.path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            # Otherwise the system reads ahead beyond the block.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for near in (span, following):
                if near is not None and near.path == span.path:
                    size = near.end - near.begin
                    os.posix_fadvise(descriptor, near.begin, size, os.POSIX_FADV_WILLNEED)
        place = span.begin
        while place < span.end:
            count = len(os.pread(descriptor, min(_READ_BYTES, span.end - place), place))
            if not count:
                raise IntegrityError(
                    f"{span.path} ends after {place} bytes, expected at least {span.end}. "
                    "Run `dvc repro --force precompute`."
                )
            place += count
    finally:
        os.close(descriptor)


def _drop(span: FileSpan | None) -> None:
    """Release the memory pages that lie entirely within the block `span`."""
    assert span is not None
    begin, end = -(-span.begin // mmap.PAGESIZE) * mmap.PAGESIZE, span.end & -mmap.PAGESIZE
    if end <= begin or not hasattr(os, "posix_fadvise"):
        return
    span.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)  # mapped pages would stay
    descriptor = os.open(span.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
