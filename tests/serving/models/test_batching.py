import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers
from slipway.predictor.batches import next_power_of_two, padded
from slipway.serving.models import batching
from slipway.serving.models.batching import MicroBatcher, Submission
from tests.fake_clock import FakeClock


class Recorder:
    """A model that doubles its input, records every batch, and waits until its gate opens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch: NDArray[np.uint8]) -> list[int]:
        self.batches.append(batch[:, 0].tolist())
        assert self.gate.wait(10)
        if 255 in batch:
            raise RuntimeError("planted")
        return [2 * value for value in batch[:, 0].tolist()]


def rows(*values: int) -> NDArray[np.uint8]:
    """Return rows (values, 3), each filled with one of the given values."""
    return np.repeat(np.array(values, dtype=np.uint8)[:, np.newaxis], 3, axis=1)


async def answers(batcher: MicroBatcher[int], *values: int) -> Sequence[int]:
    return await batcher.submit(rows(*values)).answer


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def submit_while_busy(
    batcher: MicroBatcher[int], model: Recorder, requests: list[list[int]]
) -> list[Submission[int]]:
    """Occupy the model with row 0, and queue the other rows; the gate stays shut."""
    model.gate.clear()
    submissions = [batcher.submit(rows(0))]
    while not model.batches:
        await asyncio.sleep(0.001)
    return submissions + [batcher.submit(rows(*values)) for values in requests]


def test_every_request_receives_the_results_of_its_own_rows_in_order() -> None:
    async def work() -> None:
        batcher = MicroBatcher(Recorder().run, 8)
        requests = [[value % 200] * (value % 3) + [value % 100] for value in range(100)]
        found = await asyncio.gather(*(answers(batcher, *values) for values in requests))
        assert found == [[2 * value for value in values] for values in requests]
        await batcher.close()

    run(work())


def test_requests_queued_during_a_batch_form_the_next_batch_in_order() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 3)
        submissions = await submit_while_busy(batcher, model, [[1], [2], [3], [4]])
        assert batcher.num_waiting == 4
        model.gate.set()
        await asyncio.gather(*(submission.answer for submission in submissions))
        assert model.batches == [[0], [1, 2, 3], [4]]
        await batcher.close()

    run(work())


def test_quick_batches_run_in_the_event_loop_and_larger_ones_on_a_thread() -> None:
    async def work() -> None:
        threads: list[tuple[int, int]] = []

        def answer(batch: NDArray[np.uint8]) -> list[int]:
            threads.append((len(batch), threading.get_ident()))
            return [2 * value for value in batch[:, 0].tolist()]

        batcher = MicroBatcher(answer, 8, quick_rows=4)
        assert await asyncio.gather(*(answers(batcher, value) for value in (1, 2, 3))) == [
            [2],
            [4],
            [6],
        ]
        assert await asyncio.gather(*(answers(batcher, value) for value in (4, 5, 6, 7, 8))) == [
            [8],
            [10],
            [12],
            [14],
            [16],
        ]
        here = threading.get_ident()
        assert threads[0] == (3, here)
        assert threads[1][0] == 5
        assert threads[1][1] != here
        await batcher.close()

    run(work())


def test_quick_batch_waits_while_the_event_loop_still_adds_requests() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8, quick_rows=8)

        async def after(num_turns: int) -> Sequence[int]:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            return await answers(batcher, num_turns)

        await asyncio.gather(*(after(num_turns) for num_turns in (0, 1, 2, 3, 4, 12)))
        assert model.batches == [[0, 1, 2, 3, 4], [12]]
        model.batches.clear()
        await asyncio.gather(*(after(num_turns) for num_turns in range(20)))
        assert [value for batch in model.batches for value in batch] == list(range(20))
        assert len(model.batches[0]) == 8  # no more than a batch holds, however many arrive
        await batcher.close()

    run(work())


def test_other_tasks_run_between_two_quick_batches() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 2, quick_rows=2)
        seen: list[int] = []

        async def look() -> None:
            while len(model.batches) < 4:
                seen.append(len(model.batches))
                await asyncio.sleep(0)

        await asyncio.gather(answers(batcher, *range(8)), look())
        assert model.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert {1, 2, 3} <= set(seen)
        await batcher.close()

    run(work())


def test_late_decoding_happens_once_and_its_errors_affect_only_its_request() -> None:
    model, read = Recorder(), []

    def reading(value: int) -> NDArray[np.uint8]:
        read.append(value)
        if value == 7:
            raise ValueError("cannot be read")
        return rows(value, value)[: 1 if value == 8 else 2]

    async def work() -> None:
        batcher = MicroBatcher(model.run, 3, quick_rows=3)
        submissions = [
            batcher.submit_unread(lambda value=value: reading(value), 2)  # type: ignore[misc]
            for value in (1, 7, 2, 8, 3)
        ]
        assert not read
        assert batcher.num_waiting == 10
        submissions[4].answer.cancel()
        found = await asyncio.gather(*(one.answer for one in submissions), return_exceptions=True)
        kinds = [one if isinstance(one, list) else type(one) for one in found]
        assert kinds == [[2, 2], ValueError, [4, 4], RuntimeError, asyncio.CancelledError]
        assert model.batches == [[1, 1, 2], [2]]
        assert read == [1, 7, 2, 8]  # none twice, and none that nobody waits for
        assert submissions[2].inputs.tolist() == rows(2, 2).tolist()
        await batcher.close()

    run(work())


def test_a_model_slower_than_measured_moves_from_the_event_loop_to_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        threads, seconds = list[int](), [0.03, 0.03, 0.0, 0.03, 0.03, 0.03, 0.0, 0.0]
        clock = [0.0]  # processor time of the event loop's thread

        def answer(batch: NDArray[np.uint8]) -> list[int]:
            clock.append(clock[-1] + seconds[len(threads)])
            threads.append(threading.get_ident())
            return [0] * len(batch)

        batcher = MicroBatcher(answer, 8, quick_rows=8)
        monkeypatch.setattr(batching, "thread_time", lambda: clock[-1])
        for _ in seconds:
            await answers(batcher, 1)
        here = threading.get_ident()
        assert [thread == here for thread in threads] == [True] * 6 + [False] * 2
        assert caplog.text.count("from now on it has a thread") == 1
        await batcher.close()

    run(work())


def test_a_failing_quick_batch_fails_its_requests_and_the_next_one_runs() -> None:
    async def work() -> None:
        batcher = MicroBatcher(Recorder().run, 2, quick_rows=2)
        found = await asyncio.gather(
            *(answers(batcher, value) for value in (1, 255, 3)), return_exceptions=True
        )
        assert [str(one) for one in found] == ["planted", "planted", "[6]"]
        await batcher.close()

    run(work())


def test_request_completes_when_all_its_batches_are_done() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 4)
        submissions = await submit_while_busy(batcher, model, [[1, 2], [3, 4, 5, 6, 7], [8]])
        assert batcher.num_waiting == 8
        model.gate.set()
        found = [await submission.answer for submission in submissions]
        assert found == [[0], [2, 4], [6, 8, 10, 12, 14], [16]]
        assert model.batches == [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
        await batcher.close()

    run(work())


def test_each_batch_is_reported_with_its_size_and_fraction_of_the_largest() -> None:
    async def work() -> None:
        noted: list[tuple[int, float]] = []
        batcher = MicroBatcher(
            Recorder().run, 4, lambda num_rows, fill, seconds: noted.append((num_rows, fill))
        )
        await answers(batcher, 1, 2, 3, 4, 5)
        assert noted == [(4, 1.0), (1, 0.25)]
        await batcher.close()

    run(work())


def test_batcher_runs_a_single_request_without_waiting_for_others() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        submission = batcher.submit(rows(1))
        for _ in range(5):  # turns of the loop, without a timer
            await asyncio.sleep(0)
        assert submission.num_taken == 1
        await submission.answer
        assert model.batches == [[1]]
        await batcher.close()

    run(work())


def test_queue_time_and_inference_time_are_measured_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(batching, "perf_counter", clock.perf_counter)

    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        first, second = await submit_while_busy(batcher, model, [[1]])
        clock.sleep(1)
        model.gate.set()
        await asyncio.gather(first.answer, second.answer)
        assert (first.begun - first.queued, first.ended - first.begun) == (0, 1)
        assert (second.begun - second.queued, second.ended - second.begun) == (1, 0)
        await batcher.close()

    run(work())


def test_batcher_drops_an_expired_request_and_runs_its_neighbours() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        submissions = await submit_while_busy(batcher, model, [[1], [2, 20], [3]])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await submissions[2].answer
        model.gate.set()
        assert [await submissions[number].answer for number in (1, 3)] == [[2], [6]]
        assert model.batches == [[0], [1, 3]]
        assert [submission.num_taken for submission in submissions] == [1, 1, 0, 1]
        await batcher.close()

    run(work())


def test_the_remaining_rows_of_a_request_that_expires_between_batches_are_dropped() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 2)
        model.gate.clear()
        large = batcher.submit(rows(1, 2, 3, 4))
        behind = batcher.submit(rows(5))
        while not model.batches:
            await asyncio.sleep(0.001)
        large.answer.cancel()
        model.gate.set()
        assert await behind.answer == [10]
        assert model.batches == [[1, 2], [5]]
        await batcher.close()

    run(work())


def test_a_request_that_expires_in_a_running_batch_does_not_affect_others() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        submissions = await submit_while_busy(batcher, model, [[1]])
        submissions[0].answer.cancel()
        model.gate.set()
        assert await submissions[1].answer == [2]
        await batcher.close()

    run(work())


def test_a_failing_batch_fails_its_requests_and_the_next_batch_runs() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 2)
        with pytest.raises(RuntimeError, match="planted"):
            await answers(batcher, 1, 255, 3, 4)
        assert await answers(batcher, 4) == [8]
        assert model.batches == [[1, 255], [4]]
        await batcher.close()

    run(work())


def test_batch_fails_if_the_model_returns_too_few_results() -> None:
    async def work() -> None:
        batcher = MicroBatcher(lambda batch: [0] * (len(batch) - 1), 8)
        with pytest.raises(RuntimeError, match="answered 2 rows to a batch of 3"):
            await answers(batcher, 1, 2, 3)
        await batcher.close()

    run(work())


def test_closing_the_batcher_finishes_its_queue() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 2)
        submissions = await submit_while_busy(batcher, model, [[1], [2], [3]])
        model.gate.set()
        await batcher.close()
        assert [submission.answer.result() for submission in submissions] == [[0], [2], [4], [6]]

    run(work())


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_next_power_of_two_rounds_up_to_a_power_of_two(count: int, expected: int) -> None:
    assert next_power_of_two(count) == expected


@pytest.mark.parametrize(("most", "size"), [(16, 8), (6, 6)])
def test_padding_a_batch_changes_no_prediction(most: int, size: int) -> None:
    sizes = []

    def twice(batch: NDArray[np.uint8]) -> Answers:
        sizes.append(len(batch))
        return Answers(batch.astype(np.float32) * 2, batch[:, 0].astype(np.float32))

    batch = np.arange(15, dtype=np.uint8).reshape(5, 3)
    outputs, scores = padded(twice, most)(batch)
    assert (outputs == batch * 2).all()
    assert (scores == batch[:, 0]).all()
    assert sizes == [size]


def test_shedding_refuses_the_newest_waiting_requests() -> None:
    async def work() -> None:
        recorder = Recorder()
        batcher = MicroBatcher(recorder.run, 2)
        submissions = [batcher.submit(np.full((2, 1), number)) for number in range(5)]
        await asyncio.sleep(0)  # the first is with the model
        batcher.shed(3, lambda num_rows: OverflowError(f"{num_rows} rows sent out"))
        done = await asyncio.gather(
            *(submission.answer for submission in submissions), return_exceptions=True
        )
        assert [str(one) if isinstance(one, OverflowError) else None for one in done] == [
            None,
            None,
            *["2 rows sent out"] * 3,
        ]
        await batcher.close()

    run(work())
