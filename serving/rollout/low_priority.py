"""Threads that give way to requests: what a rollout does beside them takes the processor time that is left over.

On Linux a thread has a priority of its own; elsewhere nothing changes. There is no way back for a thread, so each work has its own.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_NICENESS = 19
Result = TypeVar("Result")


def be_nice() -> None:
    """Lower the priority of this thread as far as it goes, and of threads that it starts."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


async def at_low_priority(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done on a thread of its own."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="slipway-rollout", initializer=be_nice)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)
