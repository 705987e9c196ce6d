"""A head that comes again is understood as the parser would understand it, and nothing else is taken for it."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.guard import connections
from serving.guard.connections import Connection
from serving.guard.repeated_head import Head, repeated_head
from serving.http.responses import Response
from serving.http.routes import Request
from serving.settings import Settings
from serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker
from tests.serving.test_exchange import Transport, connected_to, turns

Seen = list[tuple[str, str, bytes, dict[bytes, bytes], bytes]]
HEAD = b"POST /predict?a=b HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %s\r\nAccept: */*\r\n\r\n"


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head % str(len(body)).encode() + body


class Recording:
    """The place of the application: remembers what it is asked."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def answers(self, path: str) -> bool:
        return True

    async def respond(self, request: Request) -> Response | None:
        body = request.body
        if body is None:
            body, is_more = b"", True
            while is_more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    return None
                body, is_more = body + message["body"], message["more_body"]
        self.seen.append((request.method, request.path, request.query, dict(request.headers), body))
        return Response(200, b"{}")


def recorded(worker: ModelWorker) -> tuple[Connection, Transport, Seen]:
    """A connection whose requests are remembered."""
    connection, transport = connected_to(worker)
    application: Any = Recording()
    connection._application = application
    return connection, transport, application.seen


def without_a_parser(connection: Connection) -> None:
    """From now on a request that would be parsed fails."""
    parser: Any = None
    connection.parser = parser


def test_the_same_head_is_not_parsed_again_whatever_length_its_body_has(
    make_settings: MakeSettings,
) -> None:
    async def work() -> None:
        connection, transport, seen = recorded(full_worker(make_settings()))
        connection.data_received(request(b"first"))
        await turns()
        without_a_parser(connection)
        bodies = [b"again", b"", b"longer than before" * 100, b"a", b"b"]
        for body in bodies:
            connection.data_received(request(body))
            await turns()
        assert [one[4] for one in seen] == [b"first", *bodies]
        for method, path, query, headers, body in seen:
            assert (method, path, query) == ("POST", "/predict", b"a=b")
            length = str(len(body)).encode()
            assert headers == {
                b"host": b"localhost",
                b"content-type": b"image/png",
                b"content-length": length,
                b"accept": b"*/*",
            }
        assert transport.written.count(b"HTTP/1.1 200 OK") == 1 + len(bodies)
        assert not connection.tasks
        connection.connection_lost(None)

    asyncio.run(work())


def test_a_request_behind_one_that_is_answered_waits_for_it(make_settings: MakeSettings) -> None:
    async def work() -> None:
        connection, transport, seen = recorded(full_worker(make_settings()))
        connection.data_received(request(b"1"))
        await turns()
        connection.data_received(request(b"2"))
        connection.data_received(request(b"3"))  # the one before has no answer yet
        assert len(connection.pipeline) == 1
        await turns(10)
        assert [one[4] for one in seen] == [b"1", b"2", b"3"]
        assert transport.written.count(b"HTTP/1.1 200 OK") == 3
        connection.connection_lost(None)

    asyncio.run(work())


def test_connections_end_with_their_next_answer_while_the_service_drains(
    make_settings: MakeSettings,
) -> None:
    async def work() -> None:
        worker = full_worker(make_settings())
        connection, transport, _ = recorded(worker)
        connection.data_received(request(b"1"))
        await turns()
        worker.is_draining = True
        without_a_parser(connection)
        connection.data_received(request(b"2"))
        await turns()
        assert transport.written.count(b"connection: close") == 1
        assert transport.is_closed

    asyncio.run(work())


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"Content-Length: ", b"Content-Length:  "),
        HEAD.replace(b"Accept: */*", b"Expect: 100-continue"),
        HEAD.replace(b"Accept: */*", b"X-Long: " + b"x" * 3000),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"Accept: */*", b"Connection: close"),
    ],
)
def test_some_heads_are_parsed_each_time(make_settings: MakeSettings, head: bytes) -> None:
    async def work() -> None:
        connection, _, seen = recorded(full_worker(make_settings()))
        connection.data_received(request(b"first", head))
        await turns()
        assert len(seen) == 1
        assert connection._repeated is None
        connection.connection_lost(None)

    asyncio.run(work())


def test_a_length_that_only_begins_like_the_declared_one_is_not_its_place() -> None:
    """Else "1" would be known as the digits of "12", and each length that follows be cut off."""
    head = Head("POST", "/predict", b"", {b"content-length": b"1"})
    assert repeated_head(head, request(b"x" * 12)[:-11]) is None


EVIL = b"POST /evil HTTP/1.1\r\nfoo: "
# What one party might end a request at, and another not: pieces of these are sent in any order, cut anywhere.
PIECES = [
    request(b"pixels"),
    request(b"other pixels"),
    request(b""),
    request(b"pixels", HEAD.replace(b"Accept: */*", b"Accept: text/html")),
    request(b"pixels").replace(b"Content-Length: 6", b"Content-Length: 06"),
    request(b"pixels").replace(b"Content-Length: 6", b"Content-Length: +6"),
    request(b"pixels").replace(b"Content-Length: 6", b"Content-Length: 6\r\nContent-Length: 6"),
    request(b"pixels").replace(b"Content-Length: 6", b"Content-Length: 5"),
    request(b"pixels").replace(b"Content-Length: 6", b"Content-Length: 6 "),
    request(b"pixels").replace(b"\r\n", b"\n"),
    request(request(b"pixels")),
    request(b"pixels").replace(b"Accept: */*", b"Accept: */*\r\nConnection: close"),
    HEAD.replace(b"Content-Length: %s", b"Transfer-Encoding: chunked")
    + b"6\r\npixels\r\n0\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
    EVIL,
    b"\r\n",
    b"x",
]


@pytest.mark.parametrize(
    "data",
    [
        [
            request(b"a"),
            EVIL,
            request(b"b"),
            request(b"c"),
        ],  # a head that comes again within another
        [
            EVIL,
            request(b"a"),
            request(b"b"),
        ],  # the end of a head that looks like one, and is not to be known by
        [
            request(b"a"),
            request(b"x" * 500)[:-450],
            request(b"b"),
            b"x" * (450 - len(request(b"b"))),
            request(b"c"),
        ],  # within a body
        [
            request(b"x" * 50)[:-10],
            b"x" * 10 + request(b"a"),
            b"x" * 10 + request(b"a"),
        ],  # behind the end of a body
        [request(b"a"), request(b"b") + request(b"c")],
        [request(b"a"), request(b"b")[:-1], b"b" + request(b"c")],
        [
            request(b"a"),
            request(b"b").replace(b"Content-Length: 1", b"Content-Length: 1\r\nContent-Length: 1"),
        ],
        [request(b"a"), request(b"b").replace(b"Content-Length: 1", b"Content-Length: -1")],
        [request(b"a"), request(b"b").replace(b"Content-Length: 1", b"Content-Length: 0000000001")],
    ],
)
@pytest.mark.parametrize("num_turns", [0, 5])
def test_a_request_begins_where_the_one_before_ended(data: list[bytes], num_turns: int) -> None:
    understood = asyncio.run(_understood(data, num_turns, remembers=True))
    assert understood == asyncio.run(_understood(data, num_turns, remembers=False))
    assert understood[0]


@pytest.mark.process
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 1200), max_size=4),
    is_cut=st.booleans(),
    num_turns=st.integers(0, 8),
)
@settings(max_examples=200, deadline=None)
def test_what_is_understood_is_what_the_parser_understands(
    pieces: list[bytes], cuts: list[int], is_cut: bool, num_turns: int
) -> None:
    stream = b"".join([request(b"before"), *pieces])
    bounds = sorted(
        {0, len(request(b"before")), *(cut for cut in cuts if cut < len(stream)), len(stream)}
    )
    data = (
        [stream[begin:end] for begin, end in pairwise(bounds)]
        if is_cut
        else [request(b"before"), *pieces]
    )
    assert asyncio.run(_understood(data, num_turns, remembers=True)) == asyncio.run(
        _understood(data, num_turns, remembers=False)
    )


async def _understood(
    data: list[bytes], num_turns: int, *, remembers: bool
) -> tuple[Seen, list[bytes], bool]:
    """The requests that were seen, the states of the answers, and whether the connection was ended."""
    with pytest.MonkeyPatch.context() as patch:
        if not remembers:
            patch.setattr(connections, "repeated_head", lambda head, data: None)
        connection, transport, seen = recorded(ModelWorker(Settings(), ()))
        for one in data:
            if not transport.is_closed:
                connection.data_received(one)
            await turns(num_turns)
        await turns(40)
        lines = [line for line in transport.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        is_closed = transport.is_closed or connection._is_deaf
        connection.connection_lost(None)
        await turns()
    return seen, lines, is_closed
