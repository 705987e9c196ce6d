"""The body of a request on its way in, and what is done with the rest of one that is refused.

A refusal that is sent while its caller still sends may be lost: many clients send a whole body before they read, and a connection that
is closed with unread bytes is reset (RFC 9112, section 9.6). So the rest is read and forgotten, up to a bound.
"""

import asyncio

from starlette.types import Message, Receive

DRAIN_S = 2.5  # at most: a caller that sends more slowly is answered all the same
DRAIN_BYTES_S = 50e6  # guess: reading as much takes about a twentieth of a core
REFUSAL_BYTES = 16 << 10  # guess: a refusal without a body takes as long


class Incoming:
    """Receives a body, and knows whether it was asked for and whether all of it came."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_asked_for = False
        self.is_whole = False
        self.is_drained = False  # as far as it is going to be

    async def __call__(self) -> Message:
        """The next message, as `receive` in ASGI."""
        self.is_asked_for = True
        message = await self._receive()
        self.is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def drain(self, max_bytes: int, seconds: float) -> None:
        """Read and forget the rest, at most about `max_bytes` and for `seconds`."""
        num_bytes, self.is_drained = 0, True
        try:
            async with asyncio.timeout(seconds):
                while not self.is_whole and num_bytes <= max_bytes:
                    num_bytes += len((await self()).get("body", b""))
        except TimeoutError:
            return


class Turns:
    """Lets refused bodies in one after the other, no faster than DRAIN_BYTES_S.

    Callers that ask again at once would otherwise have the service read bodies that it refuses instead of answering others.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_s(self, now: float, num_bytes: int, most_s: float) -> float:
        """Seconds until the turn of a body of so many bytes, `most_s` at most; `now` in seconds of any clock."""
        begin = max(self._free_at, now)
        self._free_at = min(begin + (num_bytes + REFUSAL_BYTES) / DRAIN_BYTES_S, now + most_s)
        return min(begin - now, most_s)
