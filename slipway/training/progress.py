"""What a running training tells: one line per epoch, TensorBoard and DVCLive. Third-party chatter is kept out of it.

Metrics are logged with the number of the epoch as the step. After a resume the epochs before it are
logged again, since DVC has removed what was in `reports/live`.
"""

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from dvclive.lightning import DVCLiveLogger
from dvclive.live import Live
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from scmrepo.exceptions import SCMError

from slipway.errors import UnavailableError
from slipway.training.saver import Saver


class EpochLines(pl.Callback):
    """Prints and logs each epoch as it ends, on rank 0; a bar shows the way in between where there is a terminal."""

    def __init__(self, saver: Saver, rows_per_epoch: int) -> None:
        self._saver, self._rows_per_epoch = saver, rows_per_epoch
        self._started, self._share = 0.0, 1.0  # of the epoch that this run trains itself

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _log_history(trainer.loggers, self._saver.history)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self._started, self._share = time.perf_counter(), 1 - done / trainer.num_training_batches  # of an epoch that is resumed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started, self._share = time.perf_counter(), 1.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        rows_per_second = self._share * self._rows_per_epoch / (time.perf_counter() - self._started)
        epoch, metrics = trainer.current_epoch + 1, pl_module.epoch_metrics
        width = len(str(trainer.max_epochs))
        print(f"epoch {epoch:>{width}}/{trainer.max_epochs}  {_line(metrics)}  {rows_per_second:,.0f} rows/s", flush=True)
        _log(trainer.loggers, metrics, epoch)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics({"rows_per_second": rows_per_second}, epoch)


def loggers(tensorboard: Path, live: Path) -> list[Logger]:
    """TensorBoard and DVCLive; the latter makes no experiment and writes no dvc.yaml, which are the pipeline's."""
    try:
        dvclive = Live(dir=str(live), save_dvc_exp=False, dvcyaml=None, report=None)
    except SCMError as error:
        raise UnavailableError(f"DVCLive cannot log in this git repository: {error}. Make its first commit: git commit.") from error
    return [TensorBoardLogger(save_dir=tensorboard.parent, name=tensorboard.name, version=""), DVCLiveLogger(experiment=dvclive)]


def log_finished(tensorboard: Path, live: Path, history: list[dict[str, float]]) -> None:
    """Log a training of which every epoch was trained by an earlier run."""
    targets = loggers(tensorboard, live)
    _log_history(targets, history)
    for target in targets:
        target.finalize("success")


def progress_bars() -> list[pl.Callback]:
    """A bar for a terminal, nothing for a log file."""
    return [TQDMProgressBar(leave=False)] if sys.stderr.isatty() else []


def silence_chatter() -> None:
    """Keep out what Lightning and DeepSpeed say at every start; warnings that could matter stay."""
    for name in ("pytorch_lightning", "lightning_fabric", "DeepSpeed", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # misses CUDA where there is none
    for text in (
        ".*does not have many workers.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*all_gather_into_tensor.*",
        ".*reduce_scatter_tensor.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*When saving the DeepSpeed Stage 3 checkpoint.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=text)


def _line(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:{'.2e' if name == 'learning_rate' else '.4f'}}" for name, value in metrics.items())


def _log_history(targets: list[Logger], history: list[dict[str, float]]) -> None:
    for epoch, metrics in enumerate(history, start=1):
        _log(targets, metrics, epoch)


def _log(targets: list[Logger], metrics: dict[str, float], epoch: int) -> None:
    for logger in targets:
        logger.log_metrics(metrics, epoch)
