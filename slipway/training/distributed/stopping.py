"""Signals that ask a training to stop: all its processes save together after the step they are in, and end.

SIGTERM ends with exit code 143 and Ctrl-C with 130. SIGUSR1, which Slurm sends before the time is up, ends with 138 after it has
put the job back into the queue. A second signal ends a process at once, as it would have without this.
"""

import os
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import distributed

SAVE = 1  # a request to save and go on; the others are numbers of signals, all of which are greater
SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)


class Stopped(SystemExit):
    """Ends the process with 128 + the signal, as a shell reports it; everything is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Signals:
    """Takes note of the first signal."""

    def __init__(self) -> None:
        self.received = 0

    def listen(self) -> None:
        """From now on; before it, and after `release`, they do what they always do."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def release(self) -> None:
        """Each signal ends the process again."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number


def heed_trainer_alone(_worker: int) -> None:
    """For the loader's processes: where a signal goes to all processes of a job, the trainer needs them until it has saved.

    It ends them with SIGTERM itself, which is why they tell senders apart. On Linux alone.
    """
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != parent:
        pass
    os._exit(0)


class Agreement:
    """What any process was asked for, known to all. On the CPU, so that no GPU has to come to rest for it."""

    def __init__(self) -> None:
        self._group: Any = None

    def highest(self, request: int) -> int:
        """The highest `request` of all processes. Every one has to call it."""
        if (
            not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() == 1
        ):
            return request
        if self._group is None and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(backend="gloo")
        highest = torch.tensor([request])
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self._group)
        return int(highest)


def requeue() -> str | None:
    """Put this Slurm job back into the queue, and say so; None where there is no Slurm."""
    job, array = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not job:
        return None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f"scontrol requeue {job} could not be run: {error}"
    return f"scontrol requeue {job} " + (
        "done" if done.returncode == 0 else f"failed: {done.stderr.strip()}"
    )
