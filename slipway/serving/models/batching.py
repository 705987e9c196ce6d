"""A micro-batcher without a timer: while one batch runs, requests queue up for the next one.

There is no timer, so a single request never waits for others. Small batches of a quick model run in
the event loop, after all requests that arrived were read: starting a thread would take longer. A
request that was cancelled, because its deadline passed, is dropped before its rows reach the model.
The batcher is independent of images, HTTP and metrics. `admission` limits how long requests wait
(SLIPWAY_MAX_WAIT_S).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from time import perf_counter, thread_time
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("bentoml.slipway")

# A batch in the event loop blocks everybody. A quick one takes at most a tenth of this.
SLOW_S = 0.02
_MAX_SLOW = 3  # slow batches in a row that are allowed; a single one may be caused by the system

_UNREAD: NDArray[Any] = np.empty(0)

Row = TypeVar("Row")  # the answer to one row


class Submission(Generic[Row]):
    """The rows of one request in the batcher's queue.

    `answer` is a future: await it for the results, or cancel it to drop rows that still wait. The
    moments are perf_counter seconds, 0 before they come. Rows that were decoded before they were
    queued are read in no time.
    """

    __slots__ = (
        "_read",
        "_rows",
        "answer",
        "begun",
        "ended",
        "inputs",
        "num_rows",
        "num_taken",
        "queued",
        "read_ended",
        "read_started",
    )

    def __init__(
        self,
        read: Callable[[], NDArray[Any]],
        num_rows: int,
        answer: "asyncio.Future[Sequence[Row]]",
    ) -> None:
        self._read = read
        self.num_rows = num_rows
        self.inputs: NDArray[Any] = _UNREAD  # (rows, ...) once a batch takes some of them
        self.answer = answer
        self.num_taken = 0  # rows that are, or were, in a batch
        self.queued = perf_counter()
        self.read_started = self.read_ended = 0.0
        self.begun = 0.0  # begin of its first batch
        self.ended = 0.0  # end of its last batch: the rows may need several
        self._rows: Sequence[Row] = ()  # answers so far

    def read(self) -> None:
        self.read_started = perf_counter()
        try:
            self.inputs = self._read()
            if len(self.inputs) != self.num_rows:
                raise RuntimeError(f"found {len(self.inputs)} rows, expected {self.num_rows}")
        except Exception as error:
            self.answer.set_exception(error)
        self.read_ended = perf_counter()

    def waited(self) -> float:
        """Return the seconds in the queue so far. Call it before the first batch takes a row."""
        return perf_counter() - self.queued

    def add_answers(self, rows: Sequence[Row], first: int, started: float, ended: float) -> None:
        """Add the answers to the rows from position `first` on; the last ones set `answer`.

        Their batch ran from `started` to `ended`, in perf_counter seconds.
        """
        if first:
            rows = [*self._rows, *rows]
        else:
            self.begun = started
        if len(rows) < self.num_rows:
            self._rows = rows
        elif not self.answer.done():
            self.ended = ended
            self.answer.set_result(rows)


_Part = tuple[Submission[Any], int, int]  # rows [first, end) of a request, in a batch


def _ignore(num_rows: int, fill: float, seconds: float) -> None:
    pass


class MicroBatcher(Generic[Row]):
    """Runs batches of at most `max_batch_size` rows, one at a time.

    Batches of up to `quick_rows` run in the event loop, larger ones on a thread. `run` maps inputs
    (rows, ...) to a result for each row. `on_batch` receives the number of rows of each batch,
    their fraction of the largest batch, and the seconds.
    """

    def __init__(
        self,
        run: Callable[[NDArray[Any]], Sequence[Row]],
        max_batch_size: int,
        on_batch: Callable[[int, float, float], None] = _ignore,
        quick_rows: int = 0,
    ) -> None:
        self._run = run
        self._max_batch_size = max_batch_size
        self._on_batch = on_batch
        self.quick_rows = quick_rows  # 0 once the model proved slow
        self._num_slow = 0  # slow batches in a row that ran in the event loop
        self._waiting: deque[Submission[Row]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-model")

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all requests, cached: each look-up is a system call in Python 3.11."""
        return asyncio.get_running_loop()

    @property
    def num_waiting(self) -> int:
        return sum(submission.num_rows - submission.num_taken for submission in self._waiting)

    def submit(self, inputs: NDArray[Any]) -> Submission[Row]:
        """Queue inputs (rows, ...). If `run` fails, every request of the batch raises its error."""
        return self.submit_unread(lambda: inputs, len(inputs))

    def submit_unread(self, read: Callable[[], NDArray[Any]], num_rows: int) -> Submission[Row]:
        """Queue rows that `read` decodes when a batch takes the first row.

        An error of `read` is raised in this request only. Decoding all requests of a batch in
        succession takes half the time, because code and tables stay in the processor's cache.
        """
        submission: Submission[Row] = Submission(read, num_rows, self._loop.create_future())
        self._waiting.append(submission)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return submission

    def shed(self, num_kept: int, reason: Callable[[int], Exception]) -> None:
        """Refuse the newest waiting requests, beyond the first `num_kept` rows.

        `reason` returns the error for a request of that many rows. If any rows are kept, the oldest
        request stays, whatever its size.
        """
        num_rows = 0
        for position, submission in enumerate(self._waiting):
            num_rows += submission.num_rows
            is_kept = num_rows <= num_kept or (position == 0 and num_kept > 0)
            if not is_kept and not submission.num_taken and not submission.answer.done():
                submission.answer.set_exception(reason(submission.num_rows))

    async def close(self) -> None:
        if self._working is not None:
            await self._working
        self._thread.shutdown()

    async def _work(self) -> None:
        try:
            while self._waiting:
                if self.quick_rows:
                    await self._gather()
                await self._answer(self._take())
        finally:
            self._working = None

    async def _gather(self) -> None:
        """Wait until the event loop has no more requests to read: one batch is faster than two."""
        num_before = -1
        while num_before < len(self._waiting) < self._max_batch_size:
            num_before = len(self._waiting)
            await asyncio.sleep(0)

    def _take(self) -> list[_Part]:
        batch: list[_Part] = []
        room, waiting = self._max_batch_size, self._waiting
        while waiting and room:
            submission = waiting[0]
            answer = submission.answer
            if submission.inputs is _UNREAD and not answer.done():
                submission.read()
            if answer.done():
                waiting.popleft()
                continue
            first, end = submission.num_taken, submission.num_rows
            if end - first <= room:
                waiting.popleft()
            else:
                end = first + room
            submission.num_taken = end
            room -= end - first
            batch.append((submission, first, end))
        return batch

    async def _answer(self, batch: list[_Part]) -> None:
        if not batch:  # all requests were cancelled
            return
        started = perf_counter()
        try:
            parts = [submission.inputs[first:end] for submission, first, end in batch]
            inputs = np.concatenate(parts) if len(parts) > 1 else parts[0]
            if len(inputs) <= self.quick_rows:
                computed = thread_time()
                rows = self._run(inputs)
                self._count_slow_batches(thread_time() - computed)
            else:
                rows = await self._loop.run_in_executor(self._thread, self._run, inputs)
            if len(rows) != len(inputs):
                message = f"the model answered {len(rows)} rows to a batch of {len(inputs)}"
                raise RuntimeError(message)
        except Exception as error:
            _fail(batch, error)
            return
        self._on_batch(len(rows), len(rows) / self._max_batch_size, perf_counter() - started)
        _hand_out(batch, rows, started)

    def _count_slow_batches(self, seconds: float) -> None:
        """Run all further batches on a thread, after several slow batches in succession.

        `seconds` are processor time: other load on the machine makes no model slow for good.
        """
        self._num_slow = self._num_slow + 1 if seconds > SLOW_S else 0
        if self._num_slow == _MAX_SLOW:
            self.quick_rows = 0
            logger.warning(
                "the model blocked the event loop %d times in a row; from now on it has a thread",
                _MAX_SLOW,
            )


def _hand_out(batch: list[_Part], rows: Sequence[Any], started: float) -> None:
    ended = perf_counter()
    begin = 0
    for submission, first, last in batch:
        end = begin + last - first
        submission.add_answers(rows[begin:end], first, started, ended)
        begin = end


def _fail(batch: list[_Part], error: Exception) -> None:
    for submission, _, _ in batch:
        if not submission.answer.done():
            submission.answer.set_exception(error)
