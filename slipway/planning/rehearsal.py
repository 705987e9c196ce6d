"""A few real optimizer steps of this training in one process, outside the trainer and without a trace: for timing and tuning.

Batches, augmentation, network, loss, optimizer and precision are those of the training; communication between processes is not in it.
"""

import math
import statistics
import time
from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_

from slipway.config.sections import TrainParams
from slipway.system.errors import TrainingError
from slipway.training.assembly import prepare_process, training_batches, training_module
from slipway.training.batches.batches import Batch, StepShape
from slipway.training.distributed.strategies import Placement
from slipway.training.job import TrainingData, network_spec
from slipway.training.networks.initialization import initial_network


class Rehearsal:
    """A network, its optimizer and its batches on the device of `placement`, in steps of `shape`, which is of one process."""

    def __init__(
        self,
        seed: int,
        params: TrainParams,
        data: TrainingData,
        placement: Placement,
        shape: StepShape,
    ) -> None:
        self._params, self._shape, self._on_gpu = params, shape, placement.accelerator == "gpu"
        self.device = torch.device("cuda" if self._on_gpu else "cpu")
        network = initial_network(seed, params, network_spec(params, data.manifest))
        alone = _alone(placement)
        prepare_process(params, alone, network)
        self.batches = training_batches(data, shape, 0, seed, on_gpu=self._on_gpu)
        self.module = training_module(network, params, seed, data, self.batches).to(self.device)
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        self._half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(alone.precision)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._half == torch.float16)
        self.module.train()

    def step(self, index: int) -> float:
        """The optimizer step `index`, counted through all epochs; its mean loss. TrainingError if that is not finite."""
        losses = []
        for number in range(self._shape.num_accumulated):
            losses.append(
                self._backward(index * self._shape.num_accumulated + number, first=number == 0)
            )
        self._scaler.unscale_(self.optimizer)
        if self._params.gradient_clip_norm:
            clip_grad_norm_(self.module.parameters(), self._params.gradient_clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.module.nonfinite_guard.discard()
        loss = statistics.fmean(losses)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} in step {index + 1}")
        return loss

    def _backward(self, index: int, *, first: bool) -> float:
        """In the order of Lightning, which frees the gradients of the step before after the first forward pass."""
        batch = self._to_device(self.batches[divmod(index, len(self.batches))])
        with torch.autocast(self.device.type, dtype=self._half) if self._half else nullcontext():
            loss = self.module.training_step(batch, index % len(self.batches))
        if first:
            self.optimizer.zero_grad()
        self._scaler.scale(loss / self._shape.num_accumulated).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step_at(self, index: int, learning_rate: float) -> float:
        """The same at a learning rate of its own."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.step(index)

    def step_seconds(self, most_steps: int, most_seconds: float) -> float:
        """The median of up to `most_steps` steps after a first one, which warms up; at least one, whatever it takes."""
        self.step(0)
        begin, found = time.perf_counter(), list[float]()
        while len(found) < most_steps and (not found or time.perf_counter() - begin < most_seconds):
            start = time.perf_counter()
            self.step(1 + len(found))
            self._finish()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def answer_seconds(self, most_steps: int, most_seconds: float) -> float:
        """The median of forward passes of a batch in evaluation mode, as validation makes them."""
        self.module.eval()
        inputs = self._to_device(self.batches[0, 0]).inputs
        begin, found = time.perf_counter(), list[float]()
        with torch.no_grad():
            while len(found) < most_steps and (
                not found or time.perf_counter() - begin < most_seconds
            ):
                start = time.perf_counter()
                self.module.network(inputs)
                self._finish()
                found.append(time.perf_counter() - start)
        self.module.train()
        return statistics.median(found)

    def _to_device(self, batch: Batch) -> Batch:
        return (
            self.module.transfer_batch_to_device(batch, self.device, 0) if self._on_gpu else batch
        )

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def _alone(placement: Placement) -> Placement:
    """The same precision in one process without DeepSpeed; fp16 on the CPU, which it alone can do, becomes bf16."""
    on_cpu_in_half = placement.accelerator == "cpu" and placement.precision == "16-mixed"
    return Placement(
        "single",
        "bf16-mixed" if on_cpu_in_half else placement.precision,
        placement.accelerator,
        1,
        1,
        None,
        None,
        (),
    )
