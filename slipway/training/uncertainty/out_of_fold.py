"""Out-of-fold predictions: one network per fold, trained on all rows of the other folds.

Folds are trained one after the other, in one process on one device. A finished fold is stored in a
folder, so that a killed audit continues with the next one. Predictions use the weights of the last
epoch: selecting an epoch by the fold's own labels would leak them.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytorch_lightning as pl
from numpy.typing import NDArray

from slipway.artifacts.training_setup import TrainingSetup
from slipway.config.training import AuditParams, TrainParams
from slipway.data.splits.audit_folds import AUDITED, audit_folds
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.kinds.code_digest import stage_digest
from slipway.kinds.registry import are_trees, input_kind
from slipway.system import files
from slipway.system.errors import SchemaError
from slipway.training.assembly import prepare_process
from slipway.training.augmentation.offline_copies import original_rows
from slipway.training.batches.row_selection import select
from slipway.training.checkpoints.fingerprint import take_fingerprint
from slipway.training.distributed.placement import Placement, place, requested_setup
from slipway.training.frozen_features import FeatureCallback, FeatureStore, frozen_body
from slipway.training.job import (
    PROJECT_PATHS,
    TrainingData,
    network_spec,
    open_data,
    own_threads,
    placed,
)
from slipway.training.networks.frozen_parts import FrozenBody
from slipway.training.networks.initialization import (
    initial_network,
    pretrained_file,
    without_former_model,
)
from slipway.training.networks.networks import Network
from slipway.training.short_run import ONE_PROCESS, EpochPrinter, one_process, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.prediction import predict

# Network, rows (N, ...), rows in a batch, device -> predictions (N, K).
Answer = Callable[[Network, Inputs, int, str], NDArray[np.float32]]


@dataclass(frozen=True)
class FoldTraining:
    """The inputs that determine out-of-fold predictions."""

    seed: int
    params: TrainParams  # params of the training of each fold
    requested: TrainingSetup
    placement: Placement
    data: TrainingData  # the same data as in the train stage
    folds: NDArray[np.int64]  # (N,) of the rows of `AUDITED`, one split after the other, from 0
    key: str  # hex digest of all inputs, for the work folder
    # Epochs or rounds of a network that stopped early. A held-out fold never decides when to stop,
    # because its rows would then be predicted too well. None: `params.epochs`.
    num_epochs: int | None = None

    @property
    def num_folds(self) -> int:
        return int(self.folds.max()) + 1

    def settings(self) -> dict[str, Any]:
        """Return the settings of the training that the report lists."""
        return {
            "folds": self.num_folds,
            "epochs": self.params.epochs,
            "seed": self.seed,
            "splits": AUDITED,
            "requested": self.requested.model_dump(mode="json"),
            # Another actual setup ends a fold before its first step.
            "actual": self.placement.expected.model_dump(mode="json"),
        }

    def rows(self) -> PackedSplit:
        """The audited rows as one split, with images in the network's size."""
        return self._select(np.arange(len(self.folds)))

    def held_out(self, fold: int) -> PackedSplit:
        """Return the rows of `fold`, which the network of that fold does not see."""
        return self._select(np.flatnonzero(self.folds == fold))

    def others(self, fold: int) -> PackedSplit:
        """Return the rows of the other folds and their offline copies.

        A copy is in the fold of its original.
        """
        train, *copies = self.data.train
        copy_folds = [self.folds[original_rows(len(train), len(split))] for split in copies]
        return self._select(np.flatnonzero(np.concatenate([self.folds, *copy_folds]) != fold))

    def _select(self, rows: NDArray[np.int64]) -> PackedSplit:
        train, *copies = self.data.train
        return select([train, self.data.val, *copies], rows, tuple(self.data.manifest.input.shape))

    def with_features(self, network: Network) -> tuple["FoldTraining", list[pl.Callback]]:
        """Return the training on stored features, and what fills the store, if there can be one."""
        data, placement = self.data, self.placement
        body = frozen_body(network, self.params, data.plan, placement)
        if not isinstance(body, FrozenBody):
            return self, []
        prepare_process(self.params, placement, network)  # the store's key depends on the threads
        store = FeatureStore.of(PROJECT_PATHS.features, network, self.params, data, body, placement)
        return replace(self, data=store.attached()), [FeatureCallback(store)]


def plan_folds(
    seed: int,
    train: TrainParams,
    audit: AuditParams,
    rows: pa.Table,
    *,
    packed: Path,
    augmented: Path,
    root: Path,
) -> FoldTraining:
    """Plan the training of one network per fold, each for `audit.epochs` epochs in one process.

    Other settings are those of the stage `train`. `rows` come from `audit_folds.audited_rows`,
    `root` is the project's folder. Raises ParamsError or UnavailableError as any training does,
    DataError if `rows` cannot be divided into the folds, SchemaError if the packed store holds
    different rows.
    """
    assert audit.folds is not None, "the stage audits only if audit.folds is set"
    # A former model was trained on the rows that a fold leaves out.
    train = without_former_model(train)
    params = train.model_copy(update={"epochs": audit.epochs, **ONE_PROCESS})
    if train.freezes_body:  # in all epochs of the audit, too
        params = params.model_copy(update={"freeze_epochs": audit.epochs})
    placement = place(placed(params), one_process("an audit", "audit"))
    data = open_data(packed, augmented, verify=False)
    if [*data.train[0].ids, *data.val.ids] != rows["id"].to_pylist():
        raise SchemaError(
            f"{packed} does not hold the rows of the split. Run `dvc repro precompute`."
        )
    folds = audit_folds(rows, audit.folds, seed)
    fingerprint = take_fingerprint(
        seed, params, placement, packed, augmented, root, pretrained_file(params)
    )
    depends_on = {
        "training": fingerprint.digest,
        "code": stage_digest(root, "audit"),
        "folds": files.sha256_bytes(folds.tobytes()),
    }
    key = files.digest_json(depends_on)[:16]
    return FoldTraining(seed, params, requested_setup(train), placement, data, folds, key)


def predict_out_of_fold(
    training: FoldTraining, folder: Path, answer: Answer = predict
) -> NDArray[np.float32]:
    """Predict each audited row by the network that was trained without the row's fold.

    Returns `answer`'s predictions (N, K), by default probabilities. Finished folds are read from
    `folder`. Raises TrainingError as any training does.
    """
    silence_chatter()
    num_outputs = len(training.data.manifest.classes) or 1
    answers = np.empty((len(training.folds), num_outputs), np.float32)
    for fold in range(training.num_folds):
        name = f"fold {fold + 1}/{training.num_folds}"
        path = folder / f"fold-{fold}.npy"
        if path.is_file():
            print(f"{name}  was finished before", flush=True)
        else:
            _write_array(path, _predict_fold(training, fold, name, folder, answer))
        answers[training.folds == fold] = np.load(path, allow_pickle=False)
    return answers


def _predict_fold(
    training: FoldTraining, fold: int, name: str, folder: Path, answer: Answer
) -> NDArray[np.float32]:
    params, manifest = training.params, training.data.manifest
    network = initial_network(training.seed, params, network_spec(params, manifest))
    training, stores = training.with_features(network)
    held_out = training.held_out(fold)
    data = replace(training.data, train=[training.others(fold)], val=held_out, soft=None)
    if are_trees(params.network):
        # Trees predict after the last round, as networks do after the last epoch.
        rounds = training.num_epochs or params.epochs
        whole = params.model_copy(
            update={"epochs": rounds, "early_stopping_patience": None, "keep": "last"}
        )
        fit: Callable[..., object] = input_kind(manifest.input.kind).load_part("fit_trees")
        fit(network, training.seed, whole, data, own_threads(training.placement) or 1)
        print(f"{name}  {rounds} rounds", flush=True)
    else:
        printer = EpochPrinter(name, "the fold")
        train_short(
            network,
            training.seed,
            params,
            training.placement,
            data,
            [*stores, printer],
            folder,
            training.num_epochs,
        )
    device = "cuda" if training.placement.accelerator == "gpu" else "cpu"
    return answer(network, held_out.inputs, params.max_batch_per_device, device)


def _write_array(path: Path, array: NDArray[np.float32]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    files.write_bytes(path, buffer.getvalue())
