"""Features of a frozen body, which are computed once instead of in every epoch.

If `train.freeze_epochs` is at least `train.epochs`, all of the network but its last layer, the
head, stays as it is. What it computes for a row, the input of the head, is then the same in every
epoch, so it is stored, and each epoch trains the head alone on it. The trainer, its checkpoints and
the saved model have the whole network, as always. Where something random stands before the head
(augmentation, dropout), the body computes in every epoch, and `frozen_body` says why.

.work/features/KEY/features.json        the shapes and SHA-256 of the files; written last
.work/features/KEY/{train,copies,val}.npy    (N, D) float32, in the order of the packed store
.work/features/KEY/parts/               parts of a store that is not complete yet

KEY is a digest of all that the bits depend on, so every training of the same body on the same rows
shares a store: the next run, the trials of a search, the members of an ensemble, the audit.
"""

import hashlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray

from slipway.config.training import TrainParams
from slipway.data.augmentation.plan import AugmentPlan, operations, text_operations
from slipway.data.store.packed import Inputs
from slipway.inputs.texts import TextContract
from slipway.kinds.code_digest import stage_files
from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.batches.row_selection import select
from slipway.training.distributed.collectives import gather_objects, num_ranks
from slipway.training.distributed.placement import Placement
from slipway.training.distributed.processes import is_first_process, launched_rank
from slipway.training.distributed.stop_signals import Stopped
from slipway.training.job import TrainingData, network_spec
from slipway.training.networks.features import answer_and_features
from slipway.training.networks.frozen_parts import FrozenBody, frozen_weights, probe_body
from slipway.training.networks.initialization import initial_network
from slipway.training.networks.networks import Network

MANIFEST = "features.json"
_BATCH_ROWS = 64  # rows in a pass of the body; fixed, because the last bits depend on it
_PART_ROWS = 1024  # rows that a killed run loses at most, in each process
_MOST_STORES = 8  # those that were used last stay
_PACKAGES = ("torch", "timm", "transformers")
# Arguments of an encoder that act behind the features, or on time and memory only.
_NOT_OF_BODY = ("dropout", "layer_decay", "checkpoint_activations")


def frozen_body(
    network: Network, params: TrainParams, plan: AugmentPlan, placement: Placement
) -> FrozenBody | str | None:
    """Return the body whose features can be stored, or the reason why they cannot be.

    Returns None if `params` do not freeze the body in all epochs.
    """
    if not params.freezes_body:
        return None
    is_text = isinstance(network.spec.input, TextContract)
    if names := (text_operations if is_text else operations)(plan):
        return f"augment.{names[0]} draws new rows in each"
    if placement.divides_weights:
        return f"strategy {placement.strategy!r} divides the body over processes"
    if params.compile:
        return "train.compile compiles the whole network"
    return probe_body(network, params)


class StoredFeatures:
    """The features of a split, (N, D) float32, mapped into memory at the first access."""

    dtype = np.dtype(np.float32)

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self.path, self.shape = path, shape

    @cached_property
    def _rows(self) -> NDArray[np.float32]:
        return np.asarray(np.load(self.path, mmap_mode="r", allow_pickle=False))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[np.float32]:
        return np.asarray(self._rows[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFeatures, (self.path, self.shape)


class _StoreManifest(Contract):
    """The content of `features.json`."""

    format_version: Literal[1]
    network: str
    files: dict[str, str]  # hex SHA-256 by name of the file


class _FeaturePart(NamedTuple):
    """Consecutive rows of a split, whose features one process computes at a time."""

    split: str
    begin: int
    end: int

    @property
    def file_name(self) -> str:
        return f"{self.split}-{self.begin}.npy"


@dataclass(frozen=True)
class FeatureStore:
    """The features of all rows of a packed store, computed by one frozen body."""

    folder: Path
    params: TrainParams
    data: TrainingData  # all rows, none left out
    body: FrozenBody

    @staticmethod
    def of(
        root: Path,
        network: Network,
        params: TrainParams,
        data: TrainingData,
        body: FrozenBody,
        placement: Placement,
    ) -> "FeatureStore":
        """Name the store below `root`; call it once the threads of this process are set."""
        return FeatureStore(root / _key(network, params, data, placement), params, data, body)

    def attached(self) -> TrainingData:
        """Return the data with the features of its rows, which the store has to hold by then."""
        train = [
            replace(split, features=self._features(name, len(split)))
            for name, split in zip(("train", "copies"), self.data.train, strict=False)
        ]
        val = replace(self.data.val, features=self._features("val", len(self.data.val)))
        return replace(self.data, train=train, val=val, head=self.body.head)

    def _features(self, name: str, num_rows: int) -> Inputs:
        return StoredFeatures(self.folder / f"{name}.npy", (num_rows, self.body.width))

    def fill(self, device: str, is_stopped: Callable[[], int] = lambda: 0) -> str:
        """Compute the features unless the store has them; return a line about it.

        Every rank has to call it, and computes its share. Raises Stopped if `is_stopped` returns
        the number of a signal. Finished parts stay for the next run.
        """
        began, network = time.perf_counter(), None
        while not gather_objects(is_first_process() and self._is_complete())[0]:
            if network is None:
                spec = network_spec(self.params, self.data.manifest)
                network = initial_network(0, self.params, spec)
            own = [*self._parts()][launched_rank()[0] :: num_ranks()]
            for part in own:
                self._compute(part, network, device, is_stopped)
            gather_objects(None)  # waits for all
            if is_first_process():
                self._join()
        if is_first_process():
            os.utime(self.folder)
            _remove_old(self.folder)
        if network is None:
            return f"{self.body.width:,} of each row, computed by an earlier training"
        seconds = time.perf_counter() - began
        return f"{self.body.width:,} of each row, computed once, in {seconds:,.1f} s"

    @cached_property
    def _inputs(self) -> dict[str, Inputs]:
        """The rows of each split in the size of the network."""
        shape = tuple(self.data.manifest.input.shape)
        named = dict(zip(("train", "copies"), self.data.train, strict=False))
        return {
            name: select([split], np.arange(len(split)), shape).inputs
            for name, split in {**named, "val": self.data.val}.items()
        }

    def _parts(self) -> Iterator[_FeaturePart]:
        for name, inputs in self._inputs.items():
            for begin in range(0, len(inputs), _PART_ROWS):
                yield _FeaturePart(name, begin, min(begin + _PART_ROWS, len(inputs)))

    def _compute(
        self, part: _FeaturePart, network: Network, device: str, is_stopped: Callable[[], int]
    ) -> None:
        path = self.folder / "parts" / part.file_name
        if path.exists() or (self.folder / MANIFEST).exists():
            return
        rows = np.asarray(self._inputs[part.split][np.arange(part.begin, part.end)])
        order = np.arange(len(rows))
        if self.data.manifest.input.varies_in_length:
            order = np.argsort(np.count_nonzero(rows, axis=1), kind="stable")  # little padding
        features = np.empty((len(rows), self.body.width), np.float32)
        size = _batch_rows(self.params)
        network.eval().to(device)
        for begin in range(0, len(rows), size):
            if number := is_stopped():
                raise Stopped(number)
            places = order[begin : begin + size]
            inputs = torch.from_numpy(rows[places]).to(device)
            exact_convolutions = torch.backends.cudnn.flags(
                enabled=True, benchmark=False, deterministic=True, allow_tf32=False
            )
            with torch.inference_mode(), exact_convolutions:
                found = answer_and_features(network, self.body.head, inputs)[1]
            features[places] = found.cpu().numpy()
        buffer = io.BytesIO()
        np.save(buffer, features, allow_pickle=False)
        files.write_bytes(path, buffer.getbuffer())

    def _join(self) -> None:
        """Write the files from their parts; another training may have done it meanwhile."""
        digests = {}
        for name, inputs in self._inputs.items():
            path = self.folder / f"{name}.npy"
            try:
                with files.new_file(path) as file:
                    header = {"descr": "<f4", "fortran_order": False}
                    shape = (len(inputs), self.body.width)
                    np.lib.format.write_array_header_1_0(file, {**header, "shape": shape})
                    for part in self._parts():
                        if part.split == name:
                            place = self.folder / "parts" / part.file_name
                            file.write(np.load(place, allow_pickle=False).tobytes())
            except FileNotFoundError:
                return
            digests[path.name] = files.sha256_file(path)
        manifest = _StoreManifest(format_version=1, network=self.params.network, files=digests)
        files.write_json(self.folder / MANIFEST, manifest.model_dump(mode="json"))
        shutil.rmtree(self.folder / "parts", ignore_errors=True)

    def _is_complete(self) -> bool:
        """Return True if all files are as they were written; remove a damaged store."""
        path = self.folder / MANIFEST
        if not path.exists():
            return False
        try:
            wanted = _StoreManifest.model_validate_json(path.read_bytes()).files
            found = {name: files.sha256_file(self.folder / name) for name in wanted}
        except (OSError, ValueError) as error:
            wanted, found = {}, {str(path): str(error)}
        if found != wanted:
            shutil.rmtree(self.folder)
            print(f"note      {self.folder} was altered, so its features are computed again")
        return found == wanted


class FeatureCallback(pl.Callback):
    """Fills a store of features when all processes run, before the first step."""

    def __init__(self, store: FeatureStore, is_stopped: Callable[[], int] = lambda: 0) -> None:
        self._store, self._is_stopped = store, is_stopped

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        line = self._store.fill("cpu" if device.type == "cpu" else str(device), self._is_stopped)
        if trainer.is_global_zero:
            print(f"features  {line}", flush=True)


def _key(network: Network, params: TrainParams, data: TrainingData, placement: Placement) -> str:
    """Return a digest of all that the bits of the features depend on."""
    spec, weights = network.spec, hashlib.sha256()
    for name, value in sorted(frozen_weights(network).items()):
        weights.update(name.encode())
        weights.update(value.detach().cpu().contiguous().numpy().tobytes())
    splits = {"train": data.manifest.splits["train"], "val": data.manifest.splits["val"]}
    if data.plan.offline:
        splits["copies"] = data.plan.offline
    on_gpu = placement.accelerator == "gpu"
    depends_on = {
        "weights": weights.hexdigest(),
        "network": spec.name,
        "arguments": {
            name: value for name, value in spec.arguments.items() if name not in _NOT_OF_BODY
        },
        "input": spec.input.model_dump(mode="json"),
        "pixels": [spec.mean, spec.std],
        "rows": {
            split: {name: one.files[name] for name in one.files if name.startswith("inputs")}
            for split, one in splits.items()
        },
        "batch": _batch_rows(params),
        "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads",
        "versions": {name: _version(name) for name in _PACKAGES},
        "code": stage_files(Path(), "train"),
    }
    return files.digest_json(depends_on)[:16]


def _batch_rows(params: TrainParams) -> int:
    return min(_BATCH_ROWS, params.max_batch_per_device)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _remove_old(used: Path) -> None:
    """Remove all stores beside `used` but those that were used last."""
    stores = [path for path in used.parent.iterdir() if path.is_dir() and path != used]
    stores.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in stores[_MOST_STORES - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def without_store(data: TrainingData, body: FrozenBody) -> TrainingData:
    """Return the data with zeros for features, to measure the speed of a training."""

    def zeros(num_rows: int) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), (num_rows, body.width))

    train = [replace(split, features=zeros(len(split))) for split in data.train]
    val = replace(data.val, features=zeros(len(data.val)))
    return replace(data, train=train, val=val, head=body.head)
