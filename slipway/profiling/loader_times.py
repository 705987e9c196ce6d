"""Times the loader of training batches without a training, with and without loader processes.

Nothing else computes at the same time, so these are the shortest times in which a step can get its
batch. Reading stored rows is timed separately in the trainer's process, each time on different
rows, so that no batch is cached.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slipway.data.store.packed import PackedSplit
from slipway.profiling.step_times import queued_seconds
from slipway.system.contract import Contract
from slipway.training.augmentation.host import StoredRows
from slipway.training.batches.batches import training_loader

NUM_WORKERS = (0, 1, 2, 4)
AHEAD_PER_WORKER = 2  # batches that torch's loader prefetches
_MIN_BATCHES, _MIN_SECONDS = 4, 0.3


class LoaderTimes(Contract):
    """Times of one measuring round, in milliseconds per batch of one process."""

    batch_ms: dict[int, float]  # wall-clock time between batches, by number of loader processes
    processor_ms: float  # processor time of all threads for a batch made in the trainer's process
    queued_ms: float  # time that this batch waited for a free core
    read_ms: float  # part of `batch_ms[0]`: reading stored rows into memory, and decoding JPEGs
    read_processor_ms: float
    read_queued_ms: float
    copy_ms: float  # copying the same rows in memory: what pixels would take instead of JPEGs
    handover_ms: float  # time to receive a batch that a loader process has ready


class LoaderProbe:
    """Measures the time in which `dataset` and loader processes produce batches.

    `dataset` reads `splits`; a batch has `batch_size` rows.
    """

    def __init__(self, dataset: Any, splits: Sequence[PackedSplit], batch_size: int) -> None:
        self._rows = StoredRows([split.inputs for split in splits])
        self._num_rows = sum(map(len, splits))
        self._batch_size = batch_size
        self._random = np.random.default_rng(0)
        self._streams = {number: _endless_batches(dataset, number) for number in NUM_WORKERS}

    def time_round(self) -> LoaderTimes:
        """Time batches by number of loader processes, the reading of rows, and the handover."""
        batch_ms = {number: self._batch_ms(number) for number in NUM_WORKERS}
        # Wait until the loader process has batches ready.
        time.sleep(0.05 + batch_ms[1] * AHEAD_PER_WORKER / 1000)
        begin = time.perf_counter()
        next(self._streams[1])
        handover = time.perf_counter() - begin
        rows = self._rows.gather(np.arange(min(self._batch_size, self._num_rows)))
        batch_ms[0], processor_ms, queued_ms = _mean_times(self._streams[0].__next__)
        read_ms, read_processor_ms, read_queued_ms = _mean_times(self._read_rows)
        return LoaderTimes(
            batch_ms=batch_ms,
            processor_ms=processor_ms,
            queued_ms=queued_ms,
            read_ms=read_ms,
            read_processor_ms=read_processor_ms,
            read_queued_ms=read_queued_ms,
            copy_ms=_mean_times(rows.copy)[0],
            handover_ms=handover * 1000,
        )

    def _batch_ms(self, num_workers: int) -> float:
        stream = self._streams[num_workers]
        for _ in range(num_workers * AHEAD_PER_WORKER + 1):  # skip prefetched batches
            next(stream)
        return _mean_times(stream.__next__)[0]

    def _read_rows(self) -> None:
        self._rows.gather(self._random.permutation(self._num_rows)[: self._batch_size])


def _endless_batches(dataset: Any, num_workers: int) -> Iterator[Any]:
    loader = training_loader(dataset, num_workers)
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader
        epoch += 1


def _mean_times(action: Callable[[], Any]) -> tuple[float, float, float]:
    """Return the mean wall-clock, processor and queueing time of `action`, in milliseconds."""
    clocks = (time.perf_counter, time.process_time, queued_seconds)
    begins = [clock() for clock in clocks]
    count = 0
    while count < _MIN_BATCHES or time.perf_counter() - begins[0] < _MIN_SECONDS:
        action()
        count += 1
    wall, processor, queued = (
        (clock() - begin) / count * 1000 for clock, begin in zip(clocks, begins, strict=True)
    )
    return wall, processor, queued
