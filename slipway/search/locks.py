"""File locks (`flock`) between the processes of a search.

A child process that inherits the file descriptor also holds the lock. So if a search is killed and
its training lives on, the training keeps the locks of its trial and its folder until it ends.
"""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.2


class Interrupted(Exception):  # noqa: N818 - no fault
    """Raised if a signal stops the search."""


def try_lock(path: Path) -> IO[bytes] | None:
    """Lock a file and return it; None if another process has the lock. Closing it unlocks it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def held(path: Path, stop: threading.Event | None = None) -> Iterator[None]:
    """Wait for a lock, and hold it for the `with` block; Interrupted if `stop` is set first."""
    while (lock := try_lock(path)) is None:
        if (stop or threading.Event()).wait(_POLL_S):
            raise Interrupted
    with lock:
        yield
