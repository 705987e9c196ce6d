"""Runs real optimizer steps in one process without the trainer, for timing and tuning.

Batches, augmentation, network, loss, optimizer and precision are those of the training. There is no
communication between processes, and nothing is saved.
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_

from slipway.config.training import TrainParams
from slipway.system.errors import TrainingError
from slipway.training.assembly import prepare_process, training_batches, training_module
from slipway.training.batches.batches import Batch, StepShape
from slipway.training.distributed.placement import Placement
from slipway.training.frozen_features import frozen_body, without_store
from slipway.training.job import TrainingData, network_spec
from slipway.training.networks.frozen_parts import FrozenBody
from slipway.training.networks.initialization import initial_network


class Rehearsal:
    """The training of one process, to measure its speed and memory before the real one.

    It holds the network, its optimizer and its batches on the device of `placement`. A step runs
    the micro-batches of `shape`. `reads_features` lets a frozen body compute in no step, where the
    training stores its features.
    """

    def __init__(
        self,
        seed: int,
        params: TrainParams,
        data: TrainingData,
        placement: Placement,
        shape: StepShape,
        *,
        reads_features: bool = True,
    ) -> None:
        self._params, self._shape, self._on_gpu = params, shape, placement.accelerator == "gpu"
        self.device = torch.device("cuda" if self._on_gpu else "cpu")
        network = initial_network(seed, params, network_spec(params, data.manifest))
        body = frozen_body(network, params, data.plan, placement)
        placement = _in_one_process(placement)
        prepare_process(params, placement, network)
        if isinstance(body, FrozenBody) and reads_features:
            data = without_store(data, body)
        self.batches = training_batches(data, params, shape, 0, seed, on_gpu=self._on_gpu)
        # Both settings need the trainer, which a rehearsal does not have.
        params = params.model_copy(update={"on_loss_spike": None, "repeat_every_steps": None})
        self.module = training_module(
            network, params, seed, data, self.batches, placement=placement
        ).to(self.device)
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        half_dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        self._half = half_dtypes.get(placement.precision)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._half == torch.float16)
        self.module.train()

    def step(self, index: int) -> float:
        """Run optimizer step `index`, counted through all epochs, and return its mean loss.

        Raises TrainingError if the loss is not finite.
        """
        first = index * self._shape.num_accumulated
        losses = [
            self._backward(first + number, is_first=number == 0)
            for number in range(self._shape.num_accumulated)
        ]
        self._scaler.unscale_(self.optimizer)
        if self._params.gradient_clip_norm:
            clip_grad_norm_(self.module.parameters(), self._params.gradient_clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.module.nonfinite_guard.discard()
        loss = statistics.fmean(losses)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in step {index + 1}, expected a finite number. Lower "
                "train.learning_rate, or look at the data."
            )
        return loss

    def _backward(self, index: int, *, is_first: bool) -> float:
        """Run forward and backward on one batch, and return its loss.

        The first batch of a step frees the old gradients after its forward pass, as Lightning does.
        """
        batch = self._to_device(self.batches[divmod(index, len(self.batches))])
        with torch.autocast(self.device.type, dtype=self._half) if self._half else nullcontext():
            loss = self.module.training_step(batch, index % len(self.batches))
        if is_first:
            self.optimizer.zero_grad()
        scaled = self._scaler.scale(loss / self._shape.num_accumulated)
        scaled.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step_at(self, index: int, learning_rate: float) -> float:
        """Run a step with the given learning rate, and return its mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.step(index)

    def step_seconds(self, max_steps: int, max_seconds: float) -> float:
        """Return the median seconds of an optimizer step, after one step of warm-up."""
        self.step(0)
        return self._median_seconds(lambda index: self.step(1 + index), max_steps, max_seconds)

    def forward_seconds(self, max_steps: int, max_seconds: float) -> float:
        """Return the median seconds of a forward pass on one batch, as in validation."""
        self.module.eval()
        inputs = self._to_device(self.batches[0, 0]).inputs
        with torch.no_grad():
            seconds = self._median_seconds(
                lambda _: self.module.answers(inputs), max_steps, max_seconds
            )
        self.module.train()
        return seconds

    def _median_seconds(
        self, action: Callable[[int], object], max_times: int, max_seconds: float
    ) -> float:
        """Return the median seconds of `action`, run at least once and until a limit is reached."""
        begin, found = time.perf_counter(), list[float]()
        while len(found) < max_times and (not found or time.perf_counter() - begin < max_seconds):
            start = time.perf_counter()
            action(len(found))
            if self._on_gpu:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def _to_device(self, batch: Batch) -> Batch:
        if self._on_gpu:
            batch = self.module.transfer_batch_to_device(batch, self.device, 0)
        return batch


def _in_one_process(placement: Placement) -> Placement:
    """Return a placement of one process on the same device, with the same precision.

    On the CPU only DeepSpeed trains in fp16; bf16 replaces it.
    """
    is_half_on_cpu = placement.accelerator == "cpu" and placement.precision == "16-mixed"
    return Placement(
        strategy="single",
        precision="bf16-mixed" if is_half_on_cpu else placement.precision,
        accelerator=placement.accelerator,
        devices=1,
        num_nodes=1,
        offload=None,
        launch=None,
        reasons=(),
    )
