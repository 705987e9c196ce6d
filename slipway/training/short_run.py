"""A training without saves: in one process on one device, of weights that a caller has and keeps. For the audit and for pruning.

The last epoch's weights are the result. Nothing of it is kept where it is killed.
"""

from pathlib import Path

import pytorch_lightning as pl

from slipway.config.sections import TrainParams
from slipway.kinds.registry import is_classification
from slipway.system.errors import UnavailableError
from slipway.training.assembly import (
    SetupCheck,
    freezing,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
)
from slipway.training.batches.batches import (
    ValidationBatches,
    cut_step,
    training_loader,
    validation_loader,
)
from slipway.training.distributed.processes import disable_lightning_signals
from slipway.training.distributed.strategies import Placement, TrainingHost, this_host
from slipway.training.job import TrainingData
from slipway.training.module import TrainingModule
from slipway.training.networks.networks import Network
from slipway.training.recipe.weight_average import WeightAverage

ONE_PROCESS = {
    "strategy": "single",
    "offload": None,
    "devices": 1,
    "num_nodes": 1,
}  # of the section train


def one_process(what: str, stage: str) -> TrainingHost:
    """This machine; UnavailableError where a launcher started more than one process."""
    host = this_host()
    if host.launch and host.launch.world_size > 1:
        started = f"{host.launch.launcher} started {host.launch.world_size}"
        raise UnavailableError(
            f"{what} is one process, but {started}. Run `dvc repro {stage}` without it."
        )
    return host


def train_short(
    network: Network,
    seed: int,
    params: TrainParams,
    placement: Placement,
    data: TrainingData,
    callbacks: list[pl.Callback],
    folder: Path,
) -> None:
    """Train `network` in its place. TrainingError as for a training; `callbacks` come before the average of the weights."""
    prepare_process(params, placement, network)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    classes, on_gpu = is_classification(data.manifest.task), placement.accelerator == "gpu"
    batches = training_batches(data, shape, 0, seed, on_gpu=on_gpu)
    watched = ValidationBatches(data.val, params.max_batch_per_device, 1, 0, classes=classes)
    averages = [WeightAverage(network, params.ema_decay)] if params.ema_decay else []
    trainer = pl.Trainer(
        **step_arguments(params, placement, shape, folder),
        max_epochs=params.epochs,
        callbacks=[SetupCheck(placement), *freezing(network, params), *callbacks, *averages],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    disable_lightning_signals(trainer)
    trainer.fit(
        training_module(network, params, seed, data, batches),
        training_loader(batches, params.num_workers, pin_memory=on_gpu),
        validation_loader(watched, params.num_workers, pin_memory=on_gpu),
    )
    for average in averages:
        average.replace_weights()


class EpochPrinter(pl.Callback):
    """Prints each epoch as it ends, with the accuracy or RMSE on what is watched. Nothing is chosen by these numbers."""

    def __init__(self, name: str, watched: str) -> None:
        self._name, self._watched = name, watched

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        found = pl_module.epoch_metrics
        metric = "accuracy" if "val/accuracy" in found else "rmse"
        epoch = f"epoch {trainer.current_epoch + 1:>{len(str(trainer.max_epochs))}}/{trainer.max_epochs}"
        told = f"train loss {found['train/loss']:.4f}  {metric} on {self._watched} {found[f'val/{metric}']:.4f}"
        print(f"{self._name}  {epoch}  {told}", flush=True)
