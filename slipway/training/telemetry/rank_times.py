"""Compares the processes of a training with each other, and names a slow one.

All processes end a step together, so a slow one cannot be seen in the step time. Each process
therefore measures its own work: waiting for batches, and the forward pass. With FSDP and ZeRO-3 the
forward pass exchanges weights, so only the waiting can differ.
"""

import socket
import statistics
import time
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from slipway.training.distributed.collectives import gather_objects
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.telemetry import DataWaitProfiler

SLOW_FACTOR = 1.5  # times the median of the other ranks
SLOW_ROUNDS = 3  # measurements in a row


class RankTime(NamedTuple):
    """Milliseconds per step that a rank spends without waiting for other ranks."""

    host: str
    wait_ms: float  # for batches, mean since the last measurement
    forward_ms: float  # of all batches of the measured step

    @property
    def own_ms(self) -> float:
        return self.wait_ms + self.forward_ms


class SlowRankFinder:
    """Finds a rank that is slower than the others in several measurements in a row."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._rounds = 0

    def add(self, times: list[RankTime]) -> str | None:
        """Add one measurement of all ranks; return a message if a rank is newly found slow."""
        own = [time.own_ms for time in times]
        slowest = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:slowest] + own[slowest + 1 :])
        if own[slowest] <= SLOW_FACTOR * others:
            slowest = -1
        self._rounds = self._rounds + 1 if slowest == self._rank else 1
        self._rank = slowest
        if slowest < 0 or self._rounds != SLOW_ROUNDS:
            return None
        host, wait_ms, forward_ms = times[slowest]
        return (
            f"rank {slowest} on {host} takes {own[slowest]:,.1f} ms of a step by itself (waiting "
            f"for batches {wait_ms:,.1f} ms, forward pass {forward_ms:,.1f} ms), the other ranks "
            f"{others:,.1f} ms (median), and they wait for it"
        )


class RankTimes(pl.Callback):
    """Measures every rank each `every` steps; rank 0 writes the times to the run log."""

    def __init__(
        self, every: int, num_accumulated: int, log: RunLog, profiler: DataWaitProfiler
    ) -> None:
        self._every, self._num_accumulated = every, num_accumulated
        self._log, self._profiler = log, profiler
        self._finder = SlowRankFinder()
        self._waited_s, self._measured_from = 0.0, 0
        self._forward_s, self._began = 0.0, 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._waited_s, self._measured_from = self._profiler.waited_s, trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self._num_accumulated == 0:
            self._forward_s = 0.0
        if self._is_due(trainer.global_step + 1):
            self._began = _now()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
        if self._is_due(trainer.global_step + 1):
            self._forward_s += _now() - self._began

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ends_step = (batch_idx + 1) % self._num_accumulated == 0
        steps = trainer.global_step - self._measured_from
        if not ends_step or steps < 1 or not self._is_due(trainer.global_step):
            return
        waited_s = self._profiler.waited_s - self._waited_s
        own = RankTime(socket.gethostname(), 1000 * waited_s / steps, 1000 * self._forward_s)
        self._waited_s, self._measured_from = self._profiler.waited_s, trainer.global_step
        times = gather_objects(own)
        if not trainer.is_global_zero:
            return
        slow = self._finder.add(times)
        figures = [time._asdict() for time in times]
        self._log.write("ranks", step=trainer.global_step, ranks=figures, slow=slow)
        if slow:
            print(f"slow      {slow}", flush=True)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0


def _now() -> float:
    """Return the time in seconds, after waiting for all queued work of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
