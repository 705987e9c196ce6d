"""Measures the cost of the default telemetry per training step.

`python -m bench.telemetry_overhead` trains the demo's network in one process. It measures the time
in every hook of the telemetry and of the step clock, disk writes included, as a fraction of the
epoch around it. Both parts of the ratio see the same load. Work that happens once, before the first
step and at its pictures, is reported separately.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from bench.conditions import conditions
from slipway.config.params import load_params
from slipway.config.training import TrainParams
from slipway.data.augmentation.plan import plan_from_params
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.images import ImageContract
from slipway.system import files
from slipway.training.batches.batches import (
    ImageChanges,
    TrainingBatches,
    cut_step,
    training_loader,
)
from slipway.training.job import network_spec
from slipway.training.module import TrainingModule
from slipway.training.networks.networks import build_network
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.telemetry import (
    DataWaitProfiler,
    StepTelemetry,
    TelemetryContext,
)

SCRATCH = Path("tmp/bench/telemetry")
RESULT = Path("bench/results/telemetry_overhead.md")
ROUNDS, STEPS, SIZE_PX = 7, 40, 16


def _split(params: TrainParams) -> tuple[PackedManifest, PackedSplit]:
    generator, num_rows = np.random.default_rng(0), params.batch_size * STEPS
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=SIZE_PX,
        channels=1,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10_000,
    )
    facts: dict[str, Any] = {
        "format_version": 3,
        "classes": list("0123456789"),
        "target_scale": None,
        "splits": {},
    }
    manifest = PackedManifest(
        task="image_classification", input=contract, mean=[0.5], std=[0.25], **facts
    )
    images = generator.integers(0, 256, (num_rows, SIZE_PX, SIZE_PX, 1), dtype=np.uint8)
    ids = [f"{row:032x}" for row in range(num_rows)]
    targets = generator.integers(0, 10, num_rows).astype(np.float64)
    return manifest, PackedSplit(
        images, targets, ids, ids, np.ones(num_rows), np.zeros(num_rows, dtype=bool)
    )


class _Stopwatch:
    """Adds up the seconds inside methods of other objects."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, target: object, names: Sequence[str]) -> None:
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class _Epochs(pl.Callback):
    """Records the seconds of each epoch, and the part inside the stopwatch's methods."""

    def __init__(self, watch: _Stopwatch) -> None:
        self._watch = watch
        self.rounds: list[tuple[float, float]] = []
        self._began = self._seen = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._began, self._seen = time.perf_counter(), self._watch.seconds
        pl_module.epoch_metrics = {
            "train/loss": 0.0,
            "val/loss": 0.0,
            "val/accuracy": 0.0,
            "learning_rate": 0.0,
        }

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rounds.append((time.perf_counter() - self._began, self._watch.seconds - self._seen))


def measure(
    params: TrainParams, manifest: PackedManifest, split: PackedSplit
) -> list[tuple[float, float]]:
    """Return (seconds, seconds of the telemetry) of each epoch."""
    torch.manual_seed(params.batch_size)
    shape = cut_step(params.batch_size, 1, params.max_batch_per_device)
    plan = plan_from_params(load_params().augment, 7)
    batches = TrainingBatches(
        [split], shape, 0, 7, ImageChanges(plan, SIZE_PX, on_device=False), target_dtype="int64"
    )
    shutil.rmtree(SCRATCH, ignore_errors=True)
    log, clock, watch = RunLog(SCRATCH / "log", 0), DataWaitProfiler(), _Stopwatch()
    log.name_run("bench")
    telemetry = StepTelemetry(
        params,
        TelemetryContext(SCRATCH / "board", shape.batch_size, 1, batches.num_steps, []),
        log,
        clock,
    )
    watch.watch(clock, ["start", "stop"])
    watch.watch(telemetry, [name for name in vars(StepTelemetry) if name.startswith("on_")])
    epochs = _Epochs(watch)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=ROUNDS + 1,
        callbacks=[epochs, telemetry],
        profiler=clock,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        gradient_clip_val=params.gradient_clip_norm,
        default_root_dir=SCRATCH,
    )
    network = build_network(network_spec(params, manifest))
    trainer.fit(
        TrainingModule(network, params, 7, batches.num_steps, batches.ids),
        training_loader(batches, 0),
    )
    return epochs.rounds


def main() -> None:
    """Measure both intervals and write the table."""
    silence_chatter()
    params = load_params().train
    manifest, split = _split(params)
    lines = [
        (
            "| log_every_steps | ms per step | telemetry, ms per step | share, median | of each "
            "epoch |"
        ),
        "|---|---|---|---|---|",
    ]
    for every in (params.log_every_steps, 1):
        rounds = measure(params.model_copy(update={"log_every_steps": every}), manifest, split)[1:]
        whole, hooks = (
            statistics.median(values) / STEPS * 1000 for values in zip(*rounds, strict=True)
        )
        shares = [inside / seconds for seconds, inside in rounds]
        spread = f"{min(shares):.2%} to {max(shares):.2%}"
        lines.append(
            f"| {every} | {whole:.2f} | {hooks:.3f} | {statistics.median(shares):.2%} | {spread} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    note = (
        f"The demo's network, {params.batch_size} images of {SIZE_PX} px a step, {ROUNDS} epochs "
        f"of {STEPS} steps after one that warms up."
    )
    versions = conditions("torch", "pytorch-lightning", "tensorboard")
    files.write_text(RESULT, f"# What telemetry costs\n\n{text}\n\n{note}\n{versions}\n")


if __name__ == "__main__":
    main()
