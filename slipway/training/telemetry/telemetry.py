"""TensorBoard events: scalars by optimizer step, the first batch as images, optional histograms.

Every rank has this callback, because sharded weights are gathered by all ranks; only rank 0
writes. The trainer counts the steps, so a resumed run continues the count.
"""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.tensorboard import SummaryWriter

from slipway.config.training import TrainParams
from slipway.kinds.registry import input_kind
from slipway.system.memory import status_bytes
from slipway.training.distributed.shards import whole
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.trackers import Trackers

NEXT_BATCH = "[_TrainingEpochLoop].train_dataloader_next"  # Lightning 2.6; a test notices a rename
_SHOWN_IMAGES = 64
_FRAME = 128  # grey level of the frame


@dataclass(frozen=True)
class TelemetryContext:
    """Facts about a training that its telemetry needs."""

    board: Path
    rows_per_step: int
    num_accumulated: int
    steps_per_epoch: int
    history: Sequence[Mapping[str, float]]  # metrics of the epochs before a resume


class DataWaitProfiler(Profiler):
    """Measures the time that the training loop waits for batches."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0
        self._started = 0.0

    def start(self, action_name: str) -> None:
        if action_name == NEXT_BATCH:
            self._started = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == NEXT_BATCH:
            self.waited_s += time.perf_counter() - self._started


class ThroughputMeter:
    """Measures rows per second, and the fraction of time spent waiting for data, since `begin`."""

    def __init__(self, profiler: DataWaitProfiler) -> None:
        self._profiler = profiler
        self.begin()

    def begin(self) -> None:
        self._began, self._waited_s = time.perf_counter(), self._profiler.waited_s

    def finish(self, rows: int) -> dict[str, float]:
        """Return the figures for `rows` rows of all processes, and start the next measurement.

        On a GPU this waits until its queue is empty.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        figures = {
            "rows_per_second": rows / seconds,
            "data_wait_fraction": (self._profiler.waited_s - self._waited_s) / seconds,
        }
        self.begin()
        return figures


class StepTelemetry(pl.Callback):
    """Writes scalars every `log_every_steps`, images once, and histograms if requested."""

    def __init__(
        self,
        params: TrainParams,
        context: TelemetryContext,
        log: RunLog,
        profiler: DataWaitProfiler,
        trackers: Trackers | None = None,
    ) -> None:
        self._params, self._context, self._log = params, context, log
        self._trackers = trackers
        self._writer: SummaryWriter | None = None  # exists on rank 0 while it trains
        self._meter, self._measured_from = ThroughputMeter(profiler), 0
        self._learning_rate = 0.0
        self.latest: dict[str, float] = {}  # values of the last written step, for the progress bar

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._measured_from = trainer.global_step
        if not trainer.is_global_zero:
            return
        self._writer = _open_board(self._context, trainer.global_step)
        if self._trackers:
            self._trackers.start(self._context.history)
        kind = input_kind(pl_module.network.spec.input.kind)
        if trainer.global_step == 0 and kind.has_pixels:
            _write_first_batch(self._writer, pl_module.network)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._meter.begin()  # the validation is not measured
        self._measured_from = trainer.global_step

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._is_due(trainer.global_step + 1) and trainer.is_global_zero:
            # Of this step: the schedule advances before the batch ends.
            self._learning_rate = float(optimizer.param_groups[0]["lr"])
        every = self._params.log_histograms_every_epochs
        if every and trainer.is_last_batch and (trainer.current_epoch + 1) % every == 0:
            self._write_histograms(trainer, pl_module.network)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ends_step = (batch_idx + 1) % self._context.num_accumulated == 0
        has_new_step = trainer.global_step > self._measured_from
        if self._writer and ends_step and has_new_step and self._is_due(trainer.global_step):
            self._write_step(self._writer, trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._writer:
            step, epoch = trainer.global_step, trainer.current_epoch + 1
            metrics = pl_module.epoch_metrics
            self._write(self._writer, {**metrics, "epoch": float(epoch)}, step)
            self._log.write("epoch", step=step, epoch=epoch, **metrics)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._close(failed=False)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close(failed=True)

    def _close(self, *, failed: bool) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None
        if self._trackers:
            self._trackers.finish(failed=failed)

    def _write(self, writer: SummaryWriter, values: Mapping[str, float], step: int) -> None:
        _write_scalars(writer, values, step)
        if self._trackers:
            self._trackers.write(values, step)

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self._params.log_every_steps == 0

    def _write_step(
        self, writer: SummaryWriter, trainer: pl.Trainer, module: Any, outputs: Any
    ) -> None:
        step, norm = trainer.global_step, module.nonfinite_guard.gradient_norm
        rows = (step - self._measured_from) * self._context.rows_per_step
        figures: dict[str, float | None] = {
            "loss": _last_loss(outputs, self._context.num_accumulated),
            "learning_rate": self._learning_rate,
            "gradient_norm": _deepspeed_norm(trainer) if norm is None else float(norm),
            "loss_scale": loss_scale(trainer),
            **self._meter.finish(rows),
            "memory_bytes": float(peak_bytes(on_gpu=is_on_gpu(trainer))),
        }
        self._measured_from = step
        self.latest = {name: value for name, value in figures.items() if value is not None}
        self._write(writer, {f"step/{name}": value for name, value in self.latest.items()}, step)
        self._log.write("step", step=step, **self.latest)

    def _write_histograms(self, trainer: pl.Trainer, network: nn.Module) -> None:
        step = trainer.global_step + 1
        for name, weight, gradient in _gather_tensors(trainer, network):
            if self._writer:
                _write_histogram(self._writer, f"weights/{name}", weight, step)
                if gradient is not None:
                    _write_histogram(self._writer, f"gradients/{name}", gradient, step)


def is_on_gpu(trainer: pl.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def peak_bytes(*, on_gpu: bool) -> int:
    """Return the peak memory: torch's allocations on a GPU, resident memory on a CPU.

    Mapped pages (libraries, the packed store) do not count, because the system reclaims them when
    memory runs short.
    """
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    # `ru_maxrss` is the fallback only: it starts at the value of the parent process.
    largest = status_bytes("VmHWM") - status_bytes("RssFile")
    return largest or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss_scale(trainer: pl.Trainer) -> float | None:
    """Return the factor by which an fp16 loss is multiplied; None in other precisions."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        engine = trainer.strategy.deepspeed_engine
        return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None
    plugin = trainer.strategy.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return float(plugin.scaler.get_scale())
    return None


def _open_board(context: TelemetryContext, step: int) -> SummaryWriter:
    """Return a writer that continues the TensorBoard files of a killed run, or starts new ones.

    New files begin with the epochs before `step`. For a killed run, `purge_step` voids the events
    after its checkpoint. TensorBoard hides them, so no step appears twice.
    """
    is_known = any(context.board.glob("events.out.tfevents.*"))
    writer = SummaryWriter(str(context.board), purge_step=step + 1 if step else 0)
    if not is_known:
        for epoch, metrics in enumerate(context.history, start=1):
            _write_scalars(writer, metrics, epoch * context.steps_per_epoch)
    return writer


def _write_scalars(writer: SummaryWriter, values: Mapping[str, float], step: int) -> None:
    """Write and flush scalars, so that a kill does not lose earlier ones."""
    for name, value in values.items():
        writer.add_scalar(name, value, step)
    writer.flush()


def _write_first_batch(writer: SummaryWriter, network: nn.Module) -> None:
    """Write the first input images of the network on this rank, after all augmentation.

    The grid shows each image pixel for pixel, in a frame of one pixel.
    """

    def write(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hook.remove()
        pixels = inputs[0].detach().cpu()[:_SHOWN_IMAGES]  # (B, H, W, C) uint8
        framed = pad(pixels, (0, 0, 1, 1, 1, 1), value=_FRAME)
        writer.add_images("first_batch", framed, 0, dataformats="NHWC")
        writer.flush()

    hook = network.register_forward_pre_hook(write)


def _write_histogram(writer: SummaryWriter, name: str, values: Tensor, step: int) -> None:
    """Write a histogram of the finite values, if there are any."""
    finite = values.detach().float().flatten()
    finite = finite[finite.isfinite()]
    if len(finite):
        writer.add_histogram(name, finite, step)


def _gather_tensors(
    trainer: pl.Trainer, network: nn.Module
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield the name, weight and unscaled gradient of each parameter after the backward pass.

    Every rank has to call it: with DeepSpeed and FSDP the tensors are gathered from their shards.
    """
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        for name, parameter in network.named_parameters():
            gradient = parameter.grad
            yield (
                name,
                whole(parameter.detach()),
                None if gradient is None else whole(gradient),
            )
        return
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    scale = loss_scale(trainer) or 1.0  # DeepSpeed's engine unscales gradients only in the step
    for name, parameter in network.named_parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            gradient = torch.as_tensor(gradient).float() / scale
        yield name, safe_get_full_fp32_param(parameter), gradient


def _deepspeed_norm(trainer: pl.Trainer) -> float | None:
    """Return DeepSpeed's gradient norm before clipping; None if the last step was skipped."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return None
    norm = trainer.strategy.deepspeed_engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def _last_loss(outputs: Any, num_accumulated: int) -> float | None:
    """Return the loss of this rank's last batch, without the division by `num_accumulated`."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) * num_accumulated if isinstance(loss, Tensor) else None
