"""Completed requests leave no reference cycles, which only the garbage collector could free."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.serving.extensions import EXTENSIONS
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.http.test_connections import connected_to
from tests.serving.in_process import full_worker, put_in_place_of

pytestmark = pytest.mark.process
PNG, JSON, FORM = b"image/png", b"application/json", b"multipart/form-data; boundary=b"
LARGE = b"\x89PNG" + bytes(100_000)  # decoded on a thread


def form(*images: bytes) -> bytes:
    parts = [
        b'--b\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n%s\r\n' % image
        for image in images
    ]
    return b"".join([*parts, b"--b--\r\n"])


async def found_after(work: Callable[[], Awaitable[Any]]) -> list[str]:
    """Return the objects of Slipway's code in reference cycles that `work` leaves behind."""
    gc.collect()
    gc.freeze()  # what other tests hold is not searched again, here and in later tests
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await work()
        gc.collect()
        return [
            type(one).__qualname__
            for one in gc.garbage
            if type(one).__module__.startswith(("serving.", "slipway."))
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def left_behind(
    worker: ModelWorker, body: bytes, media_type: bytes, path: bytes = b"/predict"
) -> tuple[bytes, list[str]]:
    """Return the status of the response, and the objects of Slipway's code that stay behind."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        % (path, media_type, len(body))
    )

    async def ask(asked: Any, connection: Any, transport: Any) -> None:
        transport.written = b""
        connection.data_received(head + body)
        while asked.state.tasks:
            await asyncio.sleep(0.001)

    async def work() -> tuple[bytes, list[str]]:
        worker.start()
        await worker.loaded()
        asked, connection, transport = connected_to(worker)
        await ask(asked, connection, transport)  # what is made once is there
        found = await found_after(lambda: ask(asked, connection, transport))
        connection.connection_lost(None)
        await worker.stop()
        return transport.written.split(b" ")[1], found

    return asyncio.run(asyncio.wait_for(work(), 30))


SENT = [
    (b"200", picture(), PNG),
    (b"422", b"small", PNG),
    (b"422", LARGE, PNG),
    (b"200", form(picture()), FORM),
    (b"200", form(picture(), picture()), FORM),
    (b"422", form(picture(), LARGE), FORM),
    (b"400", form(picture())[:-10], FORM),
    (b"415", b"text", b"text/plain"),
]


REFUSED = [
    b"no request\r\n\r\n",
    b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: other\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\nexpect: more\r\ncontent-length: 1\r\n\r\na",
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    b"transfer-encoding: chunked\r\n\r\n1\r\na\r\nno chunk\r\n",
]


@pytest.mark.parametrize("sent", REFUSED)
def test_a_refused_connection_leaves_no_objects_behind(
    sent: bytes, make_settings: MakeSettings
) -> None:
    worker = full_worker(make_settings(monitoring=False))

    async def refused() -> bytes:
        asked, connection, transport = connected_to(worker)
        connection.data_received(sent)
        while asked.state.tasks:
            await asyncio.sleep(0.001)
        connection.connection_lost(None)
        return transport.written

    async def work() -> None:
        worker.start()
        await worker.loaded()
        assert (await refused()).startswith(b"HTTP/1.1 4")  # what is made once is there
        # Each connection here has an application of its own, which holds itself.
        assert {"Connection", "Request", "RequestBody", "Refusal"}.isdisjoint(
            await found_after(refused)
        )
        await worker.stop()

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize(("status", "body", "media_type"), SENT)
def test_an_image_request_leaves_no_objects_behind(
    status: bytes, body: bytes, media_type: bytes, make_settings: MakeSettings
) -> None:
    assert left_behind(full_worker(make_settings(monitoring=False)), body, media_type) == (
        status,
        [],
    )


@pytest.mark.parametrize("path", [b"/explain", b"/v2/models/slipway/infer", b"/nothing"])
def test_requests_to_other_paths_leave_no_objects_behind(
    path: bytes, make_settings: MakeSettings
) -> None:
    assert left_behind(full_worker(make_settings(monitoring=False)), b"bad", PNG, path)[1] == []


@pytest.mark.parametrize(
    "body",
    [b'{"age": 1}', b'{"age": 1' + b" " * 5000 + b', "x": 2}', b'{"age": 1e300}', b"[", b"[1]"],
)
def test_a_row_request_leaves_no_objects_behind(
    body: bytes, certified_table: Path, make_settings: MakeSettings
) -> None:
    assert left_behind(full_worker(make_settings(monitoring=False)), body, JSON)[1] == []


PIXELS = b'{"inputs": [{"name": "image", "shape": [1, 64, 64, 3], "datatype": "%s", "data": [%s]}]}'
SEVENS = b",".join([b"7"] * (64 * 64 * 3))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (b"200", PIXELS % (b"UINT8", SEVENS)),
        (b"422", PIXELS % (b"BOOL", SEVENS)),
        (b"400", b"[" * 9999),
    ],
)
def test_requests_parsed_on_a_thread_leave_no_objects_behind(
    status: bytes, body: bytes, make_settings: MakeSettings
) -> None:
    assert left_behind(
        full_worker(make_settings(monitoring=False)), body, JSON, b"/v2/models/slipway/infer"
    ) == (status, [])


def test_a_failing_batch_leaves_no_objects_behind(make_settings: MakeSettings) -> None:
    def fail(batch: Any) -> Any:
        raise RuntimeError("planted")

    class Failing(ModelWorker):
        async def loaded(self) -> None:
            await super().loaded()
            assert self._live
            put_in_place_of(self._live, fail)

    assert left_behind(Failing(make_settings(monitoring=False), EXTENSIONS), picture(), PNG) == (
        b"500",
        [],
    )


def test_the_leak_check_finds_objects_that_a_request_left_behind(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fix, refusals stay behind."""
    monkeypatch.setattr("slipway.serving.app._drop_tracebacks", lambda error: None)
    assert "Refusal" in left_behind(full_worker(make_settings(monitoring=False)), b"small", PNG)[1]
