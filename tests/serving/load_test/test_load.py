"""The load generator loses no request by a fault of its own."""

import asyncio

import pytest

from slipway.serving.load_test import load
from slipway.serving.load_test.load import Callers, http_request

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def num_connections(pause: float) -> int:
    """Return the number of connections that a caller opens for two requests with a pause."""
    made = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        while await reader.read(1 << 16):
            writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    callers = Callers(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for number in range(2):
        answer = await callers.ask(number, http_request("/livez", method="GET"))
        assert answer.status == 200
        await asyncio.sleep(pause)
    callers.close()
    server.close()
    for writer in made:
        writer.close()
    return len(made)


@pytest.mark.parametrize(("pause", "expected"), [(0.0, 1), (0.3, 2)])
def test_load_test_does_not_reuse_a_connection_after_a_long_idle_time(
    monkeypatch: pytest.MonkeyPatch, pause: float, expected: int
) -> None:
    """A service may close an idle connection as a request arrives (RFC 9112, section 9.3.1)."""
    monkeypatch.setattr(load, "MAX_IDLE_S", 0.2)
    assert asyncio.run(num_connections(pause)) == expected
