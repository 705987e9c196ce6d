"""A whole training: from the packed store to a checkpoint, resumed where an equal one was killed.

Every rank runs this; rank 0 alone writes results. The seed of the weights, the order of rows,
augmentation and dropout are functions of `seed`, so equal inputs give equal weights.
"""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
from slipway.training.consolidation import consolidated_weights
from slipway.training.fingerprint import Fingerprint, take_fingerprint
from slipway.training.freed_memory import keep_freed_memory
from slipway.training.module import TrainingModule
from slipway.training.networks import ModelCard, Network, NetworkSpec, Stretch, build_network, save_checkpoint
from slipway.training.positions import Position
from slipway.training.precision import allow_float16_on_cpu, fit_into_half
from slipway.training.processes import end_with_parent, ended_together, is_first_process, leave_signals_alone, was_started_by_another
from slipway.training.progress import EpochLines, log_finished, loggers, progress_bars, silence_chatter
from slipway.training.resuming import Resumption
from slipway.training.saver import Rhythm, Saver
from slipway.training.saves import Save, Saves
from slipway.training.stopping import Signals, Stopped, requeue
from slipway.training.strategies import Placement, actual_setup, check_actual, place, requested_setup, this_machine, trainer_arguments


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
    root: Path  # of the project, for the digests of its code


@dataclass(frozen=True)
class _Data:
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
    data: _Data
    spec: NetworkSpec
    shape: StepShape
    fingerprint: Fingerprint

    @property
    def saves(self) -> Saves:
        return Saves(self.paths.work, self.fingerprint, self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps."""
        return self.data.num_train // self.shape.batch_size

    @property
    def stretch(self) -> Stretch:
        """How it is cut over processes, from the beginning on."""
        return Stretch(
            first_step=0, strategy=self.placement.strategy, world_size=self.placement.world_size, per_device=self.shape.per_device
        )


def train(seed: int, params: TrainParams, paths: Paths) -> None:
    """Train as `params` ask and write the checkpoint and its metrics.

    ParamsError, UnavailableError: it cannot run as asked. TrainingError: it went wrong. LockedError: another one runs.
    """
    silence_chatter()
    job, network = _prepare(seed, params, paths)
    first = is_first_process()
    if was_started_by_another():
        end_with_parent()
    with files.lock(paths.work / "lock", "a training") if first else nullcontext():
        resumed, problems = job.saves.newest()
        if first:
            job.saves.open()
            _print_start(job, network, [*problems, *job.saves.others()], resumed)
        if resumed is None or resumed.epoch < params.epochs:
            _fit(job, network, resumed)
        elif first:
            log_finished(*_logs(job), resumed.history)
        if first:
            _finish(job)


def _prepare(seed: int, params: TrainParams, paths: Paths) -> tuple[_Job, Network]:
    placement = place(params, this_machine())
    data = _open_data(paths)
    spec = _network_spec(params, data.manifest)
    torch.manual_seed(seed)
    network = build_network(spec)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    fingerprint = take_fingerprint(seed, params, placement, paths.packed, paths.augmented, paths.root)
    return _Job(seed, params, paths, placement, data, spec, shape, fingerprint), network


def _open_data(paths: Paths) -> _Data:
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    split = open_split(paths.packed, manifest, "train")
    return _Data(manifest, [split, copies] if copies else [split], open_split(paths.packed, manifest, "val"), plan)


def _network_spec(params: TrainParams, manifest: PackedManifest) -> NetworkSpec:
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


def _logs(job: _Job) -> tuple[Path, Path]:
    return job.paths.tensorboard / job.fingerprint.name, job.paths.live


def _fit(job: _Job, network: Network, resumed: Save | None) -> None:
    params, placement, data, shape = job.params, job.placement, job.data, job.shape
    _prepare_process(placement, network)
    signals = Signals()
    rhythm = Rhythm(params.keep, params.checkpoint_every_epochs, params.checkpoint_every_minutes)
    steps = {"steps_per_epoch": job.steps_per_epoch, "num_accumulated": shape.num_accumulated}
    resumption = Resumption(job.saves, resumed, job.stretch, **steps)
    saver = Saver(job.saves, resumed, job.stretch, rhythm, signals, **steps)
    lines = EpochLines(saver, data.num_train // shape.batch_size * shape.batch_size)
    trainer = pl.Trainer(
        **trainer_arguments(placement, shape.per_device),
        max_epochs=params.epochs,
        accumulate_grad_batches=shape.num_accumulated,
        gradient_clip_val=params.gradient_clip_norm or None,
        callbacks=[_SetupCheck(placement), resumption, lines, saver, *progress_bars()],
        logger=loggers(*_logs(job)) if is_first_process() else False,
        enable_progress_bar=bool(progress_bars()),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        deterministic="warn",
        default_root_dir=job.paths.work,
    )
    classes = is_classification(data.manifest.task)
    on_gpu = placement.accelerator == "gpu"
    changes = _image_changes(data.plan, data.manifest.input, on_gpu)
    training = TrainingBatches(data.train, shape, trainer.global_rank, job.seed, changes, classes=classes)
    validation = ValidationBatches(data.val, params.max_batch_per_device, placement.world_size, trainer.global_rank, classes=classes)
    resumption.load_weights(network)
    leave_signals_alone(trainer)
    with ended_together(trainer), _stopping_said(saver, signals):
        trainer.fit(
            TrainingModule(network, params, job.seed, training.num_steps, training.ids, data.mean_weight),
            training_loader(training, params.num_workers, pin_memory=on_gpu, **resumption.first_place),
            validation_loader(validation, params.num_workers, pin_memory=on_gpu),
            ckpt_path=resumption.trainer_state,
            weights_only=True,
        )


@contextmanager
def _stopping_said(saver: Saver, signals: Signals) -> Iterator[None]:
    """Signals stop the training in the block; rank 0 tells where it stands then, and puts a Slurm job back into the queue."""
    signals.listen()
    try:
        yield
        if signals.received:
            raise Stopped(signals.received)
    except Stopped as stopped:
        if is_first_process():
            requeued = requeue() if stopped.signal == signal.SIGUSR1 else None
            what_next = requeued or "run the same command again to go on"
            print(f"stopped   by {stopped.signal.name} {_place(saver.saved)}, all saved; {what_next}", flush=True)
        raise
    finally:
        signals.release()


def _image_changes(plan: AugmentPlan, contract: InputContract, on_gpu: bool) -> ImageChanges | None:
    return ImageChanges(plan, contract.size_px, on_device=on_gpu) if isinstance(contract, ImageContract) else None


def _prepare_process(placement: Placement, network: Network) -> None:
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


def _finish(job: _Job) -> None:
    save, problems = job.saves.newest()
    if save is None or save.epoch < job.params.epochs:
        raise TrainingError(
            f"after {job.params.epochs} epochs the newest whole save is of epoch {save.epoch if save else 0}: {'; '.join(problems)}. "
            "Run `dvc repro` again; it goes on from there."
        )
    weights = consolidated_weights(job.saves.state(Position(save.kept_epoch, 0)))
    metrics = save.history[save.kept_epoch - 1]
    card = ModelCard(
        format_version=2,
        network=job.spec,
        num_parameters=_num_parameters(_network_with(job.spec, weights)),
        weights_sha256="",  # known when they are written
        epochs=save.epoch,
        kept_epoch=save.kept_epoch,
        metrics=metrics,
        requested=requested_setup(job.params),
        actual=save.actual,
        stretches=save.stretches,
        seed=job.seed,
        params=job.params.model_dump(mode="json"),
        digests=_digests(job.fingerprint, files.digest_json(job.params.model_dump(mode="json"))),
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


def _digests(fingerprint: Fingerprint, params: str) -> dict[str, str]:
    return {"fingerprint": fingerprint.digest, "params": params, **fingerprint.data, **fingerprint.code}


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in metrics.items() if name != "learning_rate"}


def _num_parameters(network: Network) -> int:
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
    print(f"network   {spec.name}, {_num_parameters(network):,} parameters, {'x'.join(map(str, spec.input.shape))} -> {answers}")
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
        print(f"resumed   {_place(resumed.position)}", flush=True)
        if not resumed.stretches[-1].is_cut_as(job.stretch):
            print(f"note      saved by {resumed.stretches[-1]}, resumed by {job.stretch}: the same rows in each step, but other last bits")


def _place(position: Position) -> str:
    return f"after epoch {position.epoch}" + (f" and {position.step} steps of the next" if position.step else "")
