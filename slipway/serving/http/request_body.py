"""Receives the body of a request, and drains the bodies of refused requests.

Many clients send a whole body before they read the response. Closing a connection with unread bytes
resets it (RFC 9112, section 9.6), and the client would lose an early refusal. So the service reads
and discards the rest of a refused body, up to a limit.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.types import Message, Receive

DRAIN_S = 2.5  # time limit of draining; a slower client is answered anyway
DRAIN_BYTES_S = 25e6  # guess: reading at this rate takes about a twentieth of a core
REFUSAL_BYTES = 16 << 10  # guess: the cost of a refusal without a body, in bytes


class RequestBody:
    """Receives a body and tracks how much of it arrived."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_requested = False  # somebody waited for the body
        self.is_complete = False
        self.is_drained = False  # the rest of the body will not be read
        self.num_bytes = 0  # received so far

    async def __call__(self) -> Message:
        self.is_requested = True
        message = await self._receive()
        self.num_bytes += len(message.get("body", b""))
        is_disconnect = message["type"] == "http.disconnect"
        self.is_complete = is_disconnect or not message.get("more_body", False)
        return message

    async def drain(self, max_bytes: int, seconds: float) -> None:
        """Read and discard the rest of the body: about `max_bytes`, for at most `seconds`."""
        limit, self.is_drained = self.num_bytes + max_bytes, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_complete and self.num_bytes <= limit:
                    await self()


@dataclass(frozen=True)
class DrainSlot:
    """The place of a refused request in the DrainQueue; its turn comes after `wait_s` seconds."""

    wait_s: float
    is_read: bool  # False: after the wait it is answered without reading its body
    num_bytes: int  # expected size of its body


class DrainQueue:
    """Schedules the draining of refused bodies: one at a time, at most DRAIN_BYTES_S bytes/s.

    Without this limit, callers that retry at once would keep the service busy with bodies that it
    refuses. The queue reads no clock: callers pass the time in seconds.
    """

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._num_waiting = 0
        self._free_at = 0.0

    def take(self, now: float, num_bytes: int) -> DrainSlot | None:
        """Reserve a slot for a body of about `num_bytes`. Returns None if too many slots are taken.

        The caller must release the slot with `end`.
        """
        if self._num_waiting >= self._max_waiting:
            return None
        self._num_waiting += 1
        begin = max(self._free_at, now)
        if begin - now > self._max_wait_s:
            return DrainSlot(self._max_wait_s, is_read=False, num_bytes=num_bytes)
        self._free_at = begin + (num_bytes + REFUSAL_BYTES) / DRAIN_BYTES_S
        return DrainSlot(begin - now, is_read=True, num_bytes=num_bytes)

    def end(self, slot: DrainSlot, num_read: int) -> None:
        """Release a slot, with the reserved time of the bytes that were not read."""
        self._num_waiting -= 1
        if slot.is_read:
            self._free_at += (num_read - slot.num_bytes) / DRAIN_BYTES_S
