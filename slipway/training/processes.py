"""The processes of one training: which is the first, and that none outlives the others.

Where one ends, gloo tells the others at once, but nccl leaves them waiting in a collective for up to
half an hour, each holding its GPU.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_SECONDS_BETWEEN_LOOKS = 0.5


def is_first_process() -> bool:
    """Whether this is rank 0, which is known before the trainer is: every launcher gives it zeros, or nothing."""
    return all(int(os.environ.get(name) or 0) == 0 for name in _RANKS)


def process_rank() -> int:
    """The number of this process among all, as its launcher says before the trainer is there; Lightning's does so on one node."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0)


def was_started_by_another() -> bool:
    """Whether a launcher (the trainer itself, torchrun) made this process, and not a person's shell."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, even when that is killed."""
    threading.Thread(target=_leave_after, args=(os.getppid(),), daemon=True).start()


@contextmanager
def ended_together(trainer: pl.Trainer) -> Iterator[None]:
    """End the processes that `trainer` started when the block raises; Lightning itself does so for Ctrl-C alone."""
    try:
        yield
    except BaseException:
        for child in getattr(trainer.strategy.launcher, "procs", []):
            child.kill()
        raise


def end_at_once_on_sigterm() -> None:
    """SIGTERM ends this process as any other, which a shell reports as 143. A save is whole at any moment, so nothing is lost.

    Lightning 2.6 would take note of it, go on to the end of the step, and exit with 0 as a finished training does;
    several processes then wait for each other forever (seen).
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
