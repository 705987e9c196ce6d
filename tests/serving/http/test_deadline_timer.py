"""The timer that all deadlines share; test_deadlines.py tests its effect on requests."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from slipway.serving.http.deadlines import Deadlines


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def sleep(deadlines: Deadlines, seconds: float) -> float:
    with deadlines.deadline():
        await asyncio.sleep(seconds)
    return seconds


def test_only_the_block_beyond_its_deadline_is_cancelled() -> None:
    async def work() -> None:
        deadlines = Deadlines(0.2)
        found = await asyncio.gather(
            *(sleep(deadlines, 5 if number % 3 == 0 else 0.01) for number in range(12)),
            return_exceptions=True,
        )
        assert [isinstance(one, TimeoutError) for one in found] == [
            number % 3 == 0 for number in range(12)
        ]
        (later,) = await asyncio.gather(
            sleep(deadlines, 5), return_exceptions=True
        )  # the timer is armed again
        assert isinstance(later, TimeoutError)

    run(work())


def test_each_deadline_counts_from_its_own_start() -> None:
    async def expire(deadlines: Deadlines, delay: float) -> float:
        await asyncio.sleep(delay)
        started = time.perf_counter()
        with pytest.raises(TimeoutError):
            await sleep(deadlines, 10)
        return time.perf_counter() - started

    async def work() -> None:
        deadlines = Deadlines(0.3)
        found = await asyncio.gather(*(expire(deadlines, delay) for delay in (0.0, 0.1, 0.25)))
        assert all(seconds > 0.29 for seconds in found)

    run(work())


def test_a_task_cancelled_by_another_raises_cancelled_error() -> None:
    async def work() -> None:
        task = asyncio.create_task(sleep(Deadlines(5), 10))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())


def test_a_task_both_late_and_cancelled_raises_cancelled_error() -> None:
    async def work() -> None:
        task = asyncio.create_task(sleep(Deadlines(0.05), 10))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, time.sleep, 0.1)  # so that both come in one turn of the loop
        loop.call_later(0.03, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())


def test_exception_of_a_block_past_its_deadline_is_raised_unchanged() -> None:
    async def fail_late(deadlines: Deadlines) -> None:
        with deadlines.deadline():
            time.sleep(0.03)
            raise ValueError("in the block")

    async def fail_instead(deadlines: Deadlines) -> None:
        with deadlines.deadline():
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                raise ValueError("instead") from None

    async def work() -> None:
        deadlines = Deadlines(0.01)
        with pytest.raises(ValueError, match="in the block"):
            await fail_late(deadlines)
        await asyncio.sleep(0.05)  # nothing is cancelled afterwards
        with pytest.raises(ValueError, match="instead"):
            await fail_instead(deadlines)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(work())


@pytest.mark.process
def test_a_finished_deadline_is_removed_at_once() -> None:
    class Large:
        """An object that a request references."""

    async def quick(deadlines: Deadlines) -> None:
        held = Large()
        await sleep(deadlines, 0)
        assert held

    async def work() -> None:
        deadlines = Deadlines(60)
        await asyncio.gather(*(quick(deadlines) for _ in range(100)))
        gc.collect()
        assert not deadlines.running
        assert not [found for found in gc.get_objects() if type(found) is Large]

    run(work())
