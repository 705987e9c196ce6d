"""How long the training's loader takes for a batch by itself: in the trainer, and with loader processes.

Nothing else computes meanwhile, so these are the best that a step can wait for. What a batch is made of (reading stored rows,
changing them) is timed in the trainer's process, each time on rows of another batch, so that none is there already.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slipway.contract import Contract
from slipway.data.packed import PackedSplit
from slipway.training.batches import training_loader
from slipway.training.host_augmentation import StoredRows

NUM_WORKERS = (0, 1, 2, 4)
AHEAD_PER_WORKER = 2  # batches, as torch's loader fetches them
_MIN_BATCHES, _MIN_SECONDS = 4, 0.4


class LoaderTimes(Contract):
    """One round, in milliseconds for a batch of one process."""

    batch_ms: dict[int, float]  # wall clock between batches, by the number of loader processes
    processor_ms: float  # of all threads, for a batch made in the trainer's process
    read_ms: float  # of `batch_ms[0]`, bringing the stored rows into memory; decoding them, where they are JPEGs
    read_processor_ms: float
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
        batch_ms = {number: _mean_ms(stream.__next__, skipped=number * AHEAD_PER_WORKER + 1) for number, stream in self._streams.items()}
        processor = _mean_ms(self._streams[0].__next__, skipped=0, clock=time.process_time)
        time.sleep(0.05 + batch_ms[1] * AHEAD_PER_WORKER / 1000)  # until the loader process has batches ready
        begin = time.perf_counter()
        next(self._streams[1])
        handover = time.perf_counter() - begin
        rows = self._rows.gather(np.arange(min(self._batch_size, self._num_rows)))
        return LoaderTimes(
            batch_ms=batch_ms,
            processor_ms=processor,
            read_ms=_mean_ms(self._read, skipped=0),
            read_processor_ms=_mean_ms(self._read, skipped=0, clock=time.process_time),
            copy_ms=_mean_ms(rows.copy, skipped=0),
            handover_ms=handover * 1000,
        )

    def _read(self) -> None:
        self._rows.gather(self._generator.permutation(self._num_rows)[: self._batch_size])

    def _stream(self, num_workers: int) -> Iterator[Any]:
        loader = training_loader(self._dataset, num_workers)
        epoch = 0
        while True:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from loader
            epoch += 1


def _mean_ms(action: Callable[[], Any], *, skipped: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The mean time of an action over some tenths of a second and some calls."""
    for _ in range(skipped):
        action()
    begin, wall, count = clock(), time.perf_counter(), 0
    while count < _MIN_BATCHES or time.perf_counter() - wall < _MIN_SECONDS:
        action()
        count += 1
    return (clock() - begin) / count * 1000
