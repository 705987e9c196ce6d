"""What a training is, decided before its first step: where it reads and writes, its data, its network, how it runs.

Everything here is a function of the params, the packed data and the machine. Whatever trains (the stage, the audit, the profile,
the planner) starts from it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from slipway.config.sections import TrainParams
from slipway.data.augmentation.plan import AugmentPlan, open_augmented
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.system.errors import DataError
from slipway.training.batches.batches import StepShape, cut_step
from slipway.training.checkpoints.checkpoints import Save, Saves
from slipway.training.checkpoints.fingerprint import Fingerprint, take_fingerprint
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.processes import is_first_process
from slipway.training.distributed.strategies import Placement, place, this_host
from slipway.training.networks.drawing import drawn_network
from slipway.training.networks.networks import Network, NetworkSpec, Stretch
from slipway.training.networks.pretrained import pretrained_file, pretrained_normalisation
from slipway.training.recipe.losses import class_weights
from slipway.training.threads import can_have, own_threads


@dataclass(frozen=True)
class Paths:
    """Where a training reads and writes."""

    packed: Path
    augmented: Path
    checkpoint: Path
    metrics: Path
    live: Path
    work: Path  # resumable state
    tensorboard: Path
    log: Path  # of all trainings
    costs: Path  # what the last one took
    root: Path  # of the project, for the digests of its code


PROJECT_PATHS = Paths(
    packed=Path("data/packed"),
    augmented=Path("data/augmented"),
    checkpoint=Path("artifacts/model"),
    metrics=Path("metrics/train.json"),
    live=Path("reports/live"),
    work=Path(".work/train"),
    tensorboard=Path(".work/tensorboard"),
    log=Path(".work/log"),
    costs=Path(".work/plan/costs.json"),
    root=Path(),
)


@dataclass(frozen=True)
class TrainingData:
    """What a network learns from and is validated on."""

    manifest: PackedManifest
    train: list[PackedSplit]  # the split, and its offline copies where there are some
    val: PackedSplit
    plan: AugmentPlan

    @property
    def num_train(self) -> int:
        """Training rows, copies included."""
        return sum(map(len, self.train))

    @property
    def mean_weight(self) -> float:
        """Of the training rows; DataError if none counts."""
        mean = float(np.concatenate([split.weights for split in self.train]).mean())
        if not mean > 0:
            raise DataError(
                "every training row has the weight 0, so there is nothing to learn. Look at data.weight_column."
            )
        return mean

    def class_weights(self, params: TrainParams) -> Tensor | None:
        """(classes,) float32 for the loss, or None; ParamsError where `params` do not name the classes."""
        targets = np.concatenate([split.targets for split in self.train])
        return class_weights(params.class_weights, self.manifest.classes, targets)


@dataclass(frozen=True)
class Job:
    """All that is decided before the first step."""

    seed: int
    params: TrainParams
    paths: Paths
    placement: Placement
    data: TrainingData
    spec: NetworkSpec
    shape: StepShape
    fingerprint: Fingerprint

    @property
    def saves(self) -> Saves:
        """Its resumable state."""
        return Saves(self.paths.work, self.fingerprint, self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps."""
        return self.data.num_train // self.shape.batch_size

    def stretch(self, resumed: Save | None = None) -> Stretch:
        """How it is cut over processes, from the beginning on.

        After a save of equal processes they keep its number of threads, on which the last bits of
        sums depend, however many cores there are now.
        """
        threads = own_threads(self.placement)
        own = Stretch(
            first_step=0,
            strategy=self.placement.strategy,
            world_size=self.placement.world_size,
            per_device=self.shape.per_device,
            threads=threads,
        )
        if resumed is None or threads is None or (pinned := resumed.stretches[-1].threads) is None:
            return own
        kept = own.model_copy(update={"threads": pinned})
        return kept if resumed.stretches[-1].is_cut_as(kept) and can_have(pinned) else own

    @property
    def board(self) -> Path:
        """Its TensorBoard files."""
        return self.paths.tensorboard / self.fingerprint.name


def prepare(seed: int, params: TrainParams, paths: Paths) -> tuple[Job, Network]:
    """Decide all there is to decide before the first step, and draw the network's weights.

    ParamsError, UnavailableError, SchemaError, DataError where it cannot be trained as asked.
    """
    placement = place(params, this_host())
    data = open_data(paths)
    spec = network_spec(params, data.manifest)
    check_execution(params, placement, spec.task)
    network = drawn_network(seed, params, spec)
    data.class_weights(params)  # refused here rather than after the start
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    fingerprint = take_fingerprint(
        seed, params, placement, paths.packed, paths.augmented, paths.root, pretrained_file(params)
    )
    return Job(seed, params, paths, placement, data, spec, shape, fingerprint), network


def open_data(paths: Paths) -> TrainingData:
    """Map what `precompute` and `augment` left; SchemaError if it is missing or does not fit, IntegrityError if it was altered."""
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    train, val = (
        open_split(paths.packed, manifest, split, verify=is_first_process())
        for split in ("train", "val")
    )
    return TrainingData(manifest, [train, copies] if copies else [train], val, plan)


def network_spec(params: TrainParams, manifest: PackedManifest) -> NetworkSpec:
    """The network that `params` ask for, as the packed data needs it."""
    mean, std = manifest.mean, manifest.std
    if params.pretrained:
        mean, std = pretrained_normalisation(params.network, len(mean))
    return NetworkSpec(
        task=manifest.task,
        name=params.network,
        arguments=params.network_arguments,
        classes=manifest.classes,
        input=manifest.input,
        mean=mean,
        std=std,
        target_scale=manifest.target_scale,
    )


def count_parameters(network: nn.Module) -> int:
    """Values in all parameters."""
    return sum(parameter.numel() for parameter in network.parameters())
