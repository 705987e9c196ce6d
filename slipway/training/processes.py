"""The processes of one training: which is the first, and that none outlives the others.

Where one ends, gloo tells the others at once, but nccl leaves them waiting in a collective for up to
half an hour, each holding its GPU.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_SECONDS_BETWEEN_LOOKS = 0.5


def is_first_process() -> bool:
    """Whether this is rank 0, which is known before the trainer is: every launcher gives it zeros, or nothing."""
    return all(int(os.environ.get(name) or 0) == 0 for name in _RANKS)


def was_started_by_another() -> bool:
    """Whether a launcher (the trainer itself, torchrun) made this process, and not a person's shell."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, even when that is killed."""
    threading.Thread(target=_leave_after, args=(os.getppid(),), daemon=True).start()


@contextmanager
def ended_together(trainer: pl.Trainer) -> Iterator[None]:
    """End the processes that `trainer` started when the block raises; Lightning itself does so for Ctrl-C alone.

    After SIGTERM the exit code is 143, as of any other program: Lightning's would be 0, that of a finished training.
    """
    try:
        yield
    except BaseException as error:
        for child in getattr(trainer.strategy.launcher, "procs", []):
            child.kill()
        if isinstance(error, SIGTERMException) or trainer.received_sigterm:  # one rank's end is another's broken connection
            print("ended by SIGTERM. Run the same command again; it goes on after the newest save.", file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
        raise


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
