"""The body of a request on its way in, and what is done with the rest of one that is refused.

A refusal that is sent while its caller still sends may be lost: many clients send a whole body before they read, and a connection that
is closed with unread bytes is reset (RFC 9112, section 9.6). So the rest is read and forgotten, up to a bound.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.types import Message, Receive

DRAIN_S = 2.5  # at most: a caller that sends more slowly is answered all the same
DRAIN_BYTES_S = 25e6  # guess: reading as much takes about a twentieth of a core
REFUSAL_BYTES = 16 << 10  # guess: a refusal without a body takes as long


class Incoming:
    """Receives a body, and knows whether it was asked for and whether all of it came."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_asked_for = False
        self.is_whole = False
        self.is_drained = False  # as far as it is going to be
        self.num_bytes = 0  # that came

    async def __call__(self) -> Message:
        """The next message, as `receive` in ASGI."""
        self.is_asked_for = True
        message = await self._receive()
        self.num_bytes += len(message.get("body", b""))
        self.is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def drain(self, max_bytes: int, seconds: float) -> None:
        """Read and forget the rest, at most about `max_bytes` and for `seconds`."""
        most, self.is_drained = self.num_bytes + max_bytes, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_whole and self.num_bytes <= most:
                    await self()


@dataclass(frozen=True)
class Turn:
    """The treatment of a refused caller."""

    wait_s: float
    is_read: bool  # then; else it is answered without its body being read
    num_bytes: int  # that its body is said to have


class Turns:
    """Lets refused bodies in one after the other, no faster than DRAIN_BYTES_S.

    Callers that ask again at once would otherwise have the service read bodies that it refuses instead of answering others.
    Times are seconds of any clock.
    """

    def __init__(self, max_waiting: int, most_s: float) -> None:
        """At most `max_waiting` callers wait, each at most `most_s` seconds."""
        self._max_waiting, self._most_s = max_waiting, most_s
        self._num_waiting = 0
        self._free_at = 0.0

    def take(self, now: float, num_bytes: int) -> Turn | None:
        """The turn of a body that is said to have so many bytes, to be ended; None if too many wait."""
        if self._num_waiting >= self._max_waiting:
            return None
        self._num_waiting += 1
        begin = max(self._free_at, now)
        if begin - now > self._most_s:
            return Turn(self._most_s, is_read=False, num_bytes=num_bytes)
        self._free_at = begin + (num_bytes + REFUSAL_BYTES) / DRAIN_BYTES_S
        return Turn(begin - now, is_read=True, num_bytes=num_bytes)

    def end(self, turn: Turn, num_read: int) -> None:
        """It is over; what was said of its body and not read is not charged."""
        self._num_waiting -= 1
        if turn.is_read:
            self._free_at += (num_read - turn.num_bytes) / DRAIN_BYTES_S
