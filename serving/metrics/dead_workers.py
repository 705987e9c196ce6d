"""What workers counted before they died, in one file of each kind.

prometheus_client keeps the files of every process that ever counted, and reads them all for each scrape: a worker that dies again and
again would make scrapes slower without end. So the files of dead workers are added up into one, the heir, and removed.

On a full disk, which has no room for the sum, the files stay as they are and are read, one by one.

A scraper may be killed between any two file operations, and nothing is then counted twice or lost. The dead's files are first renamed to
`.dead`, whereby they are no worker's any more. The heir's next content gets the name `.sum` when it is complete: from that moment on all
`.dead` files are in it, whether they have been removed yet or not. Whoever reads next goes on from there.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from serving.metrics.claimed_files import new_claimed_file
from slipway.system.files import is_alive

logger = logging.getLogger("bentoml.slipway")

KINDS = ("counter", "histogram")
_HEIR = 0  # in place of a process' number
_SPARE_BYTES = 4096  # in the sum's file, beyond what is added up
_LOCK = "dead_workers.lock"
_has_failed = False  # the last time


@contextmanager
def settled(directory: Path) -> Iterator[None]:
    """The files of the workers, those of the dead added up, and none removed meanwhile. Any thread of any worker may ask for it."""
    with (directory / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with _complaining_once():
            while any(_is_to_do(directory, kind) for kind in KINDS):
                fcntl.flock(lock, fcntl.LOCK_EX)
                for kind in KINDS:
                    _add_up(directory, kind)
                fcntl.flock(lock, fcntl.LOCK_SH)  # others may come between, and die there
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def _complaining_once() -> Iterator[None]:
    global _has_failed
    try:
        yield
    except OSError as error:
        if not _has_failed:
            logger.error(
                "what dead workers counted is not added up, which makes scrapes slower: %s", error
            )
        _has_failed = True
    else:
        _has_failed = False


class WorkersCollector(MultiProcessCollector):
    """All files of a folder, but for those that a worker has made and not yet given a size: prometheus_client cannot read these."""

    def __init__(self, directory: Path) -> None:
        super().__init__(None, str(directory))  # type: ignore[no-untyped-call]  # it has no types
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        """The metrics, summed over the workers."""
        files = [str(path) for path in self._directory.glob("*.db") if _has_size(path)]
        metrics: Iterable[Metric] = self.merge(files, accumulate=True)  # type: ignore[no-untyped-call]
        return metrics


def _has_size(path: Path) -> bool:
    with suppress(FileNotFoundError):  # gauges of a worker that died just now
        return path.stat().st_size > 0
    return False


def _is_to_do(directory: Path, kind: str) -> bool:
    return (
        bool(_of_the_dead(directory, kind) or _taken(directory, kind))
        or _sum(directory, kind).exists()
    )


def _of_the_dead(directory: Path, kind: str) -> list[Path]:
    numbers = {path: int(path.stem.rpartition("_")[2]) for path in directory.glob(f"{kind}_*.db")}
    return [path for path, number in numbers.items() if number != _HEIR and not is_alive(number)]


def _taken(directory: Path, kind: str) -> list[Path]:
    return list(directory.glob(f"{kind}_*.dead"))


def _sum(directory: Path, kind: str) -> Path:
    return directory / f"{kind}_{_HEIR}.sum"


def _add_up(directory: Path, kind: str) -> None:
    _hand_over(directory, kind)  # what a killed scraper had added up
    heir = _heir(directory, kind)
    new = heir.with_suffix(".new")
    dying = _of_the_dead(directory, kind)
    found = [*dying, *_taken(directory, kind)]
    if not found:
        return  # another worker was first
    # A full disk is an OSError here, before anything is taken, and no SIGBUS later. All of them have room in it.
    new_claimed_file(
        new, sum(path.stat().st_size for path in (*found, heir) if path.exists()) + _SPARE_BYTES
    )
    for path in dying:
        path.rename(
            path.with_name(f"{path.stem}_{time.time_ns()}.dead")
        )  # a process may get the number of one that was taken before
    dead = _taken(directory, kind)
    totals: dict[str, float] = {}
    for path in filter(
        _has_size, [*dead, heir]
    ):  # a worker may die between making its file and giving it a size
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]  # it has no types
            totals[key] = totals.get(key, 0.0) + value
    file = MmapedDict(str(new))  # type: ignore[no-untyped-call]
    for key, value in totals.items():
        file.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    used = file._used
    file.close()  # type: ignore[no-untyped-call]
    os.truncate(new, used)
    os.replace(new, _sum(directory, kind))
    _hand_over(directory, kind)


def _hand_over(directory: Path, kind: str) -> None:
    """Let a complete sum take the heir's place, without what is in it."""
    if _sum(directory, kind).exists():
        for path in _taken(directory, kind):
            path.unlink()
        os.replace(_sum(directory, kind), _heir(directory, kind))


def _heir(directory: Path, kind: str) -> Path:
    return directory / f"{kind}_{_HEIR}.db"
