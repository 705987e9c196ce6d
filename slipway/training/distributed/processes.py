"""Ends the processes of one training together, and lets only one of them report the error.

When one process ends, gloo tells the others at once, but nccl leaves them waiting in a collective
for up to half an hour, each holding its GPU. So rank 0 watches the processes that it started. A
rank that only notices a lost connection stays quiet for a while, because the process that failed,
or the parent of a killed one, reports the cause.
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

from slipway.system.errors import SlipwayError, UnavailableError
from slipway.training.distributed.faults import explain, is_lost_rank
from slipway.training.distributed.launchers import find_launch
from slipway.training.distributed.stop_signals import PAUSED, SIGNALS, Paused, Stopped

_POLL_S = 0.5
_RANK_0_HEAD_START_S = 1.5  # rank 0 then reports an error that all ranks find at once
_WAIT_FOR_CAUSE_S = 5.0  # time in which the reporter of the cause ends this process
_GRACE_S = 30.0
# Exit codes of a rank that still runs, has finished, or was asked to stop like all others.
_EXPECTED_CODES = {None, 0, PAUSED, *(128 + number for number in SIGNALS)}


def is_first_process() -> bool:
    """Return True on rank 0. It needs no trainer."""
    return launched_rank()[0] == 0


def was_started_by_another() -> bool:
    """Return True if this process was started by the trainer or torchrun: LOCAL_RANK is above 0."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0


def end_with_parent() -> None:
    """Make this process end as soon as its parent ends, even if the parent is killed."""
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()


@contextmanager
def terminate_ranks_together(trainer: pl.Trainer) -> Iterator[None]:
    """End the processes that `trainer` started if the block raises an error or a process fails.

    Replaces Lightning's observer, which polls every 5 seconds and kills without a message. Ranks
    that were asked to stop end by themselves within a grace period.
    """
    watch = _RankWatch()
    setattr(subprocess_script, "_launch_process_observer", watch.start)  # noqa: B010
    try:
        with report_error_once(trainer.global_rank, trainer.world_size):
            yield
    except BaseException as error:
        watch.stop()
        _end_ranks(trainer, _GRACE_S if isinstance(error, Stopped | Paused) else 0)
        raise
    watch.stop()


@contextmanager
def report_error_once(rank: int, world_size: int) -> Iterator[None]:
    """Let only one rank report an error raised in the block; the message names that rank."""
    try:
        yield
    except Exception as error:
        if is_lost_rank(error):
            time.sleep(_WAIT_FOR_CAUSE_S)
        elif rank:
            time.sleep(_RANK_0_HEAD_START_S)
        known = explain(error, f"rank {rank}" if world_size > 1 else "the training")
        if known is not error:
            raise known from error
        if world_size > 1 and (rank or not isinstance(error, SlipwayError)):
            error.add_note(f"(rank {rank} of {world_size})")
        raise


def launched_rank() -> tuple[int, int]:
    """Return rank and world size from the launcher's variables.

    Returns (0, 1) if the trainer has not started the other processes yet.
    """
    try:
        launch = find_launch()
    except UnavailableError:  # `place` reports it
        launch = None
    if launch:
        return launch.rank, launch.world_size
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    return rank, int(os.environ.get("WORLD_SIZE") or 1)


def disable_lightning_signals(trainer: pl.Trainer) -> None:
    """Keep `trainer` from handling signals.

    Lightning 2.6 would note SIGTERM, finish the step, and exit with 0 as a finished training does;
    several processes then wait for each other forever (seen). Under Slurm it would requeue with a
    checkpoint of its own.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


class _RankWatch:
    """Polls the started ranks from a thread, because the main thread may wait in a collective."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def start(self, processes: list[subprocess.Popen[bytes]]) -> None:
        threading.Thread(target=self._poll, args=(processes,), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _poll(self, processes: list[subprocess.Popen[bytes]]) -> None:
        while not self._stopped.wait(_POLL_S / 2):
            failed = [
                (local_rank, process)
                for local_rank, process in enumerate(processes, start=1)
                if process.poll() not in _EXPECTED_CODES
            ]
            # Ctrl-C ends all ranks at once; the main thread then stops this watch.
            if failed and not self._stopped.wait(_POLL_S):
                _exit_because_of(*failed[0], processes)


def _exit_because_of(
    local_rank: int, failed: subprocess.Popen[bytes], processes: list[subprocess.Popen[bytes]]
) -> None:
    """Report the rank that failed, then end all ranks and this process."""
    code = failed.returncode
    how = f"ended with exit code {code}, for the reason above"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ". Unless somebody did it, the system ran out of memory: see its log (dmesg)"
    rank = launched_rank()[0] + local_rank
    print(
        f"\nerror: rank {rank} (process {failed.pid}) {how}. All others were ended.",
        file=sys.stderr,
        flush=True,
    )
    for process in processes:
        process.kill()
    sys.stdout.flush()
    os._exit(1)


def _end_ranks(trainer: pl.Trainer, grace_s: float) -> None:
    """Kill the ranks started by `trainer` that have not ended after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    for process in getattr(trainer.strategy.launcher, "procs", []):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if int(os.environ.get("LOCAL_RANK") or 0) == 1:  # only one rank reports it
        print(
            f"\nerror: rank 0 (process {parent}) was killed. All others end.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(1)
