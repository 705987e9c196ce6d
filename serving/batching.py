"""A greedy micro-batcher: while one batch runs, requests queue; the next batch takes them all.

There is no timer, so a lone request never waits for company. It knows nothing of images, HTTP or
metrics. A caller that was cancelled (its deadline passed) is dropped before its item reaches the model.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.calibration import Answers

Run = Callable[[NDArray[Any]], Answers]


@dataclass(frozen=True)
class BatchAnswer:
    """One item's outputs (outputs,) float32 and outlier score, and how long it waited and ran."""

    outputs: NDArray[np.float32]
    score: np.float32
    queue_seconds: float
    infer_seconds: float
    batch_size: int


@dataclass(eq=False)
class _Waiting:
    item: NDArray[Any]
    answer: asyncio.Future[BatchAnswer]
    since: float = field(default_factory=perf_counter)


class MicroBatcher:
    """Runs single items in batches of at most `max_batch_size`, one batch at a time, on a thread of its own."""

    def __init__(self, run: Run, max_batch_size: int, on_batch: Callable[[int], None] = lambda size: None) -> None:
        self._run = run
        self._max_batch_size = max_batch_size
        self._on_batch = on_batch
        self._waiting: deque[_Waiting] = deque()
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-model")

    @property
    def num_waiting(self) -> int:
        """Items that are not yet in a batch."""
        return len(self._waiting)

    async def submit(self, item: NDArray[Any]) -> BatchAnswer:
        """The answer to one item; whatever `run` raises is raised to every caller of its batch."""
        return await self._enqueue(item)

    async def submit_all(self, items: NDArray[Any]) -> list[BatchAnswer]:
        """The answers to (rows, ...) items in their order; if the caller is cancelled, all of them are dropped."""
        return await asyncio.gather(*(self._enqueue(item) for item in items))

    def shed(self, num_kept: int, reason: Callable[[], Exception]) -> None:
        """Answer the newest of the waiting items with a `reason`, all but `num_kept`: there is more to do than can be done."""
        for waiting in list(self._waiting)[num_kept:]:
            if not waiting.answer.done():
                waiting.answer.set_exception(reason())

    async def close(self) -> None:
        """Finish what waits, then end the thread."""
        if self._working is not None:
            await self._working
        self._thread.shutdown()

    def _enqueue(self, item: NDArray[Any]) -> asyncio.Future[BatchAnswer]:
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return waiting.answer

    async def _work(self) -> None:
        try:
            while batch := self._take():
                await self._answer(batch)
        finally:
            self._working = None

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch_size:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        started = perf_counter()
        try:
            stacked = np.stack([waiting.item for waiting in batch])
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, stacked)
        except Exception as error:
            _fail(batch, error)
            return
        seconds = perf_counter() - started
        self._on_batch(len(batch))
        for waiting, row, score in zip(batch, *answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(BatchAnswer(row, score, started - waiting.since, seconds, len(batch)))


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)


def padded(run: Run, max_batch_size: int) -> Run:
    """`run` on batches padded to a power of two, or to the largest batch if that is less.

    So only sizes that were warmed up reach a runtime that plans for each size.
    """

    def run_padded(batch: NDArray[Any]) -> Answers:
        num_rows = len(batch)
        missing = min(next_power_of_two(num_rows), max_batch_size) - num_rows
        padding: Any = [(0, missing)] + [(0, 0)] * (batch.ndim - 1)
        return Answers(*(part[:num_rows] for part in run(np.pad(batch, padding))))

    return run_padded


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
