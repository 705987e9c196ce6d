"""Console output and DVCLive log of a training: its start, a line per epoch, a progress bar.

DVCLive's step is the number of the epoch. A resumed training logs the earlier epochs again, because
DVC has removed `reports/live`.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from dvclive.fabric import DVCLiveLogger as FabricDVCLiveLogger
from dvclive.lightning import DVCLiveLogger
from dvclive.live import Live
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import Logger
from scmrepo.exceptions import SCMError

from slipway.config.training import STOPPING_ROWS, TrainParams
from slipway.data.store.packed import stored_bytes
from slipway.reports.console import duration, size
from slipway.system.errors import UnavailableError
from slipway.system.memory import free_bytes
from slipway.training.assembly import shuffled_blocks
from slipway.training.checkpoints.callback import CheckpointCallback
from slipway.training.checkpoints.checkpoints import Checkpoint, TrainingPosition
from slipway.training.job import Job
from slipway.training.telemetry.telemetry import (
    DataWaitProfiler,
    StepTelemetry,
    ThroughputMeter,
    is_on_gpu,
    loss_scale,
    peak_bytes,
)


def print_start(
    job: Job, num_parameters: int, notes: list[str], resumed: Checkpoint | None
) -> None:
    """Print the network, rows, step, placement, notes, and the position of a resumed training."""
    spec, shape, placement = job.spec, job.shape, job.placement
    inputs = "x".join(map(str, spec.input.shape))
    outputs = f"{len(spec.classes)} classes" if spec.classes else "a number"
    print(f"network   {spec.name}, {num_parameters:,} parameters, {inputs} -> {outputs}")
    print(f"rows      {job.data.num_train:,} for training, {len(job.data.val):,} for validation")
    devices = f"per device x {shape.world_size} process{'es' * (shape.world_size > 1)}"
    if placement.shares_rows:
        copies = placement.num_readers
        devices = f"in each of {copies} copies" if copies > 1 else "on all devices together"
    print(
        f"step      {shape.batch_size} rows = {shape.per_device} {devices} x "
        f"{shape.num_accumulated} accumulated; {job.steps_per_epoch} steps per epoch"
    )
    blocks = shuffled_blocks(job.data, job.params)
    if blocks:
        print(
            f"order     blocks of {blocks.block:,} rows, of which {blocks.window:,} rows are "
            "shuffled together"
        )
    print(f"runs as   {placement}")
    if job.params.pretrained:
        digest = job.fingerprint.data["pretrained"]
        mean, std = (", ".join(f"{value:.3f}" for value in part) for part in (spec.mean, spec.std))
        pixels = f", for pixels of mean {mean}, std {std}" if mean else ""
        print(f"weights   {job.params.pretrained}, SHA-256 {digest[:12]}{pixels}")
    for reason in placement.reasons:
        print(f"  auto    {reason}")
    print_patience(job)
    stored = sum(stored_bytes(split.inputs) for split in job.data.train)
    memory = memory_notes(job.params, stored, free_bytes())
    for note in [*notes, *memory]:
        print(f"note      {note}")
    if resumed:
        _print_resumed(job, resumed)


def print_patience(job: Job) -> None:
    """Print what `early_stopping_patience: auto` becomes for the rows of the validation split."""
    if job.params.early_stopping_patience != "auto":
        return
    text = f"ends {job.patience} epochs after the lowest validation loss"
    if job.patience is None:
        few = f"fewer than {STOPPING_ROWS} rows for validation"
        text = f"never ends early: {'keep is last' if job.params.keep == 'last' else few}"
    print(f"  auto    {text}")


def _print_resumed(job: Job, resumed: Checkpoint) -> None:
    print(f"resumed   {describe_position(resumed.position)}", flush=True)
    saved, now, fresh = resumed.segments[-1], job.segment(resumed), job.segment()
    if not saved.has_same_layout(now):
        print(
            f"note      saved by {saved}, resumed by {now}: "
            "same batches, but results may differ in the last bits"
        )
    elif now.threads != fresh.threads:
        print(
            f"note      runs with {now.threads} threads each as before, for the same bits; "
            f"a new training takes {fresh.threads}"
        )


def memory_notes(params: TrainParams, stored: int, free: int | None) -> list[str]:
    """Return a note if the training rows or their buffer exceed the free memory, in bytes."""
    if free is None:
        return []
    if params.shuffle_buffer_mib is not None:
        buffer = params.shuffle_buffer_mib << 20
        return (
            [
                f"train.shuffle_buffer_mib is {params.shuffle_buffer_mib:,}, more than the "
                f"{size(free)} of free memory: rows would be read again. Use less"
            ]
            if min(buffer, stored) > free
            else []
        )
    return (
        [
            f"the training rows take {size(stored)}, more than the {size(free)} of free memory, "
            "and train.shuffle: rows reads each at a random place of the disk. On a slow disk use "
            "train.shuffle: blocks"
        ]
        if stored > free
        else []
    )


def describe_position(position: TrainingPosition) -> str:
    steps = f" and {position.step} steps of the next" if position.step else ""
    return f"after epoch {position.epoch}{steps}"


class EpochLines(pl.Callback):
    """Prints and logs a line for each epoch on rank 0."""

    def __init__(
        self, checkpoints: CheckpointCallback, rows_per_step: int, profiler: DataWaitProfiler
    ) -> None:
        self._checkpoints, self._rows_per_step = checkpoints, rows_per_step
        self._meter = ThroughputMeter(profiler)
        self._first_step = 0
        self._figures: dict[str, float] = {}
        self._times: list[float] = []  # the start of this process's training, then ends of epochs

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._times = [time.monotonic()]
        _log_history(trainer.loggers, self._checkpoints.history)
        # Lightning does not call `on_train_epoch_start` for an epoch that is resumed.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.begin()
        self._first_step, self._figures = trainer.global_step, {}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if steps := trainer.global_step - self._first_step:
            self._figures = self._meter.finish(steps * self._rows_per_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        metrics = pl_module.epoch_metrics
        self._times.append(time.monotonic())
        figures = format_figures(
            {
                **self._figures,
                "loss_scale": loss_scale(trainer),
                "memory_bytes": peak_bytes(on_gpu=is_on_gpu(trainer)),
                "seconds_left": seconds_left(
                    self._times, (trainer.max_epochs or 0) - trainer.current_epoch - 1
                ),
            }
        )
        print(f"{format_epoch(trainer)}  {_format_metrics(metrics)}  {figures}", flush=True)
        _log(trainer.loggers, metrics, trainer.current_epoch + 1)


def seconds_left(times: Sequence[float], num_epochs: int) -> float | None:
    """Predict the seconds of `num_epochs` more epochs; None if there are none.

    `times` are those of the start and of each end of an epoch. The first epoch, which warms up,
    counts only while there is no other.
    """
    known = times[1:] if len(times) > 2 else times
    return (known[-1] - known[0]) / (len(known) - 1) * num_epochs if num_epochs > 0 else None


def format_epoch(trainer: pl.Trainer) -> str:
    """Return the number of the running epoch as text, such as "epoch 7/10"."""
    width = len(str(trainer.max_epochs))
    return f"epoch {trainer.current_epoch + 1:>{width}}/{trainer.max_epochs}"


class _EpochLogger(DVCLiveLogger):
    """Logs to DVCLive without inspecting the call stack at every value.

    DVCLive's own inspection took longer than a short epoch (dvclive 3.49). Only `_log` logs here.
    """

    def log_metrics(
        self,
        metrics: Mapping[str, int | float | str],
        step: int | None = None,
        sync: bool | None = False,
    ) -> None:
        FabricDVCLiveLogger.log_metrics(self, metrics, step, sync)


class _Bar(TQDMProgressBar):
    """Lightning's progress bar, with the figures of the last logged step added."""

    def __init__(self, telemetry: StepTelemetry) -> None:
        super().__init__(leave=False)
        self._telemetry = telemetry

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        latest = self._telemetry.latest
        if "loss" not in latest:
            return {}
        return {"": format_figures(latest), "loss": f"{latest['loss']:.3f}"}


def format_figures(figures: Mapping[str, float | None]) -> str:
    """Return throughput, data wait, loss scale, memory and time left; no unknown figures."""
    formats: dict[str, Callable[[float], str]] = {
        "rows_per_second": lambda value: f"{value:,.0f} rows/s",
        "data_wait_fraction": lambda value: f"data wait {value:.0%}",
        "loss_scale": lambda value: f"loss scale {value:g}",
        "memory_bytes": lambda value: f"memory {size(int(value))}",
        "seconds_left": lambda value: f"{duration(value)} left",
    }
    known = [(name, value) for name in formats if (value := figures.get(name)) is not None]
    return "  ".join(formats[name](value) for name, value in known)


def loggers(live: Path) -> list[Logger]:
    """Return the DVCLive logger, which starts no experiment and writes no dvc.yaml."""
    try:
        dvclive = Live(dir=str(live), save_dvc_exp=False, dvcyaml=None, report=None)
    except SCMError as error:
        raise UnavailableError(
            f"DVCLive cannot log in this git repository: {error}. Make its first commit: "
            "git commit."
        ) from error
    return [_EpochLogger(experiment=dvclive)]


def log_finished(live: Path, history: list[dict[str, float]]) -> None:
    """Write the DVCLive log of a training whose epochs were all completed by an earlier run."""
    targets = loggers(live)
    _log_history(targets, history)
    for target in targets:
        target.finalize("success")


def progress_bars(telemetry: StepTelemetry) -> list[pl.Callback]:
    """Return a progress bar on a terminal, and none if the output is a file."""
    return [_Bar(telemetry)] if sys.stderr.isatty() else []


def silence_chatter() -> None:
    """Hide routine messages of Lightning and DeepSpeed; warnings that could matter stay."""
    for name in (
        "pytorch_lightning",
        "lightning_fabric",
        "DeepSpeed",
        "lightning.pytorch",
        "lightning.fabric",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    # torch warns that CUDA is missing even if there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for text in (
        ".*does not have many workers.*",
        # The loader needs no state: order and augmentation follow from (seed, epoch, id).
        ".*your dataloader is not resumable.*",
        # Lightning looks for srun although it knows who started the processes.
        ".*`srun` command is available.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*all_gather_into_tensor.*",
        ".*reduce_scatter_tensor.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*When saving the DeepSpeed Stage 3 checkpoint.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        # The first step of float16 may overflow.
        ".*Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
    ):
        warnings.filterwarnings("ignore", message=text)


def _format_metrics(metrics: dict[str, float]) -> str:
    formats = {"learning_rate": ".2e", "skipped_steps": ".0f"}
    shown = {name: value for name, value in metrics.items() if name != "skipped_steps" or value}
    return "  ".join(
        f"{name.replace('_', ' ')} {value:{formats.get(name, '.4f')}}"
        for name, value in shown.items()
    )


def _log_history(targets: list[Logger], history: list[dict[str, float]]) -> None:
    for epoch, metrics in enumerate(history, start=1):
        _log(targets, metrics, epoch)


def _log(targets: list[Logger], metrics: dict[str, float], epoch: int) -> None:
    for logger in targets:
        logger.log_metrics(metrics, epoch)
