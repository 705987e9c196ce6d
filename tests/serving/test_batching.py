import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.batching import MicroBatcher, next_power_of_two, padded
from slipway.calibration import Answers


class Recorder:
    """A model that answers twice its input, notes every batch, and waits at a gate while it is shut."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch: NDArray[np.uint8]) -> Answers:
        self.batches.append(batch[:, 0].tolist())
        assert self.gate.wait(10)
        if 255 in batch:
            raise RuntimeError("planted")
        return Answers(batch.astype(np.float32) * 2, batch[:, 0].astype(np.float32))


def item(value: int) -> NDArray[np.uint8]:
    return np.full(3, value, dtype=np.uint8)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def submit_while_busy(batcher: MicroBatcher, model: Recorder, values: list[int]) -> list[asyncio.Task[Any]]:
    """Occupy the model with item 0, queue the others behind it; the gate is still shut."""
    model.gate.clear()
    tasks = [asyncio.create_task(batcher.submit(item(0)))]
    while not model.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(batcher.submit(item(value))) for value in values]
    await asyncio.sleep(0)
    return tasks


def test_every_caller_gets_the_answer_to_its_own_item() -> None:
    async def work() -> None:
        batcher = MicroBatcher(Recorder().run, 8)
        answers = await asyncio.gather(*(batcher.submit(item(value)) for value in range(100)))
        assert [answer.outputs[0] for answer in answers] == [2.0 * value for value in range(100)]
        assert [answer.score for answer in answers] == list(range(100))
        await batcher.close()

    run(work())


def test_requests_that_queue_while_a_batch_runs_go_together_in_order() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 3)
        tasks = await submit_while_busy(batcher, model, [1, 2, 3, 4])
        assert batcher.num_waiting == 4
        model.gate.set()
        await asyncio.gather(*tasks)
        assert model.batches == [[0], [1, 2, 3], [4]]
        await batcher.close()

    run(work())


def test_a_lone_request_does_not_wait_for_company() -> None:
    async def work() -> None:
        batcher = MicroBatcher(Recorder().run, 8)
        answer = await batcher.submit(item(1))
        assert answer.batch_size == 1
        assert answer.queue_seconds < 0.05
        await batcher.close()

    run(work())


def test_an_expired_request_never_reaches_the_model_and_its_neighbours_do() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        tasks = await submit_while_busy(batcher, model, [1, 2, 3])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await tasks[2]
        model.gate.set()
        answers = await asyncio.gather(tasks[1], tasks[3])
        assert [answer.outputs[0] for answer in answers] == [2.0, 6.0]
        assert model.batches == [[0], [1, 3]]
        await batcher.close()

    run(work())


def test_a_request_that_expires_in_the_running_batch_hurts_no_neighbour() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        tasks = await submit_while_busy(batcher, model, [1])
        tasks[0].cancel()
        model.gate.set()
        assert (await tasks[1]).outputs[0] == 2.0
        await batcher.close()

    run(work())


def test_a_failing_batch_fails_its_callers_and_the_next_batch_runs() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 8)
        with pytest.raises(RuntimeError, match="planted"):
            await batcher.submit(item(255))
        assert (await batcher.submit(item(4))).outputs[0] == 8.0
        await batcher.close()

    run(work())


def test_close_lets_the_queue_run_empty() -> None:
    async def work() -> None:
        model = Recorder()
        batcher = MicroBatcher(model.run, 2)
        tasks = await submit_while_busy(batcher, model, [1, 2, 3])
        model.gate.set()
        await batcher.close()
        assert [task.result().outputs[0] for task in await settle(tasks)] == [0.0, 2.0, 4.0, 6.0]

    async def settle(tasks: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
        await asyncio.gather(*tasks)
        return tasks

    run(work())


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_next_power_of_two(count: int, expected: int) -> None:
    assert next_power_of_two(count) == expected


def test_padding_changes_the_size_that_runs_and_not_the_answers() -> None:
    model = Recorder()
    batch = np.arange(15, dtype=np.uint8).reshape(5, 3)
    outputs, scores = padded(model.run, 16)(batch)
    assert (outputs == batch * 2).all()
    assert (scores == batch[:, 0]).all()
    assert len(model.batches[0]) == 8


def test_padding_never_goes_beyond_the_largest_batch() -> None:
    model = Recorder()
    batch = np.arange(15, dtype=np.uint8).reshape(5, 3)
    assert (padded(model.run, 6)(batch).outputs == batch * 2).all()
    assert len(model.batches[0]) == 6
