"""Calls over gRPC from plain HTTP/2 frames, which no well-behaved client would send.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4  # types of frames
END_HEADERS = 4
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = b"\x014", b"\x018"  # values of grpc-status, as on the wire
FRAME_BYTES = 16 << 10
SOON_S = 20.0


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def headers(path: str) -> bytes:
    """Encode the headers of a call as literals (RFC 7541, section 6.2.2)."""
    named = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    named |= {"te": "trailers", "content-type": "application/grpc"}
    texts = [text for one in named.items() for text in one]
    encoded = [bytes((len(text),)) + text.encode() for text in texts]
    literals = zip(encoded[::2], encoded[1::2], strict=True)
    return b"".join(b"\0" + name + value for name, value in literals)


class Call:
    """A call whose message never ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, content: bytes) -> None:
        self._writer.write(frame(DATA, 0, 1, content))
        await self._writer.drain()

    async def status(self) -> bytes:
        """Return length and text of the status with which the service ends the call."""
        received = b""
        async with asyncio.timeout(SOON_S):
            while not (found := re.search(rb"grpc-status(..)", received, re.DOTALL)):
                piece = await self._reader.read(FRAME_BYTES)
                assert piece, received
                received += piece
        return found[1]


@asynccontextmanager
async def call(port: int, path: str, content: bytes = b"") -> AsyncIterator[Call]:
    """Open a connection with one call that begins with `content`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, headers(path)))
    made = Call(reader, writer)
    if content:
        await made.send(content)
    try:
        yield made
    finally:
        writer.close()


def announced(num_bytes: int) -> bytes:
    """Return the begin of a message of `num_bytes`."""
    return struct.pack(">BI", 0, num_bytes) + b"x"
