"""A training without checkpoints, in one process, for the audit and for pruning.

It trains a given network in place; the weights of the last epoch are the result.
"""

from pathlib import Path

import pytorch_lightning as pl

from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.system.errors import UnavailableError
from slipway.training.assembly import (
    SetupCheck,
    freeze_callbacks,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
    validation_batches,
)
from slipway.training.batches.batches import (
    batch_loader,
    cut_step,
    training_loader,
)
from slipway.training.distributed.placement import Placement, TrainingHost, this_host
from slipway.training.distributed.processes import disable_lightning_signals
from slipway.training.job import TrainingData
from slipway.training.module import TrainingModule
from slipway.training.networks.networks import Network
from slipway.training.recipe.weight_average import WeightAverage
from slipway.training.telemetry.progress import format_epoch

# Settings of the section train.
ONE_PROCESS = {
    "strategy": "single",
    "offload": None,
    "offload_path": None,
    "devices": 1,
    "num_nodes": 1,
}


def one_process(what: str, stage: str) -> TrainingHost:
    """Return the hardware of this host.

    Raises UnavailableError if a launcher started more than one process.
    """
    host = this_host()
    if host.launch and host.launch.world_size > 1:
        started = f"{host.launch.launcher} started {host.launch.world_size}"
        raise UnavailableError(
            f"{what} runs in one process, but {started}. Run `dvc repro {stage}` without it."
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
    num_epochs: int | None = None,
) -> None:
    """Train `network` in place. `callbacks` run before the averaging of weights.

    Ends after `num_epochs` of `params.epochs`, at the learning rate that the schedule has there.

    Raises TrainingError as any training does.
    """
    prepare_process(params, placement, network)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    on_gpu = placement.accelerator == "gpu"
    batches = training_batches(data, params, shape, 0, seed, on_gpu=on_gpu)
    validation = validation_batches(data, params, 1, 0)
    averages = [WeightAverage(network, params.ema_decay)] if params.ema_decay else []
    trainer = pl.Trainer(
        **step_arguments(params, placement, shape, folder),
        max_epochs=num_epochs or params.epochs,
        callbacks=[
            SetupCheck(placement),
            *freeze_callbacks(network, params),
            *callbacks,
            *averages,
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    disable_lightning_signals(trainer)
    trainer.fit(
        training_module(network, params, seed, data, batches, placement=placement),
        training_loader(batches, params.num_workers, pin_memory=on_gpu),
        batch_loader(validation, params.num_workers, pin_memory=on_gpu),
    )
    for average in averages:
        average.replace_weights()


class EpochPrinter(pl.Callback):
    """Prints the accuracy or RMSE on some rows after each epoch, only for information."""

    def __init__(self, name: str, rows: str) -> None:
        self._name, self._rows = name, rows

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        metrics = pl_module.epoch_metrics
        metric = kind_of(pl_module.network.spec.task).target.headline
        print(
            f"{self._name}  {format_epoch(trainer)}  train loss {metrics['train/loss']:.4f}  "
            f"{metric} on {self._rows} {metrics[f'val/{metric}']:.4f}",
            flush=True,
        )
