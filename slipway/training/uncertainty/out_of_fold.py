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
from numpy.typing import NDArray

from slipway.config.sections import AuditParams, TrainParams
from slipway.data.augmentation.plan import open_augmented
from slipway.data.splits.audit_folds import AUDITED, audit_folds
from slipway.data.store.packed import PackedSplit, open_split, read_manifest
from slipway.system import files
from slipway.system.code_digest import stage_digest
from slipway.system.errors import SchemaError
from slipway.training.augmentation.offline_copies import original_rows
from slipway.training.batches.row_selection import select
from slipway.training.checkpoints.fingerprint import take_fingerprint
from slipway.training.distributed.strategies import Placement, place, requested_setup
from slipway.training.job import TrainingData, network_spec
from slipway.training.networks.initialization import initial_network
from slipway.training.networks.networks import Network, TrainingSetup
from slipway.training.networks.pretrained import pretrained_file
from slipway.training.short_run import ONE_PROCESS, EpochPrinter, one_process, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.prediction import predict


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
        folds = [
            self.folds,
            *(self.folds[original_rows(len(train), len(split))] for split in copies),
        ]
        return self._select(np.flatnonzero(np.concatenate(folds) != fold))

    def _select(self, rows: NDArray[np.int64]) -> PackedSplit:
        train, *copies = self.data.train
        return select([train, self.data.val, *copies], rows, tuple(self.data.manifest.input.shape))


def plan_folds(
    seed: int, train: TrainParams, audit: AuditParams, rows: pa.Table, paths: FoldPaths
) -> FoldTraining:
    """How networks are trained for the folds of `audit_folds.audited_rows`: as `train` asks, but for `audit.epochs` and in one process.

    ParamsError, UnavailableError as for a training; DataError where the rows have no such folds, SchemaError where others are packed.
    """
    params = train.model_copy(update={"epochs": audit.epochs, **ONE_PROCESS})
    placement = place(params, one_process("an audit", "audit"))
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    learnt, val = (open_split(paths.packed, manifest, split) for split in AUDITED)
    if [*learnt.ids, *val.ids] != rows["id"].to_pylist():
        raise SchemaError(
            f"{paths.packed} does not hold the rows of the split. Run `dvc repro precompute`."
        )
    assert audit.folds is not None, "the stage audits only if audit.folds is set"
    folds = audit_folds(rows, audit.folds, seed)
    depends_on = {
        "training": take_fingerprint(
            seed,
            params,
            placement,
            paths.packed,
            paths.augmented,
            paths.root,
            pretrained_file(params),
        ).digest,
        "code": stage_digest(paths.root, "audit"),
        "folds": files.sha256_bytes(folds.tobytes()),
    }
    data = TrainingData(manifest, [learnt, copies] if copies else [learnt], val, plan)
    return FoldTraining(
        seed,
        params,
        requested_setup(train),
        placement,
        data,
        folds,
        files.digest_json(depends_on)[:16],
    )


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
    data = TrainingData(
        training.data.manifest, [training.others(fold)], held_out, training.data.plan
    )
    network = _train(training, data, f"fold {fold + 1}/{training.num_folds}", folder)
    device = "cuda" if training.placement.accelerator == "gpu" else "cpu"
    return predict(network, held_out.inputs, training.params.max_batch_per_device, device)


def _train(training: FoldTraining, data: TrainingData, name: str, folder: Path) -> Network:
    network = initial_network(
        training.seed, training.params, network_spec(training.params, data.manifest)
    )
    printer = EpochPrinter(name, "the fold")
    train_short(
        network, training.seed, training.params, training.placement, data, [printer], folder
    )
    return network


def _write_array(path: Path, array: NDArray[np.float32]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    files.write_bytes(path, buffer.getvalue())
