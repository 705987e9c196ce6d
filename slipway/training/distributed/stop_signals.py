"""Signals that stop a training: all processes finish their step, save a checkpoint and exit.

SIGTERM ends with exit code 143 and Ctrl-C with 130. SIGUSR1, which Slurm sends before the time
limit, ends with 138 after the job was requeued. A second signal ends a process at once.

A search pauses a training at the end of an epoch, through the environment variable
TRAIN_PAUSE_AFTER_EPOCH. The process then exits with code 75; a start without the variable resumes
it. The variable is not in params.yaml, because the learning-rate schedule, and so the weights, stay
those of the whole training.
"""

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

from slipway.system.errors import UnavailableError

# Not SLIPWAY_...: such variables belong to the service, which refuses unknown ones.
PAUSE = "TRAIN_PAUSE_AFTER_EPOCH"
PAUSED = 75  # EX_TEMPFAIL of sysexits.h: not finished, run it again
SAVE = 1  # a request to save and go on; all other requests are signal numbers, which are greater
SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)


class Stopped(SystemExit):
    """Exits with 128 plus the signal's number, as shells do, after a checkpoint was saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Paused(SystemExit):
    """Exits with 75 after the checkpoint of the requested epoch was saved."""

    def __init__(self, epoch: int) -> None:
        super().__init__(PAUSED)
        self.epoch = epoch


def pause_epoch() -> int | None:
    """Return the epoch after which this training pauses, or None."""
    text = os.environ.get(PAUSE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UnavailableError(
            f"the environment variable {PAUSE} is {text!r}, expected the number of an epoch, such "
            f"as 5. `slipway search` sets it; run `unset {PAUSE}`."
        )
    return int(text)


class StopSignals:
    """Records the first stop signal between `listen` and `release`."""

    def __init__(self) -> None:
        self.received = 0

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._record)

    def release(self) -> None:
        """Restore the default behaviour: each signal ends the process."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number


def ignore_signals_in_worker(_worker: int) -> None:
    """Make a loader process ignore stop signals from any process but its trainer (Linux only).

    A signal to all processes of a job would end the loaders, which the trainer needs until it has
    saved. The trainer ends them with SIGTERM itself.
    """
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_exit_on_signal_from, args=(os.getppid(),), daemon=True).start()


def _exit_on_signal_from(parent: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != parent:
        pass
    os._exit(0)


def requeue() -> str | None:
    """Requeue this Slurm job and return the outcome as text; None outside Slurm."""
    job, array = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not job:
        return None
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"scontrol requeue {job} could not be run: {error}"
    result = "done" if done.returncode == 0 else f"failed: {done.stderr.strip()}"
    return f"scontrol requeue {job} {result}"
