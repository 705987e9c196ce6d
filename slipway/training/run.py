"""A whole training: from the packed store to a checkpoint, resumed where an equal one was killed.

Every rank runs this; rank 0 alone writes results. The seed of the weights, the order of rows,
augmentation and dropout are functions of `seed`, so equal inputs give equal weights.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from slipway import files
from slipway.data.augmentation import AugmentPlan, matrices, open_augmented
from slipway.data.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.errors import ParamsError
from slipway.params import TrainParams
from slipway.training.batches import StepShape, TrainingBatches, ValidationBatches, cut_step, training_loader, validation_loader
from slipway.training.checkpoints import Save, Saver, Saves, consolidated_weights
from slipway.training.fingerprint import Fingerprint, take_fingerprint
from slipway.training.module import TrainingModule
from slipway.training.networks import ImageNetwork, ModelCard, NetworkSpec, build_network, save_checkpoint
from slipway.training.precision import allow_float16_on_cpu, fit_into_half
from slipway.training.progress import EpochLines, loggers, progress_bars, silence_chatter
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


def train(seed: int, params: TrainParams, paths: Paths) -> None:
    """Train as `params` ask and write the checkpoint and its metrics.

    ParamsError, UnavailableError: it cannot run as asked. TrainingError: it went wrong. LockedError: another one runs.
    """
    silence_chatter()
    if params.warmup_epochs >= params.epochs:
        raise ParamsError(f"train.warmup_epochs is {params.warmup_epochs}, expected less than train.epochs {params.epochs}.")
    placement = place(params, this_machine())
    data = _open_data(paths)
    network = _fresh_network(seed, params, data.manifest)
    shape = cut_step(params.batch_size, placement.world_size, params.max_batch_per_device)
    fingerprint = take_fingerprint(seed, params, placement, paths.packed, paths.augmented, paths.root)
    saves = Saves(paths.work, fingerprint)
    first = _is_first_process()
    with files.lock(paths.work / "lock", "a training") if first else nullcontext():
        resumed, problems = saves.newest()
        if first:
            saves.open()
            _print_start(network, data, shape, placement, [*problems, *(f"not resumed: {line}" for line in saves.others())], resumed)
        if resumed is None or resumed.epoch < params.epochs:
            _fit(seed, params, paths, placement, data, network, shape, saves, resumed)
        if first:
            _finish(seed, params, paths, data, network, saves, fingerprint)


def _open_data(paths: Paths) -> _Data:
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    split = open_split(paths.packed, manifest, "train")
    return _Data(manifest, [split, copies] if copies else [split], open_split(paths.packed, manifest, "val"), plan)


def _fresh_network(seed: int, params: TrainParams, manifest: PackedManifest) -> ImageNetwork:
    torch.manual_seed(seed)
    return build_network(
        NetworkSpec(
            task=manifest.task,
            name=params.network,
            arguments=params.network_arguments,
            classes=manifest.classes,
            input=manifest.input,
            mean=manifest.mean,
            std=manifest.std,
            target_scale=manifest.target_scale,
        )
    )


def _fit(
    seed: int,
    params: TrainParams,
    paths: Paths,
    placement: Placement,
    data: _Data,
    network: ImageNetwork,
    shape: StepShape,
    saves: Saves,
    resumed: Save | None,
) -> None:
    _prepare_process(placement, network)
    saver = Saver(saves, resumed, params.keep, params.checkpoint_every_epochs)
    lines = EpochLines(saver, data.num_train // shape.batch_size * shape.batch_size)
    trainer = pl.Trainer(
        **trainer_arguments(placement, shape.per_device),
        max_epochs=params.epochs,
        accumulate_grad_batches=shape.num_accumulated,
        gradient_clip_val=params.gradient_clip_norm or None,
        callbacks=[_SetupCheck(placement), lines, saver, *progress_bars()],
        logger=loggers(paths.tensorboard / saves.root.name, paths.live) if _is_first_process() else False,
        enable_progress_bar=bool(progress_bars()),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        deterministic="warn",
        default_root_dir=paths.work,
    )
    classes = data.manifest.task == "image_classification"
    draw = None if data.plan.is_identity else partial(_draw, data.plan, data.manifest.input.size_px)
    training = TrainingBatches(data.train, shape, trainer.global_rank, seed, draw, classes=classes)
    validation = ValidationBatches(data.val, params.max_batch_per_device, placement.world_size, trainer.global_rank, classes=classes)
    on_gpu = placement.accelerator == "gpu"
    trainer.fit(
        TrainingModule(network, params, seed, training.num_steps, training.ids),
        training_loader(training, params.num_workers, pin_memory=on_gpu),
        validation_loader(validation, params.num_workers, pin_memory=on_gpu),
        ckpt_path=str(saves.state(resumed.epoch)) if resumed else None,
        weights_only=True,
    )


def _draw(plan: AugmentPlan, size_px: int, epoch: int, keys: Any) -> Any:
    return matrices(plan, epoch, keys, size_px)


def _prepare_process(placement: Placement, network: ImageNetwork) -> None:
    # Deterministic mode would also fill every new tensor, DeepSpeed's buckets of 400 MB in each step among them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if placement.accelerator == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // placement.devices))
    if placement.half_dtype:
        fit_into_half(network, placement.half_dtype)
        if placement.accelerator == "cpu" and placement.half_dtype == torch.float16:
            allow_float16_on_cpu()
    if placement.zero_stage is None:  # DeepSpeed views weights as flat bytes, which this layout forbids
        network.to(memory_format=torch.channels_last)  # images arrive as NHWC, so no layout is ever changed


class _SetupCheck(pl.Callback):
    """Ends a run that is not what was requested before its first step."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_actual(self._placement.expected, actual_setup(trainer))
        # Lightning 2.6 would note SIGTERM and go on, and several processes then wait for each other forever (seen).
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a save is whole at any moment, so ending at once loses no more than a kill


def _finish(
    seed: int, params: TrainParams, paths: Paths, data: _Data, network: ImageNetwork, saves: Saves, fingerprint: Fingerprint
) -> None:
    save, problems = saves.newest()
    assert save is not None, problems
    weights = consolidated_weights(saves.state(save.kept_epoch))
    _check_weights(network, weights)
    metrics = save.history[save.kept_epoch - 1]
    requested = requested_setup(params)
    card = ModelCard(
        format_version=1,
        network=network.spec,
        num_parameters=_num_parameters(network),
        weights_sha256="",  # known when they are written
        epochs=save.epoch,
        kept_epoch=save.kept_epoch,
        metrics=metrics,
        requested=requested,
        actual=save.actual,
        seed=seed,
        params=params.model_dump(mode="json"),
        digests={"fingerprint": fingerprint.digest, "params": files.digest_json(fingerprint.train), **fingerprint.data, **fingerprint.code},
        versions=fingerprint.versions,
        git_revision=_git_revision(paths.root),
    )
    files.write_json(
        paths.metrics,
        {
            "epochs": save.epoch,
            "kept_epoch": save.kept_epoch,
            **_short(metrics),
            "strategy": save.actual.strategy,
            "precision": save.actual.precision,
            "processes": save.actual.world_size,
        },
    )
    save_checkpoint(paths.checkpoint, card, weights)
    saves.remove()
    print(
        f"kept epoch {save.kept_epoch} of {save.epoch} ({params.keep}) in {paths.checkpoint}, measured on {len(data.val):,} validation rows"
    )


def _check_weights(network: ImageNetwork, weights: Mapping[str, Tensor]) -> None:
    """Strictly: what was put together from shards has every weight of the network, in its shape, and nothing else."""
    with torch.no_grad():
        network.load_state_dict(dict(weights), strict=True)


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in metrics.items() if name != "learning_rate"}


def _num_parameters(network: ImageNetwork) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _git_revision(root: Path) -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _is_first_process() -> bool:
    """Whether this is rank 0, which is known before the trainer is: every launcher gives it zeros, or nothing."""
    return all(int(os.environ.get(name) or 0) == 0 for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def _print_start(
    network: ImageNetwork, data: _Data, shape: StepShape, placement: Placement, notes: list[str], resumed: Save | None
) -> None:
    spec = network.spec
    answers = f"{len(spec.classes)} classes" if spec.classes else "a number"
    print(f"network   {spec.name}, {_num_parameters(network):,} parameters, {'x'.join(map(str, spec.input.shape))} -> {answers}")
    print(f"rows      {data.num_train:,} for training, {len(data.val):,} for validation")
    print(
        f"step      {shape.batch_size} rows = {shape.per_device} per device x {shape.world_size} process{'es' * (shape.world_size > 1)} "
        f"x {shape.num_accumulated} accumulated; {data.num_train // shape.batch_size} steps per epoch"
    )
    print(f"runs as   {placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}")
    for reason in placement.reasons:
        print(f"  auto    {reason}")
    for note in notes:
        print(f"note      {note}")
    if resumed:
        print(f"resumed   after epoch {resumed.epoch}", flush=True)
