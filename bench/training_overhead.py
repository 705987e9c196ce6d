"""Compares a training step by Lightning and Slipway's module with a hand-written loop.

`python -m bench.training_overhead` runs both in one process, in turns of some steps, with the same
network, optimizer, schedule, clipping, loader and batches. The images have the demo's and
CIFAR-10's size. It prints and writes one table.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from bench.conditions import conditions
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.store import packed
from slipway.inputs.images import ImageContract
from slipway.system import files
from slipway.training.assembly import (
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
)
from slipway.training.batches.batches import Batch, TrainingBatches, training_loader
from slipway.training.distributed.execution import apply_execution
from slipway.training.job import Job, Paths, prepare
from slipway.training.networks.networks import Network, build_network
from slipway.training.recipe.optimizers import fuses_optimizer, optimizer_and_schedule
from slipway.training.telemetry.progress import silence_chatter
from tests.packed_rows import packed_rows
from tests.project_params import PROJECT, augment_params

SCRATCH = Path(".work/bench/training_overhead")
ON_GPU = torch.cuda.is_available()
RESULT = Path(f"bench/results/training_overhead{'_gpu' if ON_GPU else ''}.md")
NUM_ROUNDS = 15
NUM_WARM_UP = 3  # rounds
ROUND_SECONDS = 0.7


@dataclass(frozen=True)
class Case:
    """The size of one case's training data."""

    name: str
    size_px: int
    channels: int
    num_classes: int
    batch_size: int
    network_arguments: dict[str, Any] = field(default_factory=dict)  # to change


CASES = (
    Case("demo: 16 px, grey, batches of 128", 16, 1, 10, 128),
    Case("CIFAR-10: 32 px, RGB, batches of 128", 32, 3, 10, 128),
)
# The networks of params.yaml keep a GPU waiting for the processor.
RESNET_18 = {"width": 64, "blocks": [2, 2, 2, 2]}
ON_GPU_ONLY = (Case("ResNet-18 on 32 px, RGB, batches of 512", 32, 3, 10, 512, RESNET_18),)


def write_store(case: Case, folder: Path) -> None:
    """Write a packed store of noise, because the cost of a step does not depend on the pixels."""
    generator = np.random.default_rng(0)
    shape = (case.size_px, case.size_px, case.channels)
    splits: dict[str, packed.PackedSplitManifest] = {}
    for split, num_rows in {"train": 16 * case.batch_size, "val": case.batch_size}.items():
        (folder / "packed" / split).mkdir(parents=True, exist_ok=True)
        np.save(
            folder / "packed" / split / "inputs.npy",
            generator.integers(0, 256, (num_rows, *shape), dtype=np.uint8),
        )
        ids = [files.sha256_bytes(f"{split}{row}".encode())[:32] for row in range(num_rows)]
        rows = packed_rows(ids, ids, np.arange(num_rows) % case.num_classes)
        splits[split] = packed.write_split(folder / "packed" / split, rows, shape)
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=case.size_px,
        channels=case.channels,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )
    manifest = packed.PackedManifest(
        format_version=3,
        task="image_classification",
        input=contract,
        classes=[str(number) for number in range(case.num_classes)],
        mean=[0.5] * case.channels,
        std=[0.3] * case.channels,
        target_scale=None,
        splits=splits,
    )
    packed.write_manifest(folder / "packed", manifest)
    write_plan(folder / "augmented", plan_from_params(augment_params(crop_padding_px=2), 7))


def prepare_case(case: Case) -> tuple[Job, Network]:
    """Return the job of the project's own params on this case."""
    folder = SCRATCH / f"{case.size_px}px-{case.batch_size}"
    write_store(case, folder)
    nothing = folder / "nothing"
    paths = Paths(
        folder / "packed",
        folder / "augmented",
        nothing,
        nothing,
        nothing,
        folder / "work",
        nothing,
        nothing,
        nothing,
        Path(),
    )
    params = PROJECT.train.model_copy(
        update={
            "batch_size": case.batch_size,
            "network_arguments": PROJECT.train.network_arguments | case.network_arguments,
            "strategy": "single",
            "devices": 1,
        }
    )
    return prepare(7, params, paths)


def hand_written(job: Job, network: Network, batches: TrainingBatches) -> Iterator[None]:
    """Run one step for each `next`, written without a framework."""
    parts: Any = optimizer_and_schedule(
        network, job.params, batches.num_steps, fused=fuses_optimizer(job.placement)
    )
    optimizer, schedule = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    device = torch.device("cuda" if job.placement.accelerator == "gpu" else "cpu")
    network.to(device).train()
    loader = training_loader(batches, 0, pin_memory=device.type == "cuda")
    half = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(job.placement.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, half, enabled=half is not None):
                answers = network(_inputs(batch, device))
            loss = F.cross_entropy(
                answers.float(),
                batch.targets.to(device, non_blocking=True),
                label_smoothing=job.params.label_smoothing,
            )
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(
                network.parameters(), job.params.gradient_clip_norm or math.inf
            )
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            yield
        epoch += 1


def _inputs(batch: Batch, device: torch.device) -> torch.Tensor:
    from slipway.training.augmentation.batch import Changes, augment_batch

    inputs = batch.inputs.to(device, non_blocking=True)
    if batch.changes is None:
        return inputs
    moved: Any = (
        value if value is None else value.to(device, non_blocking=True) for value in batch.changes
    )
    return augment_batch(inputs, Changes(*moved))


@dataclass
class Turns(pl.Callback):
    """Runs the other loop for as many steps after each round of Lightning's steps."""

    other: Iterator[None]
    wait: Callable[[], None]
    num_steps: int = 2
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    processor_ratios: list[float] = field(default_factory=list)
    _count: int = 0
    _begin: float = 0.0
    _processor: float = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin, self._processor = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self._count += 1
        if self._count < self.num_steps:
            return
        self.wait()
        self.ours.append((time.perf_counter() - self._begin) / self.num_steps)
        begin, processor = time.perf_counter(), time.process_time()
        for _ in range(self.num_steps):
            next(self.other)
        self.wait()
        self.theirs.append((time.perf_counter() - begin) / self.num_steps)
        self.processor_ratios.append(
            (time.process_time() - processor) / (processor - self._processor)
        )
        self.num_steps = max(2, round(ROUND_SECONDS / self.theirs[-1]))
        trainer.should_stop = len(self.ours) == NUM_WARM_UP + NUM_ROUNDS
        self._count, self._begin, self._processor = 0, time.perf_counter(), time.process_time()


def measure(case: Case) -> Turns:
    """Measure both loops on one case."""
    job, network = prepare_case(case)
    prepare_process(job.params, job.placement, network)
    torch.manual_seed(job.seed)
    own = build_network(job.spec)
    apply_execution(own, job.params, job.placement, job.spec.task)
    batches = training_batches(
        job.data,
        job.params,
        job.shape,
        0,
        job.seed,
        on_gpu=job.placement.accelerator == "gpu",
    )
    on_gpu = job.placement.accelerator == "gpu"
    turns = Turns(
        hand_written(job, own, batches), torch.cuda.synchronize if on_gpu else lambda: None
    )
    trainer = pl.Trainer(
        **step_arguments(job.params, job.placement, job.shape, job.paths.work),
        max_epochs=-1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        training_module(network, job.params, job.seed, job.data, batches, placement=job.placement),
        training_loader(batches, 0, pin_memory=on_gpu),
    )
    return turns


def line(case: Case, turns: Turns) -> str:
    """Format one row of the table."""
    ours, theirs = turns.ours[NUM_WARM_UP:], turns.theirs[NUM_WARM_UP:]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    medians = [statistics.median(values) * 1000 for values in (ours, theirs)]
    share = f"{statistics.median(ratios):.1%} | {min(ratios):.1%} to {max(ratios):.1%}"
    busy = turns.processor_ratios[NUM_WARM_UP:]
    processor = f"{statistics.median(busy):.1%} | {min(busy):.1%} to {max(busy):.1%}"
    return f"| {case.name} | {medians[0]:.2f} | {medians[1]:.2f} | {share} | {processor} |"


def main() -> None:
    """Measure every case, one after the other, and write the table."""
    silence_chatter()
    columns = [
        "Images",
        "Lightning and our module, ms",
        "by hand, ms",
        "speed reached, median of rounds",
        "lowest and highest",
    ]
    columns += ["by processor time", "lowest and highest"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case in CASES + ON_GPU_ONLY * ON_GPU:
        lines.append(line(case, measure(case)))
        print(lines[-1], flush=True)
    text, versions = "\n".join(lines), conditions("torch", "pytorch-lightning")
    note = (
        f"n = {NUM_ROUNDS} rounds of {ROUND_SECONDS:g} s each, in turns, in one process with "
        f"{torch.get_num_threads()} threads."
    )
    notes = " ".join(sys.argv[1:])
    files.write_text(
        RESULT,
        (
            f"# A training step beside a hand-written loop\n\n{text}\n\n{NOTE}\n{note} "
            f"{notes}\n{versions}\n"
        ),
    )
    print(RESULT.read_text())


NOTE = """`small_resnet` of params.yaml, AdamW, warm-up and cosine, clipped gradients, label
smoothing. The hand-written loop has no non-finite guard, no sample weights, no sums of the epoch,
and no dropout that resumes exactly; ours has.
Processor time is that of all threads: other work on the machine changes it little."""


if __name__ == "__main__":
    main()
