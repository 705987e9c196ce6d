"""An answered request leaves nothing in memory that only Python's search for rings would find, hundreds of bodies later."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from serving.inference import Inference
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import put_in_place_of
from tests.serving.test_exchange import connected_to

PNG, JSON, FORM = b"image/png", b"application/json", b"multipart/form-data; boundary=b"
LARGE = b"\x89PNG" + bytes(100_000)  # decoded on a thread


def form(*images: bytes) -> bytes:
    parts = [b'--b\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n%s\r\n' % image for image in images]
    return b"".join([*parts, b"--b--\r\n"])


def left_behind(inference: Inference, body: bytes, media_type: bytes, path: bytes = b"/predict") -> tuple[bytes, list[str]]:
    """The status of the answer, and what our own code made of the objects that are found."""
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (path, media_type, len(body))

    async def ask(connection: Any, transport: Any) -> None:
        transport.written = b""
        connection.data_received(head + body)
        while connection.tasks:
            await asyncio.sleep(0.001)

    async def work() -> tuple[bytes, list[str]]:
        inference.start()
        await inference.loaded()
        connection, transport = connected_to(inference)
        await ask(connection, transport)  # what is made once is there
        gc.collect()
        gc.freeze()  # what other tests hold is not searched again
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask(connection, transport)
            gc.collect()
            found = [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith(("serving.", "slipway."))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()
        connection.connection_lost(None)
        await inference.stop()
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


@pytest.mark.parametrize(("status", "body", "media_type"), SENT)
def test_an_image_leaves_nothing(status: bytes, body: bytes, media_type: bytes, make_settings: MakeSettings) -> None:
    assert left_behind(Inference(make_settings(watch=False)), body, media_type) == (status, [])


@pytest.mark.parametrize("path", [b"/explain", b"/v2/models/slipway/infer", b"/nothing"])
def test_another_path_leaves_nothing(path: bytes, make_settings: MakeSettings) -> None:
    assert left_behind(Inference(make_settings(watch=False)), b"bad", PNG, path)[1] == []


@pytest.mark.parametrize("body", [b'{"age": 1}', b'{"age": 1' + b" " * 5000 + b', "x": 2}', b'{"age": 1e300}', b"[", b"[1]"])
def test_a_row_leaves_nothing(body: bytes, certified_table: Path, make_settings: MakeSettings) -> None:
    assert left_behind(Inference(make_settings(watch=False)), body, JSON)[1] == []


PIXELS = b'{"inputs": [{"name": "image", "shape": [1, 64, 64, 3], "datatype": "%s", "data": [%s]}]}'
SEVENS = b",".join([b"7"] * (64 * 64 * 3))


@pytest.mark.parametrize(
    ("status", "body"), [(b"200", PIXELS % (b"UINT8", SEVENS)), (b"422", PIXELS % (b"BOOL", SEVENS)), (b"400", b"[" * 9999)]
)
def test_what_is_read_on_a_thread_of_its_own_leaves_nothing(status: bytes, body: bytes, make_settings: MakeSettings) -> None:
    assert left_behind(Inference(make_settings(watch=False)), body, JSON, b"/v2/models/slipway/infer") == (status, [])


def test_a_batch_that_fails_leaves_nothing(make_settings: MakeSettings) -> None:
    def fail(batch: Any) -> Any:
        raise RuntimeError("planted")

    class Failing(Inference):
        async def loaded(self) -> None:
            await super().loaded()
            assert self._live
            put_in_place_of(self._live, fail)

    assert left_behind(Failing(make_settings(watch=False)), picture(), PNG) == (b"500", [])


def test_what_is_left_is_seen(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr("serving.front._let_go_of_frames", lambda error: None)
    assert "Refusal" in left_behind(Inference(make_settings(watch=False)), b"small", PNG)[1]
