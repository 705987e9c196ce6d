"""Decisions before the first step of a training: paths, data, network, placement, step shape.

They follow from the params, the packed data and the machine only. The train stage, the audit, the
profiler and the planner all start from them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.artifacts.locations import AUGMENTED, LIVE, MODEL, PACKED, TRAINED
from slipway.artifacts.training_setup import RunSegment
from slipway.config.training import TrainParams
from slipway.data.augmentation.plan import AugmentPlan, open_augmented
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.kinds.inputs import ENCODER
from slipway.kinds.registry import are_trees
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import DataError, ParamsError
from slipway.system.malloc import GATHERED_BLOCK_BYTES, keep_freed_pages
from slipway.training.batches.batches import StepShape, cut_step
from slipway.training.batches.row_selection import select
from slipway.training.batches.soft_answers import SoftAnswers, read_soft_answers
from slipway.training.checkpoints.callback import has_ended
from slipway.training.checkpoints.checkpoints import Checkpoint, CheckpointStore
from slipway.training.checkpoints.fingerprint import Fingerprint, take_fingerprint
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.pipeline import check_stages
from slipway.training.distributed.placement import Placement, place, this_host
from slipway.training.distributed.processes import is_first_process
from slipway.training.distributed.state_on_disk import check_offload_path
from slipway.training.networks.blocks import check_blocks
from slipway.training.networks.divided_layers import check_layers
from slipway.training.networks.encoders import read_config
from slipway.training.networks.initialization import (
    initial_network,
    pretrained_file,
    start_normalisation,
)
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import Network, NetworkSpec
from slipway.training.recipe.losses import class_weights

# Other values are refused when params.yaml is read.
_TREES_RUN = {"strategy": "single", "precision": "32-true", "accelerator": "cpu", "devices": 1}


@dataclass(frozen=True)
class LeftOut:
    """The fold of training rows that a training of an ensemble member leaves out.

    The fold of a row is drawn from its id and the seed.
    """

    fold: int
    num_folds: int
    seed: int

    def keeps(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return a mask (N,) of the rows that the member learns from: all rows outside the fold."""
        folds = (uniform(self.seed, 0, keys, "left out") * self.num_folds).astype(np.int64)
        kept: NDArray[np.bool_] = folds != self.fold
        return kept

    def without(self, splits: Sequence[PackedSplit]) -> list[PackedSplit]:
        """Return the training split, and its offline copies, without the rows of the fold."""
        keeps = self.keeps(splits[0].keys)
        originals = [np.arange(len(split)) % len(keeps) for split in splits]  # of copies, too
        return [
            select([split], np.flatnonzero(keeps[own]), tuple(split.inputs.shape[1:]))
            for split, own in zip(splits, originals, strict=True)
        ]


@dataclass(frozen=True)
class Paths:
    """Files and folders that a training reads and writes, and the fold that it leaves out."""

    packed: Path
    augmented: Path
    model: Path
    metrics: Path
    live: Path
    work: Path  # folder of the resumable state
    tensorboard: Path
    log: Path  # log of all trainings
    costs: Path  # costs of the last training
    root: Path  # root of the project, for the digests of its code
    features: Path = Path(".work/features")  # stores of the features of frozen bodies
    soft: Path | None = None  # file of soft targets, from which a student learns
    left_out: LeftOut | None = None  # training rows that a member does not learn from

    def further_data(self) -> dict[str, str]:
        """Return the digests of the left-out fold and of the soft targets, by name.

        They become part of the training's fingerprint.
        """
        soft = {"soft": files.sha256_file(self.soft)} if self.soft else {}
        rows = {"left_out": files.digest_json(asdict(self.left_out))} if self.left_out else {}
        return soft | rows


PROJECT_PATHS = Paths(
    packed=PACKED,
    augmented=AUGMENTED,
    model=MODEL,
    metrics=TRAINED,
    live=LIVE,
    work=Path(".work/train"),
    tensorboard=Path(".work/tensorboard"),
    log=Path(".work/log"),
    costs=Path(".work/plan/costs.json"),
    root=Path(),
)


@dataclass(frozen=True)
class TrainingData:
    """Training and validation rows of the packed store, with offline copies and soft targets."""

    manifest: PackedManifest
    train: list[PackedSplit]  # the split, and its offline copies if there are any
    val: PackedSplit
    plan: AugmentPlan
    soft: SoftAnswers | None = None  # a teacher's outputs for the training rows
    head: str | None = None  # the layer that is trained on the rows' features; None without them

    @property
    def num_train(self) -> int:
        """The number of training rows, offline copies included."""
        return sum(map(len, self.train))

    @property
    def mean_weight(self) -> float:
        """The mean weight of the training rows. Raises DataError if all weights are 0."""
        mean = float(np.concatenate([split.weights for split in self.train]).mean())
        if not mean > 0:
            raise DataError(
                "every training row has the weight 0, so there is nothing to learn; expected some "
                "above 0. Correct data.weight_column."
            )
        return mean

    def class_weights(self, params: TrainParams) -> Tensor | None:
        """Return the class weights for the loss, (classes,) float32, or None.

        Raises ParamsError if `params` do not name the classes.
        """
        targets = np.concatenate([split.targets for split in self.train])
        return class_weights(params.class_weights, self.manifest.classes, targets)


@dataclass(frozen=True)
class Job:
    """All decisions made before the first step of a training."""

    seed: int
    params: TrainParams
    paths: Paths
    placement: Placement
    data: TrainingData
    spec: NetworkSpec
    shape: StepShape
    fingerprint: Fingerprint

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.paths.work, self.fingerprint, self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return self.data.num_train // self.shape.batch_size

    @property
    def patience(self) -> int | None:
        """Epochs without a lower validation loss that end this training; None: never early."""
        return self.params.patience(len(self.data.val))

    def has_ended(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Return True if a training with this `history` of metrics is complete."""
        return has_ended(history, self.params.epochs, self.patience)

    def segment(self, resumed: Checkpoint | None = None) -> RunSegment:
        """Return the process layout of this training, as a run segment.

        If the layout equals that of the `resumed` checkpoint, the number of threads is taken from
        the checkpoint, because the last bits of sums depend on it.
        """
        threads = own_threads(self.placement)
        fresh = RunSegment(
            first_step=0,
            strategy=self.placement.strategy,
            world_size=self.placement.world_size,
            per_device=self.shape.per_device // self.shape.num_micro_batches,
            threads=threads,
            model_parallel=self.placement.model_parallel,
        )
        saved_threads = resumed.segments[-1].threads if resumed else None
        if resumed is None or threads is None or saved_threads is None:
            return fresh
        same_threads = fresh.model_copy(update={"threads": saved_threads})
        has_same_layout = resumed.segments[-1].has_same_layout(same_threads)
        return same_threads if has_same_layout and can_have(saved_threads) else fresh

    @property
    def board(self) -> Path:
        """The folder that holds this training's TensorBoard files."""
        return self.paths.tensorboard / self.fingerprint.name


def prepare(seed: int, params: TrainParams, paths: Paths) -> tuple[Job, Network]:
    """Decide everything that must be known before the first step, and initialize the network.

    Raises ParamsError, UnavailableError, SchemaError or DataError if the training is impossible.
    """
    placement = place(placed(params), this_host())
    data = open_data(
        paths.packed, paths.augmented, paths.soft, paths.left_out, verify=is_first_process()
    )
    spec = network_spec(params, data.manifest)
    check_execution(params, placement, spec.task)
    check_offload_path(params.offload_path)
    network = _initial_network(seed, params, spec, placement, paths.work)
    data.class_weights(params)  # raises an error here rather than after the start
    shape = step_shape(params, placement)
    fingerprint = take_fingerprint(
        seed,
        params,
        placement,
        paths.packed,
        paths.augmented,
        paths.root,
        pretrained_file(params),
        paths.further_data(),
    )
    return Job(seed, params, paths, placement, data, spec, shape, fingerprint), network


def _initial_network(
    seed: int, params: TrainParams, spec: NetworkSpec, placement: Placement, work: Path
) -> Network:
    """Initialize the network, in a file if each process will hold only a part of its weights."""
    if not placement.divides_weights:
        return initial_network(seed, params, spec)
    keep_freed_pages(GATHERED_BLOCK_BYTES)  # whole weights would leave gaps in the heap
    # Not in `work`, which may be a link to a bucket, where no file can be mapped for writing.
    with MappedWeights(work.parent) as mapped:
        network = initial_network(seed, params, spec)
        if placement.strategy == "fsdp":
            check_blocks(network, placement.strategy)
    check_division(network, placement)
    network.mapped = mapped
    return network


def check_division(network: Network, placement: Placement) -> None:
    """Raise a ParamsError if the strategy cannot divide `network` over the processes."""
    size = placement.model_parallel or 1
    if placement.strategy == "tensor_parallel":
        check_layers(network, size)
    if placement.strategy == "fsdp" and placement.model_parallel:
        check_layers(network, size, placement.num_readers)
    if placement.strategy == "pipeline":
        check_stages(network, size)


def step_shape(params: TrainParams, placement: Placement) -> StepShape:
    """Divide a step over processes; a pipeline cuts each batch into micro-batches instead.

    Raises ParamsError if the batch cannot be divided equally.
    """
    size, copies, limit = params.batch_size, placement.num_readers, params.max_batch_per_device
    who = "copies of the network" if placement.model_parallel else "processes"
    if placement.strategy != "pipeline":
        return cut_step(size, copies, limit, who)
    stages = placement.model_parallel or 1
    if size < stages * copies:
        raise ParamsError(
            f"train.batch_size is {size}, but each pipeline of {stages} processes needs as many "
            f"micro-batches. Use {stages * copies} or more."
        )
    rows = cut_step(size, copies, size, who).per_device
    number = cut_step(rows, 1, min(limit, rows // stages)).num_accumulated
    return StepShape(size, rows, copies, 1, num_micro_batches=number)


def placed(params: TrainParams) -> TrainParams:
    """Return `params` with each "auto" replaced by the default of the network."""
    return params.model_copy(update=_TREES_RUN) if are_trees(params.network) else params


def open_data(
    packed: Path,
    augmented: Path,
    soft: Path | None = None,
    left_out: LeftOut | None = None,
    *,
    verify: bool = True,
) -> TrainingData:
    """Memory-map the outputs of the stages `precompute` and `augment`.

    `soft` is a file of soft targets. Raises SchemaError if a file is missing or does not fit. With
    `verify`, raises IntegrityError if a file was altered.
    """
    manifest = read_manifest(packed)
    plan, copies = open_augmented(augmented, manifest)
    train, val = (open_split(packed, manifest, split, verify=verify) for split in ("train", "val"))
    rows = [train, copies] if copies else [train]
    if left_out:
        rows = left_out.without(rows)
    answers = read_soft_answers(soft, sum(map(len, rows))) if soft else None
    return TrainingData(manifest, rows, val, plan, answers)


def network_spec(params: TrainParams, manifest: PackedManifest) -> NetworkSpec:
    """Return the specification of the network that `params` name.

    Classes, input and normalisation are those of the packed training data, in `manifest`.
    """
    mean, std, arguments = manifest.mean, manifest.std, params.network_arguments
    if params.network == ENCODER:
        arguments = {**arguments, "config": read_config(Path(params.pretrained or ""))}
    else:
        mean, std = start_normalisation(params, mean, std)
    return NetworkSpec(
        task=manifest.task,
        name=params.network,
        arguments=arguments,
        classes=manifest.classes,
        input=manifest.input,
        mean=mean,
        std=std,
        target_scale=manifest.target_scale,
    )


def own_threads(placement: Placement) -> int | None:
    """Return the threads of each process: an equal part of the node's cores, or None on a GPU."""
    if placement.accelerator != "cpu":
        return None
    return min(_thread_limit(), max(1, num_cores() // placement.devices))


def can_have(threads: int) -> bool:
    """Return True if OpenMP allows `threads` threads, even if that exceeds the number of cores."""
    return threads <= _thread_limit()


def _thread_limit() -> int:
    """Return `OMP_THREAD_LIMIT`, which OpenMP obeys and torch does not report."""
    text = os.environ.get("OMP_THREAD_LIMIT", "")
    return int(text) if text.isdecimal() and int(text) > 0 else sys.maxsize


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
