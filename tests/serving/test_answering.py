"""An answer written in one piece is the same as one that goes through uvicorn's `send`, which checks each header."""

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serving.guard.connections import answer_at_once
from serving.responses import RETRY_AFTER, Refusal, Response, error_response, json_response, send_response

ANSWERS = [
    json_response({"label": "cat"}),
    Response(200, "ä".encode(), content_type="text/plain; charset=utf-8"),
    error_response(Refusal("not_found", "there is nothing here"), "abc.1"),
    Response(200, b""),
]


class Transport(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


def cycle_of(transport: Transport, *, keep_alive: bool = True) -> tuple[RequestResponseCycle, list[str]]:
    """A request that waits for its answer, and what is told when it has it."""
    ended: list[str] = []
    scope: Any = {"type": "http", "method": "POST", "path": "/predict"}
    logger = logging.getLogger("test")
    cycle = RequestResponseCycle(
        scope, transport, FlowControl(transport), logger, logger, False, [(b"date", b"today"), (b"server", b"uvicorn")], asyncio.Event(),
        False, keep_alive, lambda: ended.append("ended"),
    )  # fmt: skip
    return cycle, ended


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("response", ANSWERS)
def test_an_answer_in_one_piece_is_the_same_to_the_byte(response: Response, keep_alive: bool) -> None:
    at_once, checked = Transport(), Transport()

    async def work() -> None:
        cycle, ended = cycle_of(checked, keep_alive=keep_alive)
        send: Any = cycle.send
        await send_response(response, "abc.1", send)
        quick, quick_ended = cycle_of(at_once, keep_alive=keep_alive)
        assert answer_at_once(quick, response, "abc.1")
        assert quick.response_complete
        assert quick.message_event.is_set()
        assert quick_ended == ended == ["ended"]

    asyncio.run(work())
    assert headers_and_body(at_once) == headers_and_body(checked)
    assert at_once.is_closed is checked.is_closed is not keep_alive


def headers_and_body(transport: Transport) -> tuple[bytes, list[bytes], bytes]:
    """Status line, headers in any order, body."""
    head, _, body = transport.written.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, sorted(headers), body


@pytest.mark.parametrize("obstacle", ["headers of its own", "a full buffer", "no caller", "an answer that has begun"])
def test_an_answer_that_has_to_be_checked_or_to_wait_is_left_to_uvicorn(obstacle: str) -> None:
    async def work() -> None:
        transport = Transport()
        cycle, ended = cycle_of(transport)
        response = Response(200, b"{}", headers=(RETRY_AFTER,) if obstacle == "headers of its own" else ())
        cycle.flow.write_paused = obstacle == "a full buffer"
        cycle.disconnected = obstacle == "no caller"
        cycle.response_started = obstacle == "an answer that has begun"
        assert not answer_at_once(cycle, response, "abc.1")
        assert not transport.written
        assert not ended
        assert not cycle.response_complete

    asyncio.run(work())
