"""What a running training tells a reader: one line per epoch, a bar on a terminal, and DVCLive. Third-party chatter is kept out.

DVCLive's step is the number of the epoch. After a resume the epochs before it are logged there again, since DVC has removed what
was in `reports/live`.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from dvclive.fabric import DVCLiveLogger as FabricDVCLiveLogger
from dvclive.lightning import DVCLiveLogger
from dvclive.live import Live
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import Logger
from scmrepo.exceptions import SCMError

from slipway.reports.console import size
from slipway.system.errors import UnavailableError
from slipway.training.checkpoints.callback import Saver
from slipway.training.distributed.process_memory import peak_bytes
from slipway.training.recipe.gradients import loss_scale
from slipway.training.telemetry.step_clock import Lap, StepClock
from slipway.training.telemetry.telemetry import StepTelemetry


class EpochLines(pl.Callback):
    """Prints and logs each epoch as it ends, on rank 0."""

    def __init__(self, saver: Saver, rows_per_step: int, clock: StepClock) -> None:
        self._saver, self._rows_per_step, self._lap = saver, rows_per_step, Lap(clock)
        self._first_step = 0
        self._figures: dict[str, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _log_history(trainer.loggers, self._saver.history)
        self._begin(trainer)  # of an epoch that is resumed, whose start is not told

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if steps := trainer.global_step - self._first_step:
            self._figures = self._lap.finish(steps * self._rows_per_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        epoch, metrics = trainer.current_epoch + 1, pl_module.epoch_metrics
        width = len(str(trainer.max_epochs))
        memory = peak_bytes(on_gpu=trainer.strategy.root_device.type == "cuda")
        figures = figures_line(
            {**self._figures, "loss_scale": loss_scale(trainer), "memory_bytes": memory}
        )
        print(
            f"epoch {epoch:>{width}}/{trainer.max_epochs}  {_line(metrics)}  {figures}", flush=True
        )
        _log(trainer.loggers, metrics, epoch)

    def _begin(self, trainer: pl.Trainer) -> None:
        self._lap.begin()
        self._first_step, self._figures = trainer.global_step, {}


class _EpochLogger(DVCLiveLogger):
    """DVCLive's logger without its search of the call stack for a caller in Lightning, which took longer than a short epoch (dvclive 3.49).

    None of those callers logs here: all that is logged comes from `_log`.
    """

    def log_metrics(
        self,
        metrics: Mapping[str, int | float | str],
        step: int | None = None,
        sync: bool | None = False,
    ) -> None:
        FabricDVCLiveLogger.log_metrics(self, metrics, step, sync)


class _Bar(TQDMProgressBar):
    """Lightning's bar, with the figures of the last step that was logged."""

    def __init__(self, telemetry: StepTelemetry) -> None:
        super().__init__(leave=False)
        self._telemetry = telemetry

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        latest = self._telemetry.latest
        return (
            {"": figures_line(latest), "loss": f"{latest['loss']:.3f}"} if "loss" in latest else {}
        )


def figures_line(figures: Mapping[str, float | None]) -> str:
    """The speed, the share of waiting, the loss scale of fp16 and the memory, as far as they are known."""
    forms: dict[str, Callable[[float], str]] = {
        "rows_per_second": lambda value: f"{value:,.0f} rows/s",
        "data_wait_share": lambda value: f"data wait {value:.0%}",
        "loss_scale": lambda value: f"loss scale {value:g}",
        "memory_bytes": lambda value: f"memory {size(int(value))}",
    }
    known = {name: value for name in forms if (value := figures.get(name)) is not None}
    return "  ".join(forms[name](value) for name, value in known.items())


def loggers(live: Path) -> list[Logger]:
    """DVCLive, which makes no experiment and writes no dvc.yaml: these are the pipeline's. TensorBoard is `telemetry`'s."""
    try:
        dvclive = Live(dir=str(live), save_dvc_exp=False, dvcyaml=None, report=None)
    except SCMError as error:
        raise UnavailableError(
            f"DVCLive cannot log in this git repository: {error}. Make its first commit: git commit."
        ) from error
    return [_EpochLogger(experiment=dvclive)]


def log_finished(live: Path, history: list[dict[str, float]]) -> None:
    """Log a training of which every epoch was trained by an earlier run."""
    targets = loggers(live)
    _log_history(targets, history)
    for target in targets:
        target.finalize("success")


def progress_bars(telemetry: StepTelemetry) -> list[pl.Callback]:
    """A bar for a terminal, nothing for a log file."""
    return [_Bar(telemetry)] if sys.stderr.isatty() else []


def silence_chatter() -> None:
    """Keep out what Lightning and DeepSpeed say at every start; warnings that could matter stay."""
    for name in (
        "pytorch_lightning",
        "lightning_fabric",
        "DeepSpeed",
        "lightning.pytorch",
        "lightning.fabric",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(
        logging.ERROR
    )  # misses CUDA where there is none
    for text in (
        ".*does not have many workers.*",
        ".*your dataloader is not resumable.*",  # it has no state: order and augmentation follow from (seed, epoch, id)
        ".*`srun` command is available.*",  # Lightning looks for itself, even where it was told who started the processes
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*all_gather_into_tensor.*",
        ".*reduce_scatter_tensor.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*When saving the DeepSpeed Stage 3 checkpoint.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",  # where float16's first step overflows
    ):
        warnings.filterwarnings("ignore", message=text)


def _line(metrics: dict[str, float]) -> str:
    forms = {"learning_rate": ".2e", "skipped_steps": ".0f"}
    shown = {name: value for name, value in metrics.items() if name != "skipped_steps" or value}
    return "  ".join(
        f"{name.replace('_', ' ')} {value:{forms.get(name, '.4f')}}"
        for name, value in shown.items()
    )


def _log_history(targets: list[Logger], history: list[dict[str, float]]) -> None:
    for epoch, metrics in enumerate(history, start=1):
        _log(targets, metrics, epoch)


def _log(targets: list[Logger], metrics: dict[str, float], epoch: int) -> None:
    for logger in targets:
        logger.log_metrics(metrics, epoch)
