"""A training that makes measured steps and keeps nothing: `python -m slipway.doctor.timed_run FOLDER`.

It is the training that `stages.train` would run (processes, network, batches, precision, optimizer), without saves, logs and
validation. It reads `FOLDER/request.json`, then for each `order-N.json` that appears times one round and answers with
`round-N.json`. `slipway.doctor.timed_processes` is the other side.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from slipway.config.sections import TrainParams
from slipway.data.store.packed import PackedSplit
from slipway.doctor.loader_times import AHEAD_PER_WORKER, LoaderProbe
from slipway.doctor.step_times import Clock, Order, StepTimer, WatchedLoader
from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.assembly import (
    freezing,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
)
from slipway.training.batches.batches import Batch, TrainingBatches, training_loader
from slipway.training.distributed.processes import end_with_parent, is_first_process
from slipway.training.job import Job, Paths, prepare
from slipway.training.networks.networks import Network
from slipway.training.telemetry.progress import silence_chatter

_SECONDS_BETWEEN_LOOKS = 0.01

WrapBatches = Callable[[TrainingBatches], Any]
WrapSplit = Callable[[PackedSplit], PackedSplit]


class Request(Contract):
    """What is to be measured."""

    seed: int
    train: dict[str, Any]  # the train section
    packed: str
    augmented: str
    root: str
    fixed_batch: bool  # the same batch in every step: the step without its data
    loader: bool  # the loader by itself, see `slipway.doctor.loader_times`


class _RepeatedBatch:
    """The first batch of an epoch, again and again."""

    sampler = None

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(self._batch, self._count)


def main(
    wrap_batches: WrapBatches = lambda batches: batches, wrap_split: WrapSplit = lambda split: split
) -> None:
    """Serve one request. What wraps stands between the batches and their loader, and between stored rows and batches."""
    silence_chatter()
    end_with_parent()
    folder = Path(sys.argv[1])
    request = Request.model_validate(json.loads((folder / "request.json").read_bytes()))
    paths = _paths(request, folder)
    job, network = prepare(request.seed, TrainParams.model_validate(request.train), paths)
    job = replace(
        job, data=replace(job.data, train=[wrap_split(split) for split in job.data.train])
    )
    prepare_process(job.params, job.placement, network)
    if request.loader:
        batches = _batches(job, 0)
        probe = LoaderProbe(wrap_batches(batches), job.data.train, job.shape.per_device)
        while _next_order(folder) is not None:
            _answer(folder, probe.round().model_dump_json())
        return
    _time_steps(request, job, network, folder, wrap_batches)


def _time_steps(
    request: Request, job: Job, network: Network, folder: Path, wrap_batches: WrapBatches
) -> None:
    clock = Clock()
    ahead = (
        0
        if request.fixed_batch or not job.params.num_workers
        else job.params.num_workers * AHEAD_PER_WORKER + 1
    )
    timer = StepTimer(
        clock,
        max(2, -(-ahead // job.shape.num_accumulated)),
        lambda: _next_order(folder),
        lambda found: _answer(folder, found.model_dump_json()),
    )
    trainer = pl.Trainer(
        **step_arguments(job.params, job.placement, job.shape, job.paths.work),
        max_epochs=-1,
        callbacks=[*freezing(network, job.params), timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    batches = _batches(job, trainer.global_rank)
    loader: Any = training_loader(
        wrap_batches(batches), job.params.num_workers, pin_memory=job.placement.accelerator == "gpu"
    )
    if request.fixed_batch:
        loader = _RepeatedBatch(
            next(iter(DataLoader(batches, batch_size=None, sampler=[(0, 0)]))), len(loader)
        )
    else:
        loader = WatchedLoader(loader, clock)
    trainer.fit(training_module(network, job.params, job.seed, job.data, batches), loader)


def _batches(job: Job, rank: int) -> TrainingBatches:
    return training_batches(
        job.data, job.shape, rank, job.seed, on_gpu=job.placement.accelerator == "gpu"
    )


def _paths(request: Request, folder: Path) -> Paths:
    nothing = folder / "nothing"  # is written there
    return Paths(
        packed=Path(request.packed),
        augmented=Path(request.augmented),
        checkpoint=nothing,
        metrics=nothing,
        live=nothing,
        work=folder / "work",
        tensorboard=nothing,
        log=nothing,
        costs=nothing,
        root=Path(request.root),
    )


class _Count:
    rounds = 0


def _next_order(folder: Path) -> Order | None:
    """Wait for the next order, in every process of the training."""
    path = folder / f"order-{_Count.rounds}.json"
    while not path.exists():
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _Count.rounds += 1
    content = json.loads(path.read_bytes())
    return Order.model_validate(content) if content else None


def _answer(folder: Path, text: str) -> None:
    if is_first_process():
        files.write_text(folder / f"round-{_Count.rounds - 1}.json", text)


if __name__ == "__main__":
    main()
