"""The processes of one training: which is the first, that none outlives the others, and that the cause is told once.

Where one ends, gloo tells the others at once, but nccl leaves them waiting in a collective for up to
half an hour, each holding its GPU. So the first process watches those that it started. Whoever only notices that another one is
gone keeps still for a while: the cause is told by the process that failed or, of a killed one, by what started it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
from pytorch_lightning.strategies.launchers import subprocess_script

from slipway.system.errors import SlipwayError
from slipway.training.distributed.faults import explained, is_lost_peer
from slipway.training.distributed.launchers import find_launch
from slipway.training.distributed.stopping import SIGNALS, Stopped

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_THE_FIRST = (
    1.5  # in which rank 0 tells what all ranks found at once, like a loss that is not finite
)
_SECONDS_FOR_THE_CAUSE = 5.0  # in which what knows the cause ends this process
_SECONDS_TO_END = 30.0
_NO_FAULT = {
    None,
    0,
    *(128 + number for number in SIGNALS),
}  # of a rank: it runs, is done, or was asked to stop like all


def is_first_process() -> bool:
    """Whether this is rank 0, which is known before the trainer is."""
    launch = find_launch()
    return launch.rank == 0 if launch else int(os.environ.get("LOCAL_RANK") or 0) == 0


def process_rank() -> int:
    """The number of this process among all, as its launcher says before the trainer is there; Lightning's does so on one node."""
    return int(
        os.environ.get("RANK")
        or os.environ.get("SLURM_PROCID")
        or os.environ.get("LOCAL_RANK")
        or 0
    )


def was_started_by_another() -> bool:
    """Whether a launcher (the trainer itself, torchrun) made this process, and not a person's shell."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, even when that is killed."""
    threading.Thread(target=_leave_after, args=(os.getppid(),), daemon=True).start()


@contextmanager
def ended_together(trainer: pl.Trainer) -> Iterator[None]:
    """End the processes that `trainer` starts when the block raises or one of them fails, and say which it was.

    In place of Lightning's observer, which looks every 5 seconds and then kills without a word. Where all of them stop together
    they end by themselves, and get a while for it.
    """
    watch = _Watch()
    setattr(subprocess_script, "_launch_process_observer", watch.start)  # noqa: B010
    try:
        with told_once(trainer.global_rank, trainer.world_size):
            yield
    except Stopped:
        watch.stop()
        _end(_started_by(trainer), _SECONDS_TO_END)
        raise
    except BaseException:
        watch.stop()
        _end(_started_by(trainer), 0)
        raise
    watch.stop()


@contextmanager
def told_once(rank: int, world_size: int) -> Iterator[None]:
    """An error of the block, told by one rank alone and with its number; what the machine refused in one line."""
    try:
        yield
    except Exception as error:
        if is_lost_peer(error):
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        elif rank:
            time.sleep(_SECONDS_FOR_THE_FIRST)
        clear = explained(error, f"rank {rank}" if world_size > 1 else "the training")
        if clear is not error:
            raise clear from error
        if world_size > 1 and (rank or not isinstance(error, SlipwayError)):
            error.add_note(f"(rank {rank} of {world_size})")
        raise


def started_as() -> tuple[int, int]:
    """Rank and number of processes as the launcher gives them; before the trainer has started others, the first is alone."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0), int(
        os.environ.get("WORLD_SIZE") or 1
    )


class _Watch:
    """Looks after started ranks in a thread, since the main one may wait for them in a collective."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def start(self, processes: list[subprocess.Popen[bytes]]) -> None:
        threading.Thread(target=self._look, args=(processes,), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _look(self, processes: list[subprocess.Popen[bytes]]) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_LOOKS / 2):
            failed = [
                (index, process)
                for index, process in enumerate(processes, start=1)
                if process.poll() not in _NO_FAULT
            ]
            if failed and not self._stopped.wait(
                _SECONDS_BETWEEN_LOOKS
            ):  # at Ctrl-C all end at once, and the main thread stops this
                _end_because_of(*failed[0], processes)


def _end_because_of(
    local_rank: int, failed: subprocess.Popen[bytes], processes: list[subprocess.Popen[bytes]]
) -> None:
    code = failed.returncode
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        hint = (
            ". Unless somebody did it, the system had no memory left: see its log (dmesg)"
            if code == -signal.SIGKILL
            else ""
        )
    else:
        how, hint = f"ended with exit code {code}", ", for the reason above"
    print(
        f"\nerror: rank {started_as()[0] + local_rank} (process {failed.pid}) {how}{hint}. All others were ended.",
        file=sys.stderr,
        flush=True,
    )
    for process in processes:
        process.kill()
    sys.stdout.flush()
    os._exit(1)


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
    if int(os.environ.get("LOCAL_RANK") or 0) == 1:  # one is enough to tell
        print(
            f"\nerror: rank 0 (process {parent}) is gone without a word, so it was killed. All others end.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(1)
