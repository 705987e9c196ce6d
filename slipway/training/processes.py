"""The processes of one training: which is the first, and that none outlives the others.

Where one ends, gloo tells the others at once, but nccl leaves them waiting in a collective for up to
half an hour, each holding its GPU.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl

from slipway.training.stopping import Stopped

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_END = 30.0


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

    Where all of them stop together they end by themselves, and get a while for it.
    """
    try:
        yield
    except Stopped:
        _end(_started_by(trainer), _SECONDS_TO_END)
        raise
    except BaseException:
        _end(_started_by(trainer), 0)
        raise


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """Let `trainer` have no say in signals.

    Lightning 2.6 would take note of SIGTERM, go on to the end of the step, and exit with 0 as a finished training does;
    several processes then wait for each other forever (seen). Under Slurm it would requeue with a checkpoint of its own.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def _started_by(trainer: pl.Trainer) -> list[subprocess.Popen[bytes]]:
    return list(getattr(trainer.strategy.launcher, "procs", []))


def _end(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
