"""Times the parts of real training steps while Lightning's trainer runs them.

At the end of each part the clock adds the time since the previous end to this part. So the parts
add up to the step. In synchronised rounds on a GPU the clock also waits for the device at the end
of each part. This prevents overlap, so the whole step is timed in other rounds. With DDP, the time
of communication is the time of a backward pass with communication minus that of one without. With
DeepSpeed, it is the time inside the collectives. Both include waiting for the slowest process.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from torch.nn.parallel import DistributedDataParallel

from slipway.system.contract import Contract
from slipway.training.telemetry.telemetry import NEXT_BATCH

Part = Literal["data", "copy", "forward", "backward", "communication", "optimizer", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
_TRAINING_STEP = ".training_step"  # ends "[Strategy]SingleDeviceStrategy.training_step"
_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
)


class Round(Contract):
    """Mean times of several consecutive steps."""

    step_ms: float  # wall-clock time
    parts_ms: dict[Part, float]
    processor_ms: float  # processor time of all threads of the trainer, without loader processes
    queued_ms: float  # time that the trainer's threads waited for a free core, summed
    row_length: float  # mean length of the inputs' second axis, such as tokens with padding
    gpu_peak_bytes: int = 0  # most memory of tensors on the GPU so far; 0 on a CPU


class RoundRequest(Contract):
    """Settings of the next round of steps to measure."""

    num_steps: int
    synchronised: bool = False  # the clock waits for the device at the end of each part
    # False for DDP only: each process keeps its own gradients, so the weights diverge.
    communicates: bool = True


class Clock:
    """Attributes the time since its last call to the part of the step that has just ended."""

    def __init__(self) -> None:
        self._wait_for_device: Callable[[], None] | None = None
        self.start(None)

    def start(self, wait_for_device: Callable[[], None] | None) -> None:
        """Begin a round with all times at 0; each `end` first calls `wait_for_device`, if given."""
        self._wait_for_device = wait_for_device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._queued_begin = queued_seconds()
        self._begin = self._last = time.perf_counter()
        self._processor_begin = self._last_processor = time.process_time()

    def end(self, part: Part) -> None:
        """Add the time since the last call to `part`, which ends now."""
        if self._wait_for_device is not None:
            self._wait_for_device()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last, self._last_processor = now, time.process_time()

    def round(self, num_steps: int, row_length: float) -> Round:
        """Return the mean times of a step since `start`."""
        scale = 1000 / num_steps
        return Round(
            step_ms=(self._last - self._begin) * scale,
            parts_ms={part: seconds * scale for part, seconds in self.seconds.items()},
            processor_ms=(self._last_processor - self._processor_begin) * scale,
            queued_ms=(queued_seconds() - self._queued_begin) * scale,
            row_length=row_length,
            gpu_peak_bytes=torch.cuda.max_memory_allocated(),
        )


def queued_seconds() -> float:
    """Return the seconds that this process's threads waited for a free core; 0 outside Linux.

    The value is the second number of /proc/PID/task/TID/schedstat, in nanoseconds (Linux:
    Documentation/scheduler/sched-stats.rst).
    """
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has just ended
            continue
    return total / 1e9


class PartProfiler(Profiler):
    """Tells the clock when Lightning has ended a part of a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def start(self, action_name: str) -> None:
        if action_name == NEXT_BATCH or action_name.endswith(_TRAINING_STEP):
            self._clock.end("other")

    def stop(self, action_name: str) -> None:
        if action_name == NEXT_BATCH:
            self._clock.end("data")
        elif action_name.endswith(_TRAINING_STEP):
            self._clock.end("forward")


class StepTimer(pl.Callback):
    """Times rounds of optimizer steps.

    Args:
        num_skipped: untimed steps at the start of a round, whose batches were prefetched.
        next_request: called before each round; waits for its settings.
        report: called with each round.
    """

    def __init__(
        self,
        clock: Clock,
        num_skipped: int,
        next_request: Callable[[], RoundRequest],
        report: Callable[[Round], None],
    ) -> None:
        self._clock = clock
        self._num_skipped = num_skipped
        self._next_request = next_request
        self._report = report
        self._request = RoundRequest(num_steps=1)
        self._first_step = self._last_step = 0
        self._active: Part = "other"
        self._row_lengths: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            _wrap_method(
                trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._time_collective
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            from deepspeed.comm import comm

            for name in _COLLECTIVES:
                _wrap_method(comm.cdb, name, self._time_collective)
        self._begin(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.end("copy")
        self._active = "forward"
        if isinstance(trainer.strategy, DDPStrategy) and not isinstance(
            trainer.strategy, DeepSpeedStrategy
        ):
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            trainer.strategy.model.require_backward_grad_sync = self._request.communicates

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        self._clock.end("optimizer")  # the optimizer's part includes freeing old gradients
        self._active = "backward"

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.end("backward")
        self._active = "optimizer"

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._clock.end("optimizer")
        self._active = "other"
        self._row_lengths.append(batch.inputs.shape[1])
        if trainer.global_step == self._last_step:  # gradients are still accumulated
            return
        self._last_step = trainer.global_step
        done = self._last_step - self._first_step
        if done == self._request.num_steps + self._num_skipped:
            self._finish(trainer)
            self._begin(trainer)
        elif done == self._num_skipped:
            self._start_clock(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        self._request = self._next_request()
        self._first_step = trainer.global_step
        self._start_clock(trainer)

    def _start_clock(self, trainer: pl.Trainer) -> None:
        wait = partial(_wait_for_device, trainer)
        wait()
        self._row_lengths = []
        self._clock.start(wait if self._request.synchronised else None)

    def _finish(self, trainer: pl.Trainer) -> None:
        _wait_for_device(trainer)
        self._clock.end("other")
        row_length = sum(self._row_lengths) / len(self._row_lengths)
        self._report(self._clock.round(self._request.num_steps, row_length))

    def _time_collective(self, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run a collective operation and wait until it ends, so that nothing overlaps with it."""
        if not self._request.synchronised:
            return plain(*arguments, **named)
        self._clock.end(self._active)
        answer = plain(*arguments, **named)
        if hasattr(answer, "wait"):
            answer.wait()
        self._clock.end("communication")
        return answer


def _wait_for_device(trainer: pl.Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    plain = getattr(owner, name, None)
    if plain is not None:
        setattr(owner, name, lambda *arguments, **named: wrapper(plain, *arguments, **named))
