"""Splits real training steps into their parts while the real trainer makes them.

A clock that is told whenever a part ends gives all time since the last word to that part, so the parts add up to the step. On
a GPU the clock waits for the device at each word, in rounds that ask for it: work that would overlap then does not, so the
whole step is timed in other rounds, without. Communication under DDP is what a backward pass with it takes longer than one
without; under DeepSpeed the time inside its collectives. Both include waiting for the slowest process.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from slipway.doctor.machine import queued_seconds
from slipway.system.contract import Contract

Part = Literal["data", "copy", "forward", "backward", "communication", "optimizer", "other"]
PARTS: tuple[Part, ...] = (
    "data",
    "copy",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "other",
)
MEANINGS: dict[Part, str] = {
    "data": "waiting for the next batch",
    "copy": "host to device",
    "forward": "augmentation on the device, network and loss",
    "backward": "gradients",
    "communication": "between processes, with waiting for the slowest",
    "optimizer": "clipping, weights and learning rate",
    "other": "the loop around it, and the ends of epochs",
}
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
    """The mean step of some steps in a row."""

    step_ms: float  # wall clock
    parts_ms: dict[Part, float]
    processor_ms: float  # of all threads of the trainer's process, without its loader processes
    data_processor_ms: float  # of it, in the data part
    queued_ms: (
        float  # of all its threads together, standing in line for a core that other work used
    )


class Order(Contract):
    """What a round is to be like."""

    num_steps: int
    synchronised: bool  # the clock waits for the device at the end of each part
    communicates: bool  # false, for DDP alone: every process keeps its own gradients, so its weights are of no use afterwards


_NO_ORDER = Order(num_steps=1, synchronised=False, communicates=True)


class Clock:
    """Gives the time since it was last told of to the part that has ended."""

    def __init__(self) -> None:
        self._wait_for_device: Callable[[], None] | None = None
        self.start(None)

    def start(self, wait_for_device: Callable[[], None] | None) -> None:
        """Begin a round from zero."""
        self._wait_for_device = wait_for_device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.data_processor_seconds = 0.0
        self._queued = queued_seconds()
        self._last, self._last_processor = self._begin = time.perf_counter(), time.process_time()

    def ended(self, part: Part) -> None:
        """A part ends now."""
        if self._wait_for_device is not None:
            self._wait_for_device()
        now, processor = time.perf_counter(), time.process_time()
        self.seconds[part] += now - self._last
        if part == "data":
            self.data_processor_seconds += processor - self._last_processor
        self._last, self._last_processor = now, processor

    def round(self, num_steps: int) -> Round:
        """The mean step since the start."""
        each = 1000 / num_steps
        return Round(
            step_ms=(self._last - self._begin[0]) * each,
            parts_ms={part: seconds * each for part, seconds in self.seconds.items()},
            processor_ms=(self._last_processor - self._begin[1]) * each,
            data_processor_ms=self.data_processor_seconds * each,
            queued_ms=(queued_seconds() - self._queued) * each,
        )


class WatchedLoader:
    """A loader that tells the clock how long its batches were waited for."""

    def __init__(self, loader: DataLoader[Any], clock: Clock) -> None:
        self._loader, self._clock = loader, clock
        self.sampler = loader.sampler  # the trainer sets its epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._clock.ended("other")
        batches = iter(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._clock.ended("data")
            yield batch
            self._clock.ended("other")


class StepTimer(pl.Callback):
    """Times rounds of optimizer steps; `next_order` is asked between rounds, and None ends the training.

    The first `num_skipped` steps of a round are not timed: their batches were made ready while the trainer waited.
    """

    def __init__(
        self,
        clock: Clock,
        num_skipped: int,
        next_order: Callable[[], Order | None],
        tell: Callable[[Round], None],
    ) -> None:
        self._clock, self._next_order, self._tell, self._num_skipped = (
            clock,
            next_order,
            tell,
            num_skipped,
        )
        self._order = _NO_ORDER
        self._begun_at = self._last_step = 0
        self._active: Part = "other"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch_forward(pl_module)
        if trainer.world_size > 1:
            _watch(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._collective)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            from deepspeed.comm import comm

            for name in _COLLECTIVES:
                _watch(comm.cdb, name, self._collective)
        self._begin(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.ended("copy")
        if isinstance(trainer.strategy, DDPStrategy) and not isinstance(
            trainer.strategy, DeepSpeedStrategy
        ):
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            trainer.strategy.model.require_backward_grad_sync = self._order.communicates

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        self._clock.ended("optimizer")  # old gradients are dropped here
        self._active = "backward"

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.ended("backward")
        self._active = "optimizer"

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._clock.ended("optimizer")
        self._active = "other"
        if trainer.global_step == self._last_step:
            return  # the batch was accumulated
        self._last_step = trainer.global_step
        done = self._last_step - self._begun_at
        if done == self._order.num_steps + self._num_skipped:
            self._finish(trainer)
            self._begin(trainer)
        elif done == self._num_skipped:
            self._start_clock(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        order = self._next_order()
        trainer.should_stop = order is None
        self._order = order or _NO_ORDER
        self._begun_at = trainer.global_step
        self._start_clock(trainer)

    def _start_clock(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(device)
        self._clock.start(
            (lambda: torch.cuda.synchronize(device))
            if on_gpu and self._order.synchronised
            else None
        )

    def _finish(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._clock.ended("other")
        self._tell(self._clock.round(self._order.num_steps))

    def _watch_forward(self, pl_module: pl.LightningModule) -> None:
        plain = pl_module.training_step

        def timed(*arguments: Any, **named: Any) -> Any:
            self._clock.ended("other")
            self._active = "forward"
            answer = plain(*arguments, **named)
            self._clock.ended("forward")
            return answer

        pl_module.training_step = timed  # type: ignore[method-assign]

    def _collective(self, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A collective at once and to its end: what it would overlap with waits."""
        if not self._order.synchronised:
            return plain(*arguments, **named)
        self._clock.ended(self._active)
        answer = plain(*arguments, **named)
        if hasattr(answer, "wait"):
            answer.wait()
        self._clock.ended("communication")
        return answer


def _watch(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    plain = getattr(owner, name, None)
    if plain is not None:
        setattr(owner, name, lambda *arguments, **named: wrapper(plain, *arguments, **named))
