"""Generates load: open loop (requests at given times) or closed loop (one after the other).

In an open loop, latency counts from the time a request was due, so neither a slow service nor a
slow client can hide waiting time (coordinated omission). Requests are never repeated. A request
whose connection broke before the response has status 0.
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

# Longest idle time of a reused connection. A service closes it after 5 s, and a request sent at
# that moment is lost.
MAX_IDLE_S = 2.0
REFUSED = 0  # status of a broken or missing connection
GIVE_UP_S = 30.0


@dataclass(frozen=True)
class Answer:
    """The response to one request: its status, body and times."""

    number: int  # number of the request
    due: float  # perf_counter seconds
    seconds: float  # from `due` to the end of the answer
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def content(self) -> Any:
        """Parse the body as JSON. Raises ValueError for other content, including NaN."""
        return json.loads(self.body, parse_constant=_no_json)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def http_request(
    path: str = "/predict",
    body: bytes = b"",
    content_type: str = "image/png",
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (),
) -> bytes:
    """Encode an HTTP/1.1 request, which leaves the connection open."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if body or method == "POST":
        lines += [f"content-type: {content_type}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Caller(asyncio.Protocol):
    """One HTTP/1.1 connection of the load test, with at most one request in flight."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: tuple[int, dict[bytes, bytes]] | None = None
        self._answer: asyncio.Future[tuple[int, dict[bytes, bytes], bytes]] | None = None
        # An answer before any request: the service refused the connection.
        self._unsolicited: tuple[int, dict[bytes, bytes], bytes] | None = None
        self._has_body = True
        self._answered = 0.0  # time of the last answer, perf_counter
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.is_open = True

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, dict[bytes, bytes], bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        if self._unsolicited:
            self._answer.set_result(self._unsolicited)
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
        return self.is_open and time.perf_counter() - self._answered < MAX_IDLE_S

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def _end(self, answer: tuple[int, dict[bytes, bytes], bytes]) -> None:
        self._answered = time.perf_counter()
        if self._answer is None:
            self._unsolicited = self._unsolicited or answer
        elif not self._answer.done():
            self._answer.set_result(answer)


@dataclass
class Callers:
    """Sends requests to one service over connections that are reused."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    _free: list[_Caller] = field(default_factory=list)
    _all: list[_Caller] = field(default_factory=list)

    async def ask(self, number: int, request: bytes, due: float | None = None) -> Answer:
        """Send one request, and return its response, which is also stored.

        `due` is the time at which the request should have been sent (perf_counter), from which
        latency counts; None means now.
        """
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
        """Close all connections."""
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
    """Send `rate` requests per second at random times (Poisson process) for `seconds`."""
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
            await asyncio.sleep(0)  # lets a client that is late read answers
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
    """Send requests from `num_callers` callers, each of which waits for a response before its next.

    Stops after `seconds` or `num_requests`, whichever comes first.
    """
    callers, ends = Callers(url), time.perf_counter() + seconds
    numbers = iter(range(num_requests))

    async def call() -> None:
        while time.perf_counter() < ends and (number := next(numbers, None)) is not None:
            await callers.ask(number, request_of(number))

    await asyncio.gather(*(call() for _ in range(num_callers)))
    callers.close()
    return callers.answers


def ask_each(url: str, requests: Sequence[bytes], num_callers: int = 8) -> list[Answer]:
    """Send each request once. Returns the responses in the order of the requests."""
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
    """Run a coroutine on uvloop, which takes less processor time."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def by_status(answers: Iterable[Answer]) -> Counter[int]:
    """Return the number of responses by status."""
    return Counter(answer.status for answer in answers)


def latency(answers: Iterable[Answer], fraction: float = 0.99, status: int = 200) -> float:
    """Return the `fraction` quantile of the latency, in seconds, of responses with this status."""
    waits = sorted(answer.seconds for answer in answers if answer.status == status)
    return waits[min(len(waits) - 1, int(len(waits) * fraction))]
