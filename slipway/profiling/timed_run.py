"""`python -m slipway.profiling.timed_run FOLDER`: times the steps of a training.

It trains as `slipway.stages.train` would (processes, network, batches, precision, optimizer),
without checkpoints, logs and validation. It saves nothing but times. It reads `FOLDER/run.json`,
then times one round for each `request-N.json` that appears and writes `round-N.json`. Its client is
`slipway.profiling.measured_run`.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from slipway.config.training import TrainParams
from slipway.data.store.packed import PackedSplit
from slipway.profiling.loader_times import AHEAD_PER_WORKER, LoaderProbe
from slipway.profiling.step_times import Clock, PartProfiler, RoundRequest, StepTimer
from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.assembly import (
    freeze_callbacks,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
)
from slipway.training.batches.batches import Batch, TrainingBatches, training_loader
from slipway.training.distributed.processes import end_with_parent, is_first_process
from slipway.training.frozen_features import frozen_body, without_store
from slipway.training.job import PROJECT_PATHS, Job, prepare
from slipway.training.networks.frozen_parts import FrozenBody
from slipway.training.networks.networks import Network
from slipway.training.telemetry.progress import silence_chatter

POLL_S = 0.01

WrapBatches = Callable[[TrainingBatches], Any]
WrapSplit = Callable[[PackedSplit], PackedSplit]


class RunRequest(Contract):
    """The training that the measured process should run."""

    seed: int
    train: dict[str, Any]  # the section train
    packed: str
    augmented: str
    root: str
    fixed_batch: bool  # use the same batch in every step, to time a step without data loading
    loader: bool  # time the loader without a training (`slipway.profiling.loader_times`)


class _RepeatedBatch:
    """A loader that repeats one batch, to time steps without data loading."""

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
    """Run the training to measure, until its client ends this process.

    Tests use the arguments to slow down a part: `wrap_batches` wraps the dataset of the loader,
    `wrap_split` the stored rows.
    """
    silence_chatter()
    end_with_parent()
    folder = Path(sys.argv[1])
    request = RunRequest.model_validate(json.loads((folder / "run.json").read_bytes()))
    params = TrainParams.model_validate(request.train)
    paths = replace(
        PROJECT_PATHS,  # a measured training writes no outputs
        packed=Path(request.packed),
        augmented=Path(request.augmented),
        work=folder / "work",
        root=Path(request.root),
    )
    job, network = prepare(request.seed, params, paths)
    splits = [wrap_split(split) for split in job.data.train]
    job = replace(job, data=replace(job.data, train=splits))
    body = frozen_body(network, job.params, job.data.plan, job.placement)
    prepare_process(job.params, job.placement, network)
    if isinstance(body, FrozenBody):
        job = replace(job, data=without_store(job.data, body))
    rounds = _Rounds(folder)
    if not request.loader:
        _time_steps(request, job, network, rounds, wrap_batches)
        return
    probe = LoaderProbe(wrap_batches(_batches(job, 0)), job.data.train, job.shape.per_device)
    while True:
        rounds.next_request()
        rounds.report(probe.time_round())


def _time_steps(
    request: RunRequest, job: Job, network: Network, rounds: "_Rounds", wrap_batches: WrapBatches
) -> None:
    clock = Clock()
    num_workers = job.params.num_workers
    on_gpu = job.placement.accelerator == "gpu"
    num_skipped = 2
    if num_workers and not request.fixed_batch:
        num_prefetched = num_workers * AHEAD_PER_WORKER + 1
        num_skipped = max(2, math.ceil(num_prefetched / job.shape.num_accumulated))
    timer = StepTimer(clock, num_skipped, rounds.next_request, rounds.report)
    trainer = pl.Trainer(
        **step_arguments(job.params, job.placement, job.shape, job.paths.work),
        max_epochs=-1,
        callbacks=[*freeze_callbacks(network, job.params), timer],
        profiler=PartProfiler(clock),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    batches = _batches(job, job.placement.reader(trainer.global_rank))
    loader: Any = training_loader(wrap_batches(batches), num_workers, pin_memory=on_gpu)
    if request.fixed_batch:
        first = next(iter(DataLoader(batches, batch_size=None, sampler=[(0, 0)])))
        loader = _RepeatedBatch(first, len(loader))
    trainer.fit(
        training_module(network, job.params, job.seed, job.data, batches, placement=job.placement),
        loader,
    )


def _batches(job: Job, rank: int) -> TrainingBatches:
    on_gpu = job.placement.accelerator == "gpu"
    return training_batches(job.data, job.params, job.shape, rank, job.seed, on_gpu=on_gpu)


class _Rounds:
    """Exchanges requests and measured rounds with the client through files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = -1

    def next_request(self) -> RoundRequest:
        """Wait for the client's next request, and return it."""
        self._number += 1
        path = self._folder / f"request-{self._number}.json"
        while not path.exists():
            time.sleep(POLL_S)
        return RoundRequest.model_validate_json(path.read_bytes())

    def report(self, found: Contract) -> None:
        if is_first_process():
            path = self._folder / f"round-{self._number}.json"
            files.write_text(path, found.model_dump_json())


if __name__ == "__main__":
    main()
