"""Manages the workers' metric files: safe on a full disk, and merged when workers die.

prometheus_client writes to memory maps of sparse files. On a full disk, the first write to a new
page ends the process with SIGBUS. `ClaimedFile` allocates all blocks first. Without disk space,
values stay in memory, which no scrape shows, until there is space.

prometheus_client also keeps the files of every process that ever counted, and reads them for each
scrape: a worker that keeps dying would make scrapes slower without limit. `merged` sums the files
of dead workers into one file per kind. If the disk has no space for the sum, the files stay.

A scraper may be killed between any two file operations without counting anything twice or losing
it. Dead workers' files are first renamed to `.dead`. The new sum is named `.sum` once complete:
from then on it holds all `.dead` files, removed or not. The next scraper continues from there.
"""

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from slipway.system.files import claim_space, is_alive

logger = logging.getLogger("bentoml.slipway")

KINDS = ("counter", "histogram")
_INITIAL_BYTES = 1 << 16  # as in prometheus_client
_HEADER_BYTES = 8  # four of them hold the number of used bytes
_RETRY_S = 1.0
_used = struct.Struct("i")
_unclaimed: set[str] = set()  # files without disk space; logged once for all
_SUM = 0  # stands in place of a process id
_SPARE_BYTES = 4096  # spare bytes in the file of a new sum
_LOCK = "dead_workers.lock"
_has_failed = False  # True if the last merge failed


class ClaimedFile(MmapedDict):
    """Replaces prometheus_client's (0.26) memory-mapped dictionary; safe when the disk is full."""

    def __init__(self, filename: str) -> None:
        self._fname = filename
        self._f: Any = None
        content = b""
        with suppress(FileNotFoundError):  # exists if an earlier process had this id
            content = Path(filename).read_bytes()
        self._capacity = max(len(content), _INITIAL_BYTES)
        self._m = _in_memory(content, self._capacity)
        self._used = _used.unpack_from(self._m)[0] or _HEADER_BYTES
        _used.pack_into(self._m, 0, self._used)
        entries = self._read_all_values()  # type: ignore[no-untyped-call]
        self._positions = {key: position for key, _, _, position in entries}
        self._is_on_disk = False
        self._retry_at = 0.0
        self._claim()

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set a value. First retries the disk if values are in memory because it was full."""
        if not self._is_on_disk and time.monotonic() >= self._retry_at:
            self._claim()
        super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        max_bytes = len(key.encode()) + 64  # upper bound for a new entry
        while self._used + max_bytes > self._capacity:
            self._capacity *= 2
            self._m = _in_memory(self._m[:], self._capacity)
            self._is_on_disk = False
            self._claim()
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _claim(self) -> None:
        """Move the values from memory to the file, if the disk has space for all of them."""
        try:
            if self._f is None:
                self._f = open(self._fname, "a+b")  # noqa: SIM115 - `close` closes it
            self._f.truncate(self._capacity)
            claim_space(Path(self._fname))
            mapped = mmap.mmap(self._f.fileno(), self._capacity)
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_S
            if not _unclaimed:
                logger.error(
                    "cannot write metrics to disk (%s); counters stay in memory and are missing "
                    "from /metrics until space is available",
                    error,
                )
            _unclaimed.add(self._fname)
            return
        mapped[_HEADER_BYTES : self._used] = self._m[_HEADER_BYTES : self._used]
        mapped[:_HEADER_BYTES] = self._m[:_HEADER_BYTES]  # last: from now on readers see values
        self._m, self._is_on_disk = mapped, True
        if self._fname in _unclaimed:
            _unclaimed.discard(self._fname)
            if not _unclaimed:
                logger.info("metrics are on disk again; /metrics has all counters of this worker")


def claim_metric_files() -> None:
    """Make prometheus_client use ClaimedFile for its values in multiprocess mode."""
    values.MmapedDict = ClaimedFile  # type: ignore[attr-defined,assignment]


def _in_memory(content: bytes, num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes)
    memory[: len(content)] = content
    return memory


class WorkersCollector(MultiProcessCollector):
    """Collects the metrics from all workers' files in a folder.

    Skips empty files, which prometheus_client cannot read.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(None, str(directory))  # type: ignore[no-untyped-call]
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        files = [str(path) for path in self._directory.glob("*.db") if _has_size(path)]
        return self.merge(files, accumulate=True)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def merged(directory: Path) -> Iterator[None]:
    """Merge the metric files of dead workers, and keep all files unchanged during the block.

    A shared lock stops other scrapers from removing files meanwhile. Thread-safe.
    """
    with (directory / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with _logging_first_failure():
            while any(_has_work(directory, kind) for kind in KINDS):
                fcntl.flock(lock, fcntl.LOCK_EX)
                for kind in KINDS:
                    _merge(directory, kind)
                fcntl.flock(lock, fcntl.LOCK_SH)  # not atomic: others may merge in between
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def _logging_first_failure() -> Iterator[None]:
    global _has_failed
    try:
        yield
    except OSError as error:
        if not _has_failed:
            logger.error(
                "cannot merge the metrics of dead workers (%s); scrapes become slower", error
            )
        _has_failed = True
    else:
        _has_failed = False


def _has_work(directory: Path, kind: str) -> bool:
    if _files_of_dead_workers(directory, kind) or _renamed(directory, kind):
        return True
    return _complete_sum(directory, kind).exists()


def _files_of_dead_workers(directory: Path, kind: str) -> list[Path]:
    processes = {path: int(path.stem.rpartition("_")[2]) for path in directory.glob(f"{kind}_*.db")}
    return [
        path for path, process in processes.items() if process != _SUM and not is_alive(process)
    ]


def _renamed(directory: Path, kind: str) -> list[Path]:
    return list(directory.glob(f"{kind}_*.dead"))


def _complete_sum(directory: Path, kind: str) -> Path:
    return directory / f"{kind}_{_SUM}.sum"


def _merge(directory: Path, kind: str) -> None:
    _replace_sum(directory, kind)  # the sum that a killed scraper left
    old_sum = directory / f"{kind}_{_SUM}.db"
    new = old_sum.with_suffix(".new")
    found = _files_of_dead_workers(directory, kind)
    sources = [*found, *_renamed(directory, kind)]
    if not sources:
        return  # another worker was faster
    # A full disk raises OSError here, before any file is touched, instead of SIGBUS later.
    num_bytes = sum(path.stat().st_size for path in (*sources, old_sum) if path.exists())
    create_claimed_file(new, num_bytes + _SPARE_BYTES)
    for path in found:
        # With the time, because process ids are reused.
        path.rename(path.with_name(f"{path.stem}_{time.time_ns()}.dead"))
    totals: dict[str, float] = {}
    # A worker may have died between creating its file and giving it a size.
    for path in filter(_has_size, [*_renamed(directory, kind), old_sum]):
        entries = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        for key, value, _, _ in entries:
            totals[key] = totals.get(key, 0.0) + value
    file = MmapedDict(str(new))  # type: ignore[no-untyped-call]
    for key, value in totals.items():
        file.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    num_used = file._used
    file.close()  # type: ignore[no-untyped-call]
    os.truncate(new, num_used)
    os.replace(new, _complete_sum(directory, kind))
    _replace_sum(directory, kind)


def _replace_sum(directory: Path, kind: str) -> None:
    """Replace the old sum of dead workers' files by a new one that is complete.

    First removes the files that it includes. Does nothing if there is no new sum.
    """
    complete = _complete_sum(directory, kind)
    if complete.exists():
        for path in _renamed(directory, kind):
            path.unlink()
        os.replace(complete, directory / f"{kind}_{_SUM}.db")


def create_claimed_file(path: Path, num_bytes: int) -> None:
    """Create a file of zeros with all its disk blocks allocated.

    If that fails, raises OSError and leaves no file.
    """
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            os.truncate(file.fileno(), num_bytes)
        claim_space(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _has_size(path: Path) -> bool:
    with suppress(FileNotFoundError):  # the worker died just now
        return path.stat().st_size > 0
    return False
