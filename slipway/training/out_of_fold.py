"""What networks answer for rows that they did not learn from: one training for each fold, on all rows but the fold's.

In one process on one device, fold after fold; a finished fold is kept in a folder, so that a killed audit goes on with the next one.
The last epoch's weights answer: an epoch chosen by the fold's own labels would know them.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytorch_lightning as pl
from numpy.typing import NDArray

from slipway import files
from slipway.contract import is_classification
from slipway.data.audit_folds import AUDITED, audit_folds
from slipway.data.augmentation import open_augmented
from slipway.data.packed import PackedSplit, open_split, read_manifest
from slipway.errors import SchemaError, UnavailableError
from slipway.params import AuditParams, TrainParams
from slipway.training.assembly import SetupCheck, freezing, prepare_process, step_arguments, training_batches, training_module
from slipway.training.batches import ValidationBatches, cut_step, training_loader, validation_loader
from slipway.training.fingerprint import code_of_stage, take_fingerprint
from slipway.training.job import TrainingData, drawn_network, network_spec
from slipway.training.module import TrainingModule
from slipway.training.networks import Network, TrainingSetup
from slipway.training.offline_copies import original_rows
from slipway.training.prediction import predict
from slipway.training.pretrained import pretrained_file
from slipway.training.processes import leave_signals_alone
from slipway.training.progress import silence_chatter
from slipway.training.row_selection import select
from slipway.training.strategies import Machine, Placement, place, requested_setup, this_machine
from slipway.training.weight_average import WeightAverage


@dataclass(frozen=True)
class FoldPaths:
    """What the trainings of folds read."""

    packed: Path
    augmented: Path
    root: Path  # of the project, for the digests of its code


@dataclass(frozen=True)
class FoldTraining:
    """All that the answers depend on."""

    seed: int
    params: TrainParams  # of one fold
    requested: TrainingSetup
    placement: Placement
    data: TrainingData  # as the train stage has it
    folds: NDArray[np.int64]  # (N,) of the rows of `AUDITED`, one split after the other, from 0
    key: str  # hex digest of it all, for the work folder

    @property
    def actual(self) -> TrainingSetup:
        """What every fold ran as: another setup ends it before its first step."""
        return self.placement.expected

    def settings(self) -> dict[str, Any]:
        """How the rows are judged, for the report."""
        return {
            "folds": self.num_folds,
            "epochs": self.params.epochs,
            "seed": self.seed,
            "splits": AUDITED,
            "requested": self.requested.model_dump(mode="json"),
            "actual": self.actual.model_dump(mode="json"),
        }

    @property
    def num_folds(self) -> int:
        """How many networks are trained."""
        return int(self.folds.max()) + 1

    def rows(self) -> PackedSplit:
        """The audited rows as one split, in the size that the network takes."""
        return self._select(np.arange(len(self.folds)))

    def held_out(self, fold: int) -> PackedSplit:
        """The rows of `fold`."""
        return self._select(np.flatnonzero(self.folds == fold))

    def others(self, fold: int) -> PackedSplit:
        """The rows of the other folds and their offline copies; a copy is in the fold of its original."""
        train, *copies = self.data.train
        folds = [self.folds, *(self.folds[original_rows(len(train), len(split))] for split in copies)]
        return self._select(np.flatnonzero(np.concatenate(folds) != fold))

    def _select(self, rows: NDArray[np.int64]) -> PackedSplit:
        train, *copies = self.data.train
        return select([train, self.data.val, *copies], rows, tuple(self.data.manifest.input.shape))


def plan_folds(seed: int, train: TrainParams, audit: AuditParams, rows: pa.Table, paths: FoldPaths) -> FoldTraining:
    """How networks are trained for the folds of `audit_folds.audited_rows`: as `train` asks, but for `audit.epochs` and in one process.

    ParamsError, UnavailableError as for a training; DataError where the rows have no such folds, SchemaError where others are packed.
    """
    params = train.model_copy(update={"epochs": audit.epochs, "strategy": "single", "offload": "none", "devices": 1, "num_nodes": 1})
    placement = place(params, _one_process())
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    learnt, val = (open_split(paths.packed, manifest, split) for split in AUDITED)
    if [*learnt.ids, *val.ids] != rows["id"].to_pylist():
        raise SchemaError(f"{paths.packed} does not hold the rows of the split. Run `dvc repro precompute`.")
    folds = audit_folds(rows, audit.folds, seed)
    depends_on = {
        "training": take_fingerprint(seed, params, placement, paths.packed, paths.augmented, paths.root, pretrained_file(params)).digest,
        "code": {name: files.sha256_file(paths.root / name) for name in code_of_stage(paths.root / "dvc.yaml", "audit")},
        "folds": files.sha256_bytes(folds.tobytes()),
    }
    data = TrainingData(manifest, [learnt, copies] if copies else [learnt], val, plan)
    return FoldTraining(seed, params, requested_setup(train), placement, data, folds, files.digest_json(depends_on)[:16])


def _one_process() -> Machine:
    machine = this_machine()
    if machine.launch and machine.launch.world_size > 1:
        started = f"{machine.launch.launcher} started {machine.launch.world_size}"
        raise UnavailableError(f"an audit is one process, but {started}. Run `dvc repro audit` without it.")
    return machine


def predict_out_of_fold(training: FoldTraining, folder: Path) -> NDArray[np.float32]:
    """(N, K) probabilities of the audited rows, each by the network that was trained without its fold.

    Folds that are finished in `folder` are read from there. TrainingError as for a training.
    """
    silence_chatter()
    answers = np.empty((len(training.folds), len(training.data.manifest.classes)), np.float32)
    for fold in range(training.num_folds):
        here = training.folds == fold
        path = folder / f"fold-{fold}.npy"
        if path.is_file():
            print(f"fold {fold + 1}/{training.num_folds}  was finished before", flush=True)
        else:
            _write_array(path, _answers_of_fold(training, fold, folder))
        answers[here] = np.load(path, allow_pickle=False)
    return answers


def _answers_of_fold(training: FoldTraining, fold: int, folder: Path) -> NDArray[np.float32]:
    held_out = training.held_out(fold)
    data = TrainingData(training.data.manifest, [training.others(fold)], held_out, training.data.plan)
    network = _train(training, data, f"fold {fold + 1}/{training.num_folds}", folder)
    device = "cuda" if training.placement.accelerator == "gpu" else "cpu"
    return predict(network, held_out.inputs, training.params.max_batch_per_device, device)


def _train(training: FoldTraining, data: TrainingData, name: str, folder: Path) -> Network:
    params, placement = training.params, training.placement
    network = drawn_network(training.seed, params, network_spec(params, data.manifest))
    prepare_process(params, placement, network)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    classes, on_gpu = is_classification(data.manifest.task), placement.accelerator == "gpu"
    batches = training_batches(data, shape, 0, training.seed, on_gpu=on_gpu)
    watched = ValidationBatches(data.val, params.max_batch_per_device, 1, 0, classes=classes)
    averages = [WeightAverage(network, params.ema_decay)] if params.ema_decay else []
    trainer = pl.Trainer(
        **step_arguments(params, placement, shape, folder),
        max_epochs=params.epochs,
        callbacks=[SetupCheck(placement), *freezing(network, params), *averages, _Lines(name)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    leave_signals_alone(trainer)
    trainer.fit(
        training_module(network, params, training.seed, data, batches),
        training_loader(batches, params.num_workers, pin_memory=on_gpu),
        validation_loader(watched, params.num_workers, pin_memory=on_gpu),
    )
    for average in averages:
        average.replace_weights()
    return network


class _Lines(pl.Callback):
    """Prints each epoch of a fold as it ends. Nothing is chosen by these numbers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        loss, accuracy = pl_module.epoch_metrics["train/loss"], pl_module.epoch_metrics["val/accuracy"]
        epoch = f"epoch {trainer.current_epoch + 1:>{len(str(trainer.max_epochs))}}/{trainer.max_epochs}"
        print(f"{self._name}  {epoch}  train loss {loss:.4f}  accuracy on the fold {accuracy:.4f}", flush=True)


def _write_array(path: Path, array: NDArray[np.float32]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    files.write_bytes(path, buffer.getvalue())
