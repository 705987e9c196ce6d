"""What workers counted before they died, in one file of each kind.

prometheus_client keeps the files of every process that ever counted, and reads them all for each scrape: a worker that dies again and
again would make scrapes slower without end. So the files of dead workers are added up into one, and removed.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from slipway.files import is_alive

KINDS = ("counter", "histogram")
_HEIR = 0  # in place of a process' number
_LOCK = "dead_workers.lock"


@contextmanager
def settled(directory: Path) -> Iterator[None]:
    """The files of the workers, those of the dead added up, and none removed meanwhile. Any thread of any worker may ask for it."""
    with (directory / _LOCK).open("w") as lock:
        if any(_of_the_dead(directory, kind) for kind in KINDS):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for kind in KINDS:
                _add_up(directory, kind)
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _of_the_dead(directory: Path, kind: str) -> list[Path]:
    numbers = {path: int(path.stem.rpartition("_")[2]) for path in directory.glob(f"{kind}_*.db")}
    return [path for path, number in numbers.items() if number != _HEIR and not is_alive(number)]


def _add_up(directory: Path, kind: str) -> None:
    dead, heir = _of_the_dead(directory, kind), directory / f"{kind}_{_HEIR}.db"
    if not dead:
        return  # another worker was first
    totals: dict[str, float] = {}
    for path in [*dead, *([heir] if heir.exists() else [])]:
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]  # it has no types
            totals[key] = totals.get(key, 0.0) + value
    new = heir.with_suffix(".new")
    new.unlink(missing_ok=True)
    file = MmapedDict(str(new))  # type: ignore[no-untyped-call]
    for key, value in totals.items():
        file.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    file.close()  # type: ignore[no-untyped-call]
    os.replace(new, heir)
    for path in dead:
        path.unlink()
