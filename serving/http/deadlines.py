"""One timer for the deadlines of all requests: each has the same time, so the first that began is the first to expire.

`asyncio.timeout` arms and takes back a timer for each of them, which is 7 of the 90 µs that a small prediction takes.
"""

import asyncio
from types import TracebackType


class Deadlines:
    """Gives each block of code `seconds`; what is still in it then is cancelled, and leaves it as TimeoutError."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running: dict[
            Deadline, float
        ] = {}  # when each ends, the first first: event loop's seconds
        self.is_armed = False

    def deadline(self) -> "Deadline":
        """To be entered by the task whose time runs: `with deadlines.deadline():`."""
        return Deadline(self)

    def arm(self, end: float) -> None:
        """Have the timer go off for the first deadline that runs."""
        self.is_armed = True
        asyncio.get_running_loop().call_at(end, self._expire)

    def _expire(self) -> None:
        self.is_armed, now = False, asyncio.get_running_loop().time()
        for deadline, end in list(self.running.items()):
            if end > now:
                self.arm(end)
                return
            del self.running[deadline]
            deadline.expire()


class Deadline:
    """Of one block of code."""

    __slots__ = ("_all", "_is_expired", "_task")

    def __init__(self, deadlines: Deadlines) -> None:
        self._all = deadlines
        self._is_expired = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline is a task's")
        self._task, all_of_them = task, self._all
        all_of_them.running[self] = end = loop.time() + all_of_them.seconds
        if not all_of_them.is_armed:
            all_of_them.arm(end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_expired:
            del self._all.running[self]
        # Another that cancelled the task as well has to find it cancelled: then its requests are more than ours.
        elif self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """The time is up."""
        self._is_expired = True
        self._task.cancel()
