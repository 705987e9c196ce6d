"""A whole training: from the packed store to a checkpoint, resumed where an equal one was killed.

Every rank runs this; rank 0 alone writes results. The seed of the weights, the order of rows,
augmentation and dropout are functions of `seed`, so equal inputs give equal weights.
"""

import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from slipway import files
from slipway.contract import is_classification, is_table
from slipway.cores import num_cores
from slipway.data.augmentation import AugmentPlan, open_augmented
from slipway.data.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.errors import DataError, TrainingError
from slipway.input_contract import InputContract
from slipway.params import TrainParams
from slipway.preprocess import ImageContract
from slipway.training.batches import (
    ImageChanges,
    StepShape,
    TrainingBatches,
    ValidationBatches,
    cut_step,
    training_loader,
    validation_loader,
)
from slipway.training.checkpoints import Save, Saver, Saves, consolidated_weights
from slipway.training.costs import CostMeter, write_costs
from slipway.training.fingerprint import Fingerprint, take_fingerprint
from slipway.training.freed_memory import keep_freed_memory
from slipway.training.module import TrainingModule
from slipway.training.networks import ModelCard, Network, NetworkSpec, build_network, save_checkpoint
from slipway.training.precision import allow_float16_on_cpu, fit_into_half
from slipway.training.processes import (
    end_at_once_on_sigterm,
    end_with_parent,
    ended_together,
    is_first_process,
    process_rank,
    was_started_by_another,
)
from slipway.training.progress import EpochLines, log_finished, loggers, progress_bars, silence_chatter
from slipway.training.run_log import RunLog
from slipway.training.step_clock import StepClock
from slipway.training.strategies import Placement, actual_setup, check_actual, place, requested_setup, this_machine, trainer_arguments
from slipway.training.telemetry import StepTelemetry, Where


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
    log: Path  # folder of the run log
    costs: Path  # what the last training really took
    root: Path  # of the project, for the digests of its code


PROJECT_PATHS = Paths(
    packed=Path("data/packed"),
    augmented=Path("data/augmented"),
    checkpoint=Path("artifacts/checkpoint"),
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
    """What a training reads."""

    manifest: PackedManifest
    train: list[PackedSplit]  # the split, and its offline copies where there are some
    val: PackedSplit
    plan: AugmentPlan

    @property
    def num_train(self) -> int:
        return sum(map(len, self.train))

    @property
    def mean_weight(self) -> float:
        """Of the training rows; DataError if none counts."""
        mean = float(np.concatenate([split.weights for split in self.train]).mean())
        if not mean > 0:
            raise DataError("every training row has the weight 0, so there is nothing to learn. Look at data.weight_column.")
        return mean


@dataclass(frozen=True)
class _Job:
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
        return Saves(self.paths.work, self.fingerprint)

    @property
    def board(self) -> Path:
        return self.paths.tensorboard / self.fingerprint.name


def train(seed: int, params: TrainParams, paths: Paths) -> None:
    """Train as `params` ask and write the checkpoint and its metrics.

    ParamsError, UnavailableError: it cannot run as asked. TrainingError: it went wrong. LockedError: another one runs.
    """
    silence_chatter()
    with RunLog(paths.log, process_rank()) as log:
        job, network = _prepare(seed, params, paths)
        log.name_run(job.fingerprint.name)
        _train(job, network, log)


def _train(job: _Job, network: Network, log: RunLog) -> None:
    params, paths, first = job.params, job.paths, is_first_process()
    num_parameters = count_parameters(network)  # before ZeRO-3 cuts it up
    if was_started_by_another():
        end_with_parent()
    with files.lock(paths.work / "lock", "a training") if first else nullcontext():
        resumed, problems = job.saves.newest()
        if first:
            job.saves.open()
            notes = [*problems, *(f"not resumed: {line}" for line in job.saves.others())]
            _print_start(job, network, notes, resumed)
            log.write("started", resumed_epoch=resumed.epoch if resumed else 0, notes=notes, **asdict(job.placement))
        meter = CostMeter(job.saves.root)
        trains = resumed is None or resumed.epoch < params.epochs
        if trains:
            _fit(job, network, resumed, log, meter)
        elif first:
            log_finished(paths.live, resumed.history if resumed else [])
        if first:
            _finish(job)
            log.write("finished")
            if trains:
                write_costs(paths.costs, job.fingerprint.name, num_parameters, meter, paths.checkpoint, job.board)


def _prepare(seed: int, params: TrainParams, paths: Paths) -> tuple[_Job, Network]:
    placement = place(params, this_machine())
    data = open_data(paths)
    spec = network_spec(params, data.manifest)
    torch.manual_seed(seed)
    network = build_network(spec)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    fingerprint = take_fingerprint(seed, params, placement, paths.packed, paths.augmented, paths.root)
    return _Job(seed, params, paths, placement, data, spec, shape, fingerprint), network


def open_data(paths: Paths) -> TrainingData:
    """Map what `precompute` and `augment` left; SchemaError if it is missing or does not fit."""
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    split = open_split(paths.packed, manifest, "train")
    return TrainingData(manifest, [split, copies] if copies else [split], open_split(paths.packed, manifest, "val"), plan)


def network_spec(params: TrainParams, manifest: PackedManifest) -> NetworkSpec:
    """The network that `params` ask for, for the data of `manifest`."""
    return NetworkSpec(
        task=manifest.task,
        name=params.network,
        arguments=params.network_arguments,
        classes=manifest.classes,
        input=manifest.input,
        mean=manifest.mean,
        std=manifest.std,
        target_scale=manifest.target_scale,
    )


def _fit(job: _Job, network: Network, resumed: Save | None, log: RunLog, meter: CostMeter) -> None:
    params, placement, data, shape = job.params, job.placement, job.data, job.shape
    prepare_process(placement, network)
    saver = Saver(job.saves, resumed, params.keep, params.checkpoint_every_epochs)
    clock = StepClock()
    lines = EpochLines(saver, data.num_train // shape.batch_size * shape.batch_size, clock)
    telemetry = StepTelemetry(params, _where(job, resumed), log, clock)
    bars = progress_bars(telemetry)
    trainer = pl.Trainer(
        **trainer_arguments(placement, shape.per_device),
        max_epochs=params.epochs,
        accumulate_grad_batches=shape.num_accumulated,
        gradient_clip_val=params.gradient_clip_norm or None,
        callbacks=[_SetupCheck(placement), lines, telemetry, meter, saver, *bars],
        logger=loggers(job.paths.live) if is_first_process() else False,
        profiler=clock,
        enable_progress_bar=bool(bars),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        deterministic="warn",
        default_root_dir=job.paths.work,
    )
    classes = is_classification(data.manifest.task)
    on_gpu = placement.accelerator == "gpu"
    changes = image_changes(data.plan, data.manifest.input, on_gpu)
    training = TrainingBatches(data.train, shape, trainer.global_rank, job.seed, changes, classes=classes)
    validation = ValidationBatches(data.val, params.max_batch_per_device, placement.world_size, trainer.global_rank, classes=classes)
    with ended_together(trainer):
        trainer.fit(
            TrainingModule(network, params, job.seed, training.num_steps, training.ids, data.mean_weight),
            training_loader(training, params.num_workers, first_epoch=resumed.epoch if resumed else 0, pin_memory=on_gpu),
            validation_loader(validation, params.num_workers, pin_memory=on_gpu),
            ckpt_path=str(job.saves.state(resumed.epoch)) if resumed else None,
            weights_only=True,
        )


def _where(job: _Job, resumed: Save | None) -> Where:
    return Where(
        board=job.board,
        rows_per_step=job.shape.batch_size,
        num_accumulated=job.shape.num_accumulated,
        steps_per_epoch=job.data.num_train // job.shape.batch_size,
        history=resumed.history if resumed else [],
    )


def image_changes(plan: AugmentPlan, contract: InputContract, on_gpu: bool) -> ImageChanges | None:
    """What is done to images, on the device where that is a GPU; None for tables."""
    return ImageChanges(plan, contract.size_px, on_device=on_gpu) if isinstance(contract, ImageContract) else None


def prepare_process(placement: Placement, network: Network) -> None:
    """Set torch, the allocator and `network` up for `placement`."""
    # Deterministic mode would also fill every new tensor, DeepSpeed's buckets of 400 MB in each step among them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    keep_freed_memory()
    if placement.accelerator == "cpu":
        torch.set_num_threads(max(1, num_cores() // placement.devices))
    if placement.half_dtype:
        fit_into_half(network, placement.half_dtype)
        if placement.accelerator == "cpu" and placement.half_dtype == torch.float16:
            allow_float16_on_cpu()
    if placement.precision == "32-true":
        torch.backends.cudnn.allow_tf32 = False  # which torch allows in convolutions: 10 bits of mantissa, not 23
    if placement.zero_stage is None and not is_table(network.spec.task):  # DeepSpeed views weights as flat bytes, which this layout forbids
        network.to(memory_format=torch.channels_last)  # images arrive as NHWC, so no layout is ever changed


class _SetupCheck(pl.Callback):
    """Ends a run that is not what was requested before its first step."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_actual(self._placement.expected, actual_setup(trainer))
        end_at_once_on_sigterm()


def _finish(job: _Job) -> None:
    save, problems = job.saves.newest()
    if save is None or save.epoch < job.params.epochs:
        raise TrainingError(
            f"after {job.params.epochs} epochs the newest whole save is of epoch {save.epoch if save else 0}: {'; '.join(problems)}. "
            "Run `dvc repro` again; it goes on from there."
        )
    weights = consolidated_weights(job.saves.state(save.kept_epoch))
    metrics = save.history[save.kept_epoch - 1]
    card = ModelCard(
        format_version=2,
        network=job.spec,
        num_parameters=count_parameters(_network_with(job.spec, weights)),
        weights_sha256="",  # known when they are written
        epochs=save.epoch,
        kept_epoch=save.kept_epoch,
        metrics=metrics,
        requested=requested_setup(job.params),
        actual=save.actual,
        seed=job.seed,
        params=job.params.model_dump(mode="json"),
        digests=_digests(job.fingerprint),
        versions=job.fingerprint.versions,
        git_revision=_git_revision(job.paths.root),
    )
    files.write_json(
        job.paths.metrics,
        {
            "epochs": save.epoch,
            "kept_epoch": save.kept_epoch,
            **_short(metrics),
            "strategy": save.actual.strategy,
            "precision": save.actual.precision,
            "processes": save.actual.world_size,
        },
    )
    save_checkpoint(job.paths.checkpoint, card, weights)
    job.saves.remove()
    print(
        f"kept epoch {save.kept_epoch} of {save.epoch} ({job.params.keep}) in {job.paths.checkpoint}, "
        f"measured on {len(job.data.val):,} validation rows"
    )


def _network_with(spec: NetworkSpec, weights: Mapping[str, Tensor]) -> Network:
    """Strictly: what was put together from shards has every weight of the network, in its shape, and nothing else.

    In a new network, since ZeRO-3 leaves the trained one with empty parameters.
    """
    network = build_network(spec)
    network.load_state_dict(dict(weights), strict=True)
    return network


def _digests(fingerprint: Fingerprint) -> dict[str, str]:
    params = files.digest_json(fingerprint.train)
    return {"fingerprint": fingerprint.digest, "params": params, **fingerprint.data, **fingerprint.code}


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in metrics.items() if name != "learning_rate"}


def count_parameters(network: Network) -> int:
    """Values in all parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _git_revision(root: Path) -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def without_effect(params: TrainParams, classes: list[str]) -> list[str]:
    """What is asked for and does nothing here; `classes` is empty for a numeric target."""
    if params.label_smoothing and not classes:
        return [f"train.label_smoothing {params.label_smoothing:g} is without effect for a numeric target"]
    return []


def _print_start(job: _Job, network: Network, notes: list[str], resumed: Save | None) -> None:
    spec, shape, placement, num_train = job.spec, job.shape, job.placement, job.data.num_train
    answers = f"{len(spec.classes)} classes" if spec.classes else "a number"
    print(f"network   {spec.name}, {count_parameters(network):,} parameters, {'x'.join(map(str, spec.input.shape))} -> {answers}")
    print(f"rows      {num_train:,} for training, {len(job.data.val):,} for validation")
    print(
        f"step      {shape.batch_size} rows = {shape.per_device} per device x {shape.world_size} process{'es' * (shape.world_size > 1)} "
        f"x {shape.num_accumulated} accumulated; {num_train // shape.batch_size} steps per epoch"
    )
    print(f"runs as   {placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}")
    for reason in placement.reasons:
        print(f"  auto    {reason}")
    for note in [*notes, *without_effect(job.params, spec.classes)]:
        print(f"note      {note}")
    if resumed:
        print(f"resumed   after epoch {resumed.epoch}", flush=True)
