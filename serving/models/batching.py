"""A greedy micro-batcher: while one batch runs, requests queue; the next batch takes them all.

There is no timer, so a lone request never waits for company. A batch that the model answers sooner than a thread would take it over
runs in the event loop itself, after everything that had arrived was read: that is one batch, and nobody waits for two threads to take
turns at the interpreter. It knows nothing of images, HTTP or metrics. A request that was cancelled (its deadline passed) is
dropped before its rows reach the model.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers

logger = logging.getLogger("bentoml.slipway")

SLOW_S = (
    0.02  # a batch in the event loop holds up everybody: ten times and more what a quick one takes
)
_MOST_SLOW = 3  # one after the other; one alone may be the system's doing

_UNREAD: NDArray[Any] = np.empty(0)

Run = Callable[[NDArray[Any]], Answers]
Row = TypeVar("Row")  # what the model says of one row


class Submission(Generic[Row]):
    """One request's rows on their way: `await submission.answer` for what is said of each, and cancel it to take back what has not run."""

    __slots__ = (
        "_read",
        "_rows",
        "_started",
        "answer",
        "infer_seconds",
        "inputs",
        "num_rows",
        "num_taken",
        "queue_seconds",
        "read_seconds",
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
        self.num_taken = 0  # rows that are in a batch, or were
        self.read_seconds = 0.0  # stays 0 where the rows were read before
        self.queue_seconds = 0.0  # until the first batch that took rows of it began
        self.infer_seconds = 0.0  # from then on; several rows may take several batches
        self._rows: Sequence[Row] = ()  # answered so far
        self._started = perf_counter()  # it, and then its first batch

    def read(self) -> None:
        """Have the inputs ready. What is wrong with them is this request's alone, and its answer."""
        started = perf_counter()
        try:
            self.inputs = self._read()
            if len(self.inputs) != self.num_rows:
                raise RuntimeError(
                    f"{len(self.inputs)} rows were read, {self.num_rows} were announced"
                )
        except Exception as error:
            self.answer.set_exception(error)
        self.read_seconds = perf_counter() - started

    def has(self, rows: Sequence[Row], first: int, started: float, ended: float) -> None:
        """What is said of its rows from `first` on, by a batch that ran from `started` to `ended` (perf_counter)."""
        if first:
            rows = [*self._rows, *rows]
        else:
            self.queue_seconds, self._started = started - self._started, started
        if len(rows) < self.num_rows:
            self._rows = rows
        elif not self.answer.done():
            self.infer_seconds = ended - self._started
            self.answer.set_result(rows)


_Part = tuple[
    Submission[Any], int, int
]  # rows of one request in a batch: the first, and the first that is not


def _no_note(num_rows: int, fill: float, seconds: float) -> None:
    """Nobody counts."""


class MicroBatcher(Generic[Row]):
    """Runs rows in batches of at most `max_batch_size`, one batch at a time: of up to `quick_rows` at once, others on a thread of its own.

    `run` takes (rows, ...) and answers each row. `on_batch` is told of each batch its number of rows, their share of the largest, and
    its seconds.
    """

    def __init__(
        self,
        run: Callable[[NDArray[Any]], Sequence[Row]],
        max_batch_size: int,
        on_batch: Callable[[int, float, float], None] = _no_note,
        quick_rows: int = 0,
    ) -> None:
        self._run = run
        self._max_batch_size = max_batch_size
        self._on_batch = on_batch
        self.quick_rows = quick_rows  # 0 once the model has proved to be slow
        self._num_slow = 0  # quick batches, one after the other, that were not
        self._waiting: deque[Submission[Row]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-model")

    @property
    def num_waiting(self) -> int:
        """Rows that are not yet in a batch."""
        return sum(submission.num_rows - submission.num_taken for submission in self._waiting)

    def submit(self, inputs: NDArray[Any]) -> Submission[Row]:
        """Queue one or more (rows, ...); whatever `run` raises is raised to every request of its batch."""
        return self.submit_unread(lambda: inputs, len(inputs))

    def submit_unread(self, read: Callable[[], NDArray[Any]], num_rows: int) -> Submission[Row]:
        """The same of rows that `read` gives, which is called when a batch takes the first of them; what it raises is this request's alone.

        One decoding after the other takes half as long as each between all else that is done for its request: the processor
        has the code and the tables at hand.
        """
        submission: Submission[Row] = Submission(
            read, num_rows, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(submission)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return submission

    def shed(self, num_kept: int, reason: Callable[[int], Exception]) -> None:
        """Answer the newest of those that wait, all but the first `num_kept` rows: there is more to do than can be done.

        `reason` gives the answer to a request of so many rows.
        If any are kept, the oldest request stays, however many rows it has.
        """
        num_rows = 0
        for position, submission in enumerate(self._waiting):
            num_rows += submission.num_rows
            is_kept = num_rows <= num_kept or (position == 0 and num_kept > 0)
            if not is_kept and not submission.num_taken and not submission.answer.done():
                submission.answer.set_exception(reason(submission.num_rows))

    async def close(self) -> None:
        """Finish what waits, then end the thread, which has nothing to do then."""
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
        """Let the event loop go round as long as more requests arrive each time: one larger batch takes less than two."""
        num_before = -1
        while num_before < len(self._waiting) < self._max_batch_size:
            num_before = len(self._waiting)
            await asyncio.sleep(0)

    def _take(self) -> list[_Part]:
        """The rows of the next batch, the oldest first, without those of requests that nobody waits for any more."""
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
        if not batch:  # nobody waits for any of them
            return
        started = perf_counter()
        try:
            parts = [
                submission.inputs
                if end - first == submission.num_rows
                else submission.inputs[first:end]
                for submission, first, end in batch
            ]
            inputs = np.concatenate(parts) if len(parts) > 1 else parts[0]
            if len(inputs) <= self.quick_rows:
                rows = self._run(inputs)
                self._mind_slow_batches(perf_counter() - started)
            else:
                rows = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._run, inputs
                )
            if len(rows) != len(inputs):
                raise RuntimeError(
                    f"the model answered {len(rows)} rows to a batch of {len(inputs)}"
                )
        except Exception as error:
            _fail(batch, error)
            return
        self._on_batch(len(rows), len(rows) / self._max_batch_size, perf_counter() - started)
        _hand_out(batch, rows, started)

    def _mind_slow_batches(self, seconds: float) -> None:
        """Nothing runs in the event loop any more once the model proves to be slower than it was when it was measured."""
        self._num_slow = self._num_slow + 1 if seconds > SLOW_S else 0
        if self._num_slow == _MOST_SLOW:
            self.quick_rows = 0
            logger.warning(
                "the model held up the event loop %d times in a row; from now on it has a thread",
                _MOST_SLOW,
            )


def _hand_out(batch: list[_Part], rows: Sequence[Any], started: float) -> None:
    ended = perf_counter()
    begin = 0
    for submission, first, last in batch:
        end = begin + last - first
        submission.has(rows[begin:end], first, started, ended)
        begin = end


def _fail(batch: list[_Part], error: Exception) -> None:
    for submission, _, _ in batch:
        if not submission.answer.done():
            submission.answer.set_exception(error)


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
