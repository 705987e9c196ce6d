"""One thread of its own for work that would hold up the event loop: what waits for it keeps nothing else of the service waiting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.http.responses import RETRY_AFTER, Refusal

Made = TypeVar("Made")


class OwnThread:
    """Does one thing after the other. At most `most_waiting` wait, the one that is done included: each may hold a whole body."""

    def __init__(self, name: str, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], Made]) -> Made:
        """What `work` gives or raises; Refusal where too much waits. Of a caller that is cancelled, what has not begun never will."""
        if self._num_waiting >= self._most_waiting:
            message = f"{self._num_waiting} large requests are waiting, the limit (SLIPWAY_MAX_QUEUE); try again later"
            raise Refusal("queue_full", message, headers=(RETRY_AFTER,))
        waiting = [work]
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: waiting.pop()()
            )
        finally:
            waiting.clear()  # the thread's queue would keep it, and its body, until it gets there
            self._num_waiting -= 1

    def close(self) -> None:
        """End the thread once it has done what it does; nobody waits for that."""
        self._thread.shutdown(wait=False, cancel_futures=True)
