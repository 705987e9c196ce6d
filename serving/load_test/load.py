"""Callers in numbers against a real service: at given times whatever the answers do (open loop), or one after the other (closed loop).

In an open loop a latency counts from the time at which the request was due, so a slow service, or a slow client, cannot hide what
callers would have waited. Nothing is ever sent twice. A connection that broke before its answer is status 0.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

MOST_IDLE_S = 2.0  # of a connection that is used again: a service closes it after 5 s, and what is sent to it just then is lost
REFUSED = 0  # in place of a status: no connection, or it ended without an answer
GIVE_UP_S = 30.0


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    number: int  # of the request
    due: float  # perf_counter seconds
    seconds: float  # from then to the whole answer
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def content(self) -> Any:
        """The body as JSON; ValueError if it is none (NaN is none)."""
        return json.loads(self.body, parse_constant=_no_json)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def http_request(
    path: str = "/predict",
    body: bytes = b"",
    content_type: str = "image/png",
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (),
) -> bytes:
    """A whole request, for a connection that is kept open."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if body or method == "POST":
        lines += [f"content-type: {content_type}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Caller(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: tuple[int, dict[bytes, bytes]] | None = None
        self._answer: asyncio.Future[tuple[int, dict[bytes, bytes], bytes]] | None = None
        self._unasked: tuple[int, dict[bytes, bytes], bytes] | None = (
            None  # a refusal of the connection itself
        )
        self._has_body = True
        self._answered = 0.0  # when it was answered last, perf_counter
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = (
            cast(asyncio.Transport, transport),
            True,
        )  # uvloop's is no subclass

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, dict[bytes, bytes], bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        if self._unasked:
            self._answer.set_result(self._unasked)
            return self._answer
        self._has_body = not request.startswith(b"HEAD ")
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._head is None or self._head[0] < 200:  # 100 Continue comes before the answer
            head, separator, _ = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            del self._received[: len(head) + 4]
            first, *lines = bytes(head).split(b"\r\n")
            pairs = (line.partition(b":")[::2] for line in lines)
            self._head = (
                int(first.split()[1]),
                {name.lower(): value.strip() for name, value in pairs},
            )
        status, headers = self._head
        length = int(headers[b"content-length"]) if self._has_body else 0
        if len(self._received) >= length:
            body, self._head = bytes(self._received[:length]), None
            del self._received[:length]
            if headers.get(b"connection") == b"close":
                self.close()
            self._end((status, headers, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end((REFUSED, {}, b""))

    @property
    def is_fresh(self) -> bool:
        return self.is_open and time.perf_counter() - self._answered < MOST_IDLE_S

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def _end(self, answer: tuple[int, dict[bytes, bytes], bytes]) -> None:
        self._answered = time.perf_counter()
        if self._answer is None:
            self._unasked = self._unasked or answer
        elif not self._answer.done():
            self._answer.set_result(answer)


@dataclass
class Callers:
    """Connections to one service, each used again when it is free."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    _free: list[_Caller] = field(default_factory=list)
    _all: list[_Caller] = field(default_factory=list)

    async def ask(self, number: int, request: bytes, due: float | None = None) -> Answer:
        """Send one request and keep its answer."""
        due = time.perf_counter() if due is None else due
        try:
            async with asyncio.timeout(GIVE_UP_S):
                caller = await self._connection()
                status, headers, body = await caller.ask(request)
            if caller.is_open:
                self._free.append(caller)
        except (OSError, TimeoutError):
            status, headers, body = REFUSED, {}, b""
        answer = Answer(number, due, time.perf_counter() - due, status, headers, body)
        self.answers.append(answer)
        return answer

    def close(self) -> None:
        """Close what is open."""
        for caller in self._all:
            if caller.is_open:
                caller.close()

    async def _connection(self) -> _Caller:
        while self._free:
            caller = self._free.pop()
            if caller.is_fresh:
                return caller
            caller.close()
        url = urlsplit(self.url)
        _, caller = await asyncio.get_running_loop().create_connection(
            _Caller, url.hostname or "", url.port or 80
        )
        self._all.append(caller)
        return caller


async def open_loop(
    url: str, request_of: Callable[[int], bytes], rate: float, seconds: float, seed: int = 0
) -> list[Answer]:
    """`rate` requests a second at random times (Poisson) for `seconds`, whatever the answers do."""
    callers, draw, tasks = Callers(url), random.Random(seed), set[asyncio.Task[Answer]]()
    began = time.perf_counter()
    due, number = began, 0
    while (due := due + draw.expovariate(rate)) < began + seconds:
        if (ahead := due - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        task = asyncio.create_task(callers.ask(number, request_of(number), due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        if number % 8 == 0:
            await asyncio.sleep(0)  # where the client lags, answers are still read
    await asyncio.gather(*tasks)
    callers.close()
    return callers.answers


async def closed_loop(
    url: str,
    request_of: Callable[[int], bytes],
    num_callers: int,
    *,
    seconds: float = 60.0,
    num_requests: int = 1 << 62,
) -> list[Answer]:
    """`num_callers` who each ask again when they are answered, until the time or the number is reached."""
    callers, ends = Callers(url), time.perf_counter() + seconds
    numbers = iter(range(num_requests))

    async def call() -> None:
        while time.perf_counter() < ends and (number := next(numbers, None)) is not None:
            await callers.ask(number, request_of(number))

    await asyncio.gather(*(call() for _ in range(num_callers)))
    callers.close()
    return callers.answers


def ask_each(url: str, requests: Sequence[bytes], num_callers: int = 8) -> list[Answer]:
    """The answers to `requests`, in their order; each is sent once."""
    answers = run(
        closed_loop(
            url,
            lambda number: requests[number],
            num_callers,
            num_requests=len(requests),
            seconds=600,
        )
    )
    return sorted(answers, key=lambda answer: answer.number)


def run(main: Any) -> Any:
    """Run a coroutine on the quicker loop, so that the client takes less of the cores."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def by_status(answers: Iterable[Answer]) -> Counter[int]:
    """How many of each status."""
    return Counter(answer.status for answer in answers)


def latency(answers: Iterable[Answer], share: float = 0.99, status: int = 200) -> float:
    """Seconds that `share` of those with that status waited at most."""
    waits = sorted(answer.seconds for answer in answers if answer.status == status)
    return waits[min(len(waits) - 1, int(len(waits) * share))]
