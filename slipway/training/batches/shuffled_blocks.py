"""Shuffles data larger than memory by blocks, and reads the blocks ahead.

The packed store is cut into blocks of consecutive rows. Each epoch draws the order of the blocks,
and shuffles the rows of the blocks that fit in the buffer together. The store is sorted by the
digests of the rows' content, so a block is a random sample of the data already. The order is a
function of the seed, the epoch, the ids and the sizes below, never of processes or time.
"""

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import FileSpan, Inputs, file_span, stored_bytes
from slipway.system.errors import IntegrityError

_BLOCK_BYTES = 8 << 20  # bytes read at a time, so many that slow seeks hardly matter
_BLOCKS_TOGETHER = 8  # fewest blocks that are shuffled together
_READ_BYTES = 1 << 20  # bytes read by one system call
_HUGE_BYTES = 2 << 20  # a huge page of most processors; threads read parts of at most this size
_THREADS = 4  # threads that read
_POPULATE_READ = 22  # MADV_POPULATE_READ of mman.h: read pages and map them (Linux 5.14)


class _BlockPart(NamedTuple):
    """Consecutive bytes of a file."""

    begin: int
    end: int

    @property
    def is_huge_page(self) -> bool:
        return self.begin % _HUGE_BYTES == 0 and self.end - self.begin == _HUGE_BYTES


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

    A few threads read the blocks, where the system can by huge pages. Loader processes have threads
    of their own, and share the pages.
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
    """The threads of one process that read and drop blocks.

    They read different parts of the same block, so the disk always has several requests to work on.
    """

    def __init__(self, spans: Sequence[FileSpan | None]) -> None:
        self.place: Any = None
        self._spans = spans
        self._changed = threading.Condition()
        self._now: frozenset[int] = frozenset()
        # By unfinished block, in the order of reading.
        self._unread: dict[int, list[_BlockPart]] = {}
        self._in_work: Counter[int] = Counter()  # parts that threads read now, by block
        self._ready: set[int] = set()
        self._unused: set[int] = set()  # blocks to drop
        self._error: OSError | IntegrityError | None = None
        mappings = {span.mapping for span in spans if span}
        self._takes_huge_pages = {mapping: _prefer_huge_pages(mapping) for mapping in mappings}
        for _ in range(_THREADS):
            threading.Thread(target=self._run, name="slipway-read-ahead", daemon=True).start()

    def plan(self, place: Any, now: Sequence[int], following: Sequence[int]) -> None:
        self.place = place
        wanted = dict.fromkeys([*now, *following])
        with self._changed:
            self._now = frozenset(now)
            self._unused |= self._ready | self._unread.keys()
            self._unused -= wanted.keys()
            self._ready &= wanted.keys()
            self._unread = {
                block: self._unread[block] if block in self._unread else _parts(self._spans[block])
                for block in wanted
                if block not in self._ready
            }
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._now <= self._ready)
            if self._error:
                raise self._error

    def _run(self) -> None:
        while True:
            block, part = self._next_work()
            try:
                if part is None:
                    _drop(self._spans[block])
                    continue
                self._read(self._spans[block], part)
            except (OSError, IntegrityError) as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._in_work[block] -= 1
                if block not in self._unread:
                    self._unused.add(block)  # not wanted any more
                elif not self._unread[block] and not self._in_work[block]:
                    del self._unread[block]
                    self._ready.add(block)
                self._changed.notify_all()

    def _next_work(self) -> tuple[int, _BlockPart | None]:
        """Wait for a part of a block to read, or a block to drop (None)."""
        with self._changed:
            self._changed.wait_for(lambda: self._unused or any(self._unread.values()))
            if self._unused:
                return self._unused.pop(), None
            block = next(block for block, parts in self._unread.items() if parts)
            self._in_work[block] += 1
            return block, self._unread[block].pop(0)

    def _read(self, span: FileSpan | None, part: _BlockPart) -> None:
        """Read a part of the block `span` into the page cache."""
        assert span is not None
        descriptor = os.open(span.path, os.O_RDONLY)
        try:
            is_huge = part.is_huge_page and self._takes_huge_pages[span.mapping]
            if not (is_huge and _read_huge_page(span.mapping, part.begin)):
                _read_pages(span.path, descriptor, part)
        finally:
            os.close(descriptor)


def _parts(span: FileSpan | None) -> list[_BlockPart]:
    """Cut a block at the bounds of the huge pages of its file."""
    assert span is not None
    cuts = range(span.begin // _HUGE_BYTES * _HUGE_BYTES + _HUGE_BYTES, span.end, _HUGE_BYTES)
    return [_BlockPart(begin, end) for begin, end in pairwise([span.begin, *cuts, span.end])]


def _prefer_huge_pages(mapping: mmap.mmap) -> bool:
    """Ask the system to read a mapped file by huge pages. Returns False if it cannot."""
    if not _has_huge_pages():
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_RANDOM)  # otherwise it reads two huge pages at a time
    except OSError:
        return False
    return True


@cache
def _has_huge_pages() -> bool:
    """Return True if this is a Linux that reads `_HUGE_BYTES` of a mapped file at a time.

    Linux 5.18 is the first; see `do_sync_mmap_readahead` in mm/filemap.c.
    """
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    try:
        release = tuple(int(number) for number in os.uname().release.split(".")[:2])
        return release >= (5, 18) and int(size.read_text()) == _HUGE_BYTES
    except (OSError, ValueError):
        return False


def _read_huge_page(mapping: mmap.mmap, begin: int) -> bool:
    """Read `_HUGE_BYTES` of a mapped file from `begin` on as one page, and map it.

    That takes far less processor time than reading as many small pages and copying them. File
    systems without huge pages read small ones. Returns False if the disk fails or the file is too
    short.
    """
    page = np.frombuffer(mapping, np.uint8)[begin : begin + _HUGE_BYTES]
    # Python's own `madvise` would stop all other threads. Reading the memory without this call
    # would end the process if the disk fails.
    madvise = ctypes.CDLL(None).madvise
    if madvise(ctypes.c_void_p(page.ctypes.data), ctypes.c_size_t(_HUGE_BYTES), _POPULATE_READ):
        return False
    page[::1024].max()  # the first use may wait for the host of a virtual machine: not the batches
    return True


def _read_pages(path: Path, descriptor: int, part: _BlockPart) -> None:
    """Read `part` of the open file `path` into the page cache, by pages of any size."""
    if hasattr(os, "posix_fadvise"):
        # Otherwise the system reads ahead beyond the part.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = part.end - part.begin
        os.posix_fadvise(descriptor, part.begin, size, os.POSIX_FADV_WILLNEED)
    place = part.begin
    while place < part.end:
        count = len(os.pread(descriptor, min(_READ_BYTES, part.end - place), place))
        if not count:
            raise IntegrityError(
                f"{path} ends after {os.fstat(descriptor).st_size} bytes, expected at least "
                f"{part.end}. Run `dvc repro --force precompute`."
            )
        place += count


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
