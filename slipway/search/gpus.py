"""Reserves GPUs for the trials of a search by file locks, one trial at a time for each GPU.

The locks are outside the project, so that searches of several projects can share a machine. The
training inherits the lock, so a GPU is free again when the last process that uses it has ended.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from slipway.runtimes.runtime import why_no_cuda_driver
from slipway.search.locks import try_lock

VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.5


@dataclass(frozen=True)
class ReservedGpus:
    """The GPUs that are reserved for one trial; empty if the training chooses its devices."""

    names: Sequence[str] = ()
    locks: Sequence[int] = field(default=())  # file descriptors for its processes to inherit

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the trial's processes."""
        return {VISIBLE: ",".join(self.names)} if self.names else {}


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES."""
    if why_no_cuda_driver() is not None:
        return []
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def reserved_gpus(
    gpus: Sequence[str], count: int, stop: threading.Event
) -> Iterator[ReservedGpus | None]:
    """Wait until `count` of the GPUs are free, and reserve them for the `with` block.

    Yields None if `stop` is set first.
    """
    if not gpus:
        yield ReservedGpus()
        return
    while not stop.is_set():
        with ExitStack() as held:
            found: dict[str, IO[bytes]] = {}
            for name in gpus:
                if len(found) < count and (lock := try_lock(lock_path(name))):
                    found[name] = held.enter_context(lock)
            if len(found) == min(count, len(gpus)):
                yield ReservedGpus(list(found), [lock.fileno() for lock in found.values()])
                return
        stop.wait(_POLL_S)
    yield None


def lock_path(name: str) -> Path:
    """Return the path of a GPU's lock.

    Slurm numbers GPUs within a job, so the path then contains the job's number.
    """
    job = os.environ.get("SLURM_JOB_ID", "machine")
    folder = Path(tempfile.gettempdir()) / f"slipway-gpus-{os.getuid()}-{job}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{name}.lock"
