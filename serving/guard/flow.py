"""What piles up on a connection: requests sent at once that wait for those before them, and answers that their caller does not read.

uvicorn (0.54) reads on with each answer it writes, and so parses and keeps thousands of requests for one that it answers; and it waits
without end for a caller that reads nothing, also when the service has to end.
"""

import asyncio
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Reads no further while requests wait in `waiting`, and cuts a caller that takes nothing of what is left for it in `timeout_s`."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized, timeout_s: float) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._num_left = 0  # bytes, when it was looked at last
        self._timer: asyncio.TimerHandle | None = None

    def resume_reading(self) -> None:
        """Unless requests wait. That a caller is gone shows only when it is answered then."""
        if not self._waiting:
            super().resume_reading()

    def pause_writing(self) -> None:
        """There is more than the system takes at once."""
        super().pause_writing()
        self.require_reading()

    def resume_writing(self) -> None:
        """Enough was taken, or the connection is lost."""
        super().resume_writing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def require_reading(self) -> None:
        """The caller has to take some of what is left for it, if there is anything, and then some more."""
        self._num_left = self._transport.get_write_buffer_size()
        if self._num_left and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() >= self._num_left:
            self._transport.abort()
        else:
            self.require_reading()
