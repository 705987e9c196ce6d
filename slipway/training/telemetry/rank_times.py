"""Compares the processes of a training with each other, and names a slow or hanging one.

All processes end a step together, so a slow one cannot be seen in the step time. Each process
therefore measures its own work: waiting for batches, and the forward passes of its layers. What
processes exchange in a forward pass comes before or after the call of a layer, so the time of the
layers has no waiting for others. Only a compiled network is measured as a whole: it calls no layer,
and exchanges nothing. Stages of a pipeline have different layers, so none is named as slow.

A hanging process leaves all others waiting in a collective operation until its timeout, half an
hour later. So each process counts the parts of steps that it has begun, and writes the count to a
file once it begins no other for minutes. The one with the lowest count hangs.
"""

import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.distributed.collectives import gather_objects
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.telemetry import DataWaitProfiler

SLOW_FACTOR = 1.5  # times the median of the other ranks
SLOW_ROUNDS = 3  # consecutive measurements
STALL_S = 300.0  # seconds without the start of another part of a step
_NUM_POLLS = 30  # number of polls in STALL_S
_GRACE = 0.2  # fraction of STALL_S in which the other ranks write their files


class RankTime(NamedTuple):
    """Milliseconds per step that one rank works, without waiting for other ranks."""

    host: str
    wait_ms: float  # mean wait for batches since the last measurement
    forward_ms: float  # of the layers, over all batches of the measured step

    @property
    def own_ms(self) -> float:
        return self.wait_ms + self.forward_ms


class SlowRankFinder:
    """Finds a rank that is slower than the others in several consecutive measurements."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._rounds = 0

    def add(self, times: list[RankTime]) -> str | None:
        """Add one measurement of all ranks; return a message if it shows a new slow rank."""
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
            f"for batches {wait_ms:,.1f} ms, its layers {forward_ms:,.1f} ms), the other ranks "
            f"{others:,.1f} ms (median), and they wait for it"
        )


class LayerTimes:
    """Adds up the time that the calls of a network's layers take, without what processes exchange.

    A layer is a module without children. The hooks of FSDP2, ZeRO-3 and tensor parallelism gather
    weights before a call, or add up outputs after it: outside of the measured time. A compiled
    network has no such hooks, and is measured as a whole.
    """

    def __init__(self, network: nn.Module) -> None:
        self._is_compiled = network._compiled_call_impl is not None
        self._layers = [module for module in network.modules() if not any(module.children())]
        self._handles: list[Any] = []
        self._began: Any = None  # mark at the start of the call that runs
        self._calls: list[tuple[Any, Any]] = []  # marks at the start and end of each call

    def start(self, *, from_zero: bool) -> None:
        """Measure all calls until `stop`; forget those before if `from_zero` is True."""
        self._calls = [] if from_zero else self._calls
        self._enter(None, ())
        for layer in [] if self._is_compiled else self._layers:
            # Before the later hook of the strategy, which was registered first.
            self._handles.append(layer.register_forward_hook(self._leave, prepend=True))
            self._handles.append(layer.register_forward_pre_hook(self._enter))

    def stop(self) -> None:
        if self._is_compiled:
            self._leave()
        while self._handles:
            self._handles.pop().remove()

    def seconds(self) -> float:
        """Return the seconds of all measured calls, after waiting for the GPU's queue."""
        if not torch.cuda.is_available():
            return float(sum(end - begin for begin, end in self._calls))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._calls)) / 1000

    def _enter(self, _: Any, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            if isinstance(value, AsyncCollectiveTensor):  # otherwise the layer waits for others
                value.trigger_wait()  # type: ignore[no-untyped-call]
        self._began = _mark()

    def _leave(self, *_: Any) -> None:
        self._calls.append((self._began, _mark()))


class RankTimes(pl.Callback):
    """Measures all ranks every `every` steps; rank 0 writes the times to the run log.

    Args:
        network: the network that is trained, compiled or not.
        can_be_slow: False if ranks have different layers, so that none is named as slow.
    """

    def __init__(
        self,
        network: nn.Module,
        every: int,
        num_accumulated: int,
        log: RunLog,
        profiler: DataWaitProfiler,
        *,
        can_be_slow: bool,
    ) -> None:
        self._every, self._num_accumulated = every, num_accumulated
        self._log, self._profiler = log, profiler
        self._finder = SlowRankFinder() if can_be_slow else None
        self._waited_s, self._measured_from = 0.0, 0
        self._layers = LayerTimes(network)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._waited_s, self._measured_from = self._profiler.waited_s, trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(trainer.global_step + 1):
            self._layers.start(from_zero=batch_idx % self._num_accumulated == 0)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
        if self._is_due(trainer.global_step + 1):
            self._layers.stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ends_step = (batch_idx + 1) % self._num_accumulated == 0
        steps = trainer.global_step - self._measured_from
        if not ends_step or steps < 1 or not self._is_due(trainer.global_step):
            return
        waited_ms = 1000 * (self._profiler.waited_s - self._waited_s) / steps
        own = RankTime(socket.gethostname(), waited_ms, 1000 * self._layers.seconds())
        self._waited_s, self._measured_from = self._profiler.waited_s, trainer.global_step
        times = gather_objects(own)
        if not trainer.is_global_zero:
            return
        slow = self._finder.add(times) if self._finder else None
        figures = [time._asdict() for time in times]
        self._log.write("ranks", step=trainer.global_step, ranks=figures, slow=slow)
        if slow:
            print(f"slow      {slow}", flush=True)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0


class StalledRank(Contract):
    """A process that has started no further part of a step for a long time."""

    host: str
    process: int
    count: int  # number of parts that the rank has begun
    part: str
    line: str  # line of code that its main thread runs


def describe_stall(stalled: Mapping[int, StalledRank], world_size: int, minutes: float) -> str:
    """Return a message that names the ranks for which the others wait.

    Args:
        stalled: stalled processes by rank. A rank that is missing here has stopped altogether.
    """
    missing = [str(rank) for rank in range(world_size) if rank not in stalled]
    fewest = min(each.count for each in stalled.values())
    behind = {rank: each for rank, each in stalled.items() if each.count == fewest}
    if missing:
        found = f"rank {', '.join(missing)} gives no sign of life, and the other ranks wait for it"
    else:
        named = [
            f"rank {rank} on {each.host} (process {each.process}) in {each.part}, at {each.line}"
            for rank, each in behind.items()
        ]
        waiting = "the other ranks wait for it" if len(behind) < world_size else "no rank is ahead"
        found = f"{'; '.join(named)}; {waiting}"
    return (
        f"no step has ended for {minutes:.0f} minutes: {found}. If that does not end, stop the "
        "training by two Ctrl-C and run the same command again: it resumes from its newest "
        "checkpoint."
    )


class StallWatch(pl.Callback):
    """Names the hanging rank once, if no part of a step has started for `limit_s` seconds.

    Args:
        folder: a folder that all nodes share.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._ended = threading.Event()
        self._count, self._part, self._begin = 0, "the start", time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._begin = time.monotonic()
        arguments = trainer.global_rank, trainer.world_size
        threading.Thread(target=self._watch, args=arguments, daemon=True).start()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._enter(f"waiting for the batch of step {trainer.global_step + 1}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._enter(f"the forward pass of step {trainer.global_step + 1}")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
        self._enter(f"the backward pass of step {trainer.global_step + 1}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._enter(f"the optimizer in step {trainer.global_step + 1}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._enter(f"a checkpoint or waiting for a batch after step {trainer.global_step}")

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter(f"the validation after step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._enter(f"the end of the epoch after step {trainer.global_step}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._ended.set()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._ended.set()

    def _enter(self, part: str) -> None:
        self._count, self._part, self._begin = self._count + 1, part, time.monotonic()

    def _watch(self, rank: int, world_size: int) -> None:
        """Write a file while this rank stalls; the lowest stalled rank names the hanging ones."""
        own, is_named = self._folder / str(rank), False
        while not self._ended.wait(self._limit_s / _NUM_POLLS):
            idle_s = time.monotonic() - self._begin
            if idle_s < self._limit_s:
                is_named = False
                continue
            try:
                files.write_text(own, self._describe().model_dump_json())
                stalled = self._stalled(own)
            except OSError:  # such as a full disk: the next poll tries again
                continue
            if not is_named and idle_s > (1 + _GRACE) * self._limit_s:
                is_named = True
                if rank == min(stalled):
                    text = describe_stall(stalled, world_size, idle_s / 60)
                    print(f"stalled   {text}", flush=True)

    def _describe(self) -> StalledRank:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        line = traceback.extract_stack(frame)[-1]
        return StalledRank(
            host=socket.gethostname(),
            process=os.getpid(),
            count=self._count,
            part=self._part,
            line=f"{line.filename}:{line.lineno} in {line.name}",
        )

    def _stalled(self, own: Path) -> dict[int, StalledRank]:
        """Return the stalled ranks whose files are as recent as the file of this rank.

        Times are those of the file system, because the clocks of nodes may differ.
        """
        oldest = own.stat().st_mtime - _GRACE * self._limit_s
        return {
            int(path.name): StalledRank.model_validate_json(path.read_bytes())
            for path in self._folder.iterdir()
            if path.name.isdigit() and path.stat().st_mtime >= oldest
        }


def _mark() -> Any:
    """Return the present time in seconds, or an event in the queue of the GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
