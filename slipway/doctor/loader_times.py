"""How long the training's loader takes for a batch by itself: in the trainer, and with loader processes.

Nothing else computes meanwhile, so these are the best that a step can wait for. What a batch is made of (reading stored rows,
changing them) is timed in the trainer's process, each time on rows of another batch, so that none is there already.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slipway.data.store.packed import PackedSplit
from slipway.doctor.machine import queued_seconds
from slipway.system.contract import Contract
from slipway.training.augmentation.host import StoredRows
from slipway.training.batches.batches import training_loader

NUM_WORKERS = (0, 1, 2, 4)
AHEAD_PER_WORKER = 2  # batches, as torch's loader fetches them
_MIN_BATCHES, _MIN_SECONDS = 4, 0.3


class LoaderTimes(Contract):
    """One round, in milliseconds for a batch of one process."""

    batch_ms: dict[int, float]  # wall clock between batches, by the number of loader processes
    processor_ms: float  # of all threads, for a batch made in the trainer's process
    queued_ms: float  # for the same batch, standing in line for a core that other work used
    read_ms: float  # of `batch_ms[0]`, bringing the stored rows into memory; decoding them, where they are JPEGs
    read_processor_ms: float
    read_queued_ms: float
    copy_ms: float  # the same rows where they are in memory already: what pixels would take instead of JPEGs
    handover_ms: float  # for a batch that a loader process has ready


class LoaderProbe:
    """Times the batches of `dataset`, which are made of `splits` and have `batch_size` rows."""

    def __init__(self, dataset: Any, splits: Sequence[PackedSplit], batch_size: int) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._rows = StoredRows([split.inputs for split in splits])
        self._num_rows = sum(map(len, splits))
        self._generator = np.random.default_rng(0)
        self._streams = {number: self._stream(number) for number in NUM_WORKERS}

    def round(self) -> LoaderTimes:
        """Time everything once."""
        batch_ms = {number: self._batch_ms(number) for number in NUM_WORKERS}
        time.sleep(
            0.05 + batch_ms[1] * AHEAD_PER_WORKER / 1000
        )  # until the loader process has batches ready
        begin = time.perf_counter()
        next(self._streams[1])
        handover = time.perf_counter() - begin
        rows = self._rows.gather(np.arange(min(self._batch_size, self._num_rows)))
        (batch_ms[0], processor, queued), read = (
            _mean_times(self._streams[0].__next__),
            _mean_times(self._read),
        )
        return LoaderTimes(
            batch_ms=batch_ms,
            processor_ms=processor,
            queued_ms=queued,
            read_ms=read[0],
            read_processor_ms=read[1],
            read_queued_ms=read[2],
            copy_ms=_mean_times(rows.copy)[0],
            handover_ms=handover * 1000,
        )

    def _batch_ms(self, num_workers: int) -> float:
        stream = self._streams[num_workers]
        for _ in range(num_workers * AHEAD_PER_WORKER + 1):  # those that were made ready before
            next(stream)
        return _mean_times(stream.__next__)[0]

    def _read(self) -> None:
        self._rows.gather(self._generator.permutation(self._num_rows)[: self._batch_size])

    def _stream(self, num_workers: int) -> Iterator[Any]:
        loader = training_loader(self._dataset, num_workers)
        epoch = 0
        while True:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from loader
            epoch += 1


def _mean_times(action: Callable[[], Any]) -> tuple[float, float, float]:
    """The mean wall clock, processor time and time in line of an action, in milliseconds, over some calls."""
    begin, processor, queued, count = time.perf_counter(), time.process_time(), queued_seconds(), 0
    while count < _MIN_BATCHES or time.perf_counter() - begin < _MIN_SECONDS:
        action()
        count += 1
    spent = (
        time.perf_counter() - begin,
        time.process_time() - processor,
        queued_seconds() - queued,
    )
    wall, busy, waited = (seconds / count * 1000 for seconds in spent)
    return wall, busy, waited
