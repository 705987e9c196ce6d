"""Every limit of the real service, at the limit and one above; and what a refused request costs."""

import gzip
import io
import json
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.serving.http.framing import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES
from slipway.serving.http.responses import ERRORS
from slipway.serving.http.strict_json import MAX_DEPTH, MAX_DIGITS
from tests import plain_http
from tests.data.pictures import HEIC, WRITTEN
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    ROW,
    certify,
    picture,
    row_classifier,
    write_bundle,
)
from tests.serving.http.test_hostile_clients import answers, connect, error_in, rest_of
from tests.serving.server import Server, running
from tests.serving.test_service import chunk, peak_memory, png_of

pytestmark = pytest.mark.process
PNG = {"content-type": "image/png"}
JSON = {"content-type": "application/json"}
MAX_BODY_BYTES = 16 << 20  # the default
MAX_ITEMS, MAX_ROWS, MAX_PIXELS = 4, 8, 10_000
TIMEOUT_S = 3.0
MAX_COST = 20e6  # bytes that a refused request may add to the most that a worker ever held


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    contract = CONTRACT.model_copy(update={"max_pixels": MAX_PIXELS})
    certify(folder / "certificate.json", write_bundle(folder / "bundle", input=contract))
    with running(folder, max_items=MAX_ITEMS, request_timeout_s=TIMEOUT_S) as server:
        server.wait()
        plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
        yield server


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("table")
    certify(folder / "certificate.json", write_bundle(folder / "bundle", row_classifier()))
    with running(folder, max_rows=MAX_ROWS) as server:
        server.wait()
        plain_http.post(server.url + "/predict", json=ROW)
        yield server


def asked(server: Server, **request: Any) -> str:
    """Send a request. Returns the error's code, or "answered"; refusing it must cost little."""
    with memory_of(server) as cost:
        answer = plain_http.post(server.url + "/predict", timeout=30, **request)
    if answer.status_code == 200:
        return "answered"
    code: str = answer.json()["error"]["code"]
    assert cost[0] < MAX_COST, code
    return code


@contextmanager
def memory_of(server: Server) -> Iterator[list[float]]:
    """Measure the growth of the worker's peak memory in the block, in bytes."""
    process, cost = Path(f"/proc/{server.worker()}"), [0.0]
    (process / "clear_refs").write_text("5")  # its peak is what it holds now: proc(5)
    before = peak_memory(server)
    yield cost
    cost[0] = peak_memory(server) - before


def in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1 << 20):
        yield body[start : start + (1 << 20)]


def form_of(num_bytes: int) -> bytes:
    """Build a form of `num_bytes` with one file, which is not an image."""
    head, tail = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n',
        b"\r\n--b--\r\n",
    )
    return head + b"x" * (num_bytes - len(head) - len(tail)) + tail


def test_raw_chunked_and_form_bodies_are_accepted_up_to_the_limit(images: Server) -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    for headers, body_of in ((PNG, lambda num_bytes: b"x" * num_bytes), (form, form_of)):
        at_limit, above = body_of(MAX_BODY_BYTES), body_of(MAX_BODY_BYTES + 1)
        assert asked(images, content=at_limit, headers=headers) == "undecodable"
        assert asked(images, content=above, headers=headers) == "body_too_large"
        assert asked(images, content=in_pieces(at_limit), headers=headers) == "undecodable"
        assert asked(images, content=in_pieces(above), headers=headers) == "body_too_large"


LARGE = bytes(40 << 20)


@pytest.mark.parametrize(("path", "code"), [("/predict", "body_too_large"), ("/nope", "not_found")])
def test_caller_that_sends_connection_close_can_read_why_its_large_body_is_refused(
    images: Server, path: str, code: str
) -> None:
    """urllib sends `Connection: close` with every request, and the whole body before it reads."""
    for _ in range(5):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(images.url + path, LARGE, PNG))
        with refused.value:
            assert json.load(refused.value)["error"]["code"] == code
            assert refused.value.status == ERRORS[code]


def test_form_may_contain_images_up_to_the_limit(images: Server) -> None:
    files = [
        ("image", (f"{number}.png", picture(number), "image/png"))
        for number in range(MAX_ITEMS + 1)
    ]
    assert asked(images, files=files[:-1]) == "answered"
    assert asked(images, files=files) == "too_many_items"


def test_an_image_may_have_pixels_up_to_the_limit(images: Server) -> None:
    assert asked(images, content=png_of(100, MAX_PIXELS // 100), headers=PNG) == "answered"
    assert asked(images, content=png_of(MAX_PIXELS + 1, 1), headers=PNG) == "pixel_bomb"
    assert asked(images, content=png_of(5_000, 5_000), headers=PNG) == "pixel_bomb"


def with_text(num_bytes: int) -> bytes:
    """Build a PNG that also contains a compressed text of this size."""
    image = png_of(8, 8)
    text = chunk(b"zTXt", b"comment\0\0" + zlib.compress(b"x" * num_bytes, 9))
    return image[:33] + text + image[33:]


def test_compressed_metadata_of_an_image_is_limited_to_a_megabyte(images: Server) -> None:
    assert asked(images, content=with_text(1 << 20), headers=PNG) == "answered"
    assert asked(images, content=with_text((1 << 20) + 1), headers=PNG) == "undecodable"
    assert asked(images, content=with_text(1 << 26), headers=PNG) == "undecodable"


def encoded(image_format: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(stream, image_format)
    return stream.getvalue()


def test_only_the_image_formats_of_training_are_decoded(images: Server) -> None:
    assert asked(images, content=HEIC, headers=PNG) == "answered"
    for image_format in WRITTEN:
        assert asked(images, content=encoded(image_format), headers=PNG) == "answered", image_format
    for image_format in ("PPM", "TGA", "ICO", "SGI", "PCX", "DDS", "JPEG2000"):
        assert asked(images, content=encoded(image_format), headers=PNG) == "undecodable", (
            image_format
        )


def test_gzip_and_deflate_bodies_are_accepted_and_other_encodings_refused(
    images: Server, table: Server
) -> None:
    for server, body, headers in (
        (images, picture(), PNG),
        (table, json.dumps(ROW).encode(), JSON),
    ):
        for encoding, packed, outcome in (
            ("gzip", gzip.compress(body), "answered"),
            ("deflate", zlib.compress(body), "answered"),
            ("identity", body, "answered"),
            ("gzip", body, "malformed_body"),
            ("br", body, "unsupported_media_type"),
            ("identity, gzip", gzip.compress(body), "unsupported_media_type"),
            ("x", body, "unsupported_media_type"),
        ):
            sent = headers | {"content-encoding": encoding}
            assert asked(server, content=packed, headers=sent) == outcome, encoding
        bomb = gzip.compress(bytes(MAX_BODY_BYTES + 1))
        assert asked(server, content=bomb, headers=headers | {"content-encoding": "gzip"}) == (
            "body_too_large"
        )


def head_of(url_bytes: int = 6, num_headers: int = 2, num_bytes: int = 0) -> bytes:
    """Return a head for /livez with a URL of `url_bytes`, and at least `num_bytes` in all."""
    url = b"/livez" + (b"?" + b"u" * (url_bytes - 7) if url_bytes > 6 else b"")
    start = b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" % url
    start += b"".join(b"x%d: y\r\n" % number for number in range(num_headers - 2))
    padding = num_bytes - len(start) - len(b"pad: \r\n\r\n")
    return start + (b"pad: " + b"p" * padding + b"\r\n\r\n" if padding > 0 else b"\r\n")


def test_url_and_headers_are_accepted_up_to_their_limits(
    images: Server,
) -> None:
    separators = len(b"GET  HTTP/1.1\r\nhost: \r\nconnection: \r\npad: \r\n\r\n")
    for at_limit, above, code in (
        (head_of(url_bytes=MAX_URL_BYTES), head_of(url_bytes=MAX_URL_BYTES + 1), "url_too_long"),
        (
            head_of(num_headers=MAX_HEADERS),
            head_of(num_headers=MAX_HEADERS + 1),
            "headers_too_large",
        ),
        (
            head_of(num_bytes=MAX_HEAD_BYTES),
            head_of(num_bytes=MAX_HEAD_BYTES + separators + 1),
            "headers_too_large",
        ),
    ):
        assert answers(images, at_limit).startswith(b"HTTP/1.1 200 ")
        assert error_in(answers(images, above))["code"] == code


def test_headers_may_arrive_until_the_timeout(images: Server) -> None:
    head = head_of()
    with connect(images) as in_time, connect(images) as too_late:
        for connection in (in_time, too_late):
            connection.sendall(head[:20])
        time.sleep(TIMEOUT_S / 3)
        in_time.sendall(head[20:])
        assert rest_of(in_time).startswith(b"HTTP/1.1 200 ")
        assert error_in(rest_of(too_late))["code"] == "header_timeout"


def test_json_may_be_nested_up_to_the_limit(table: Server) -> None:
    def nested(depth: int) -> bytes:
        return b'{"rows":[{"age":' + b"[" * (depth - 3) + b"]" * (depth - 3) + b"}]}"

    assert asked(table, content=nested(MAX_DEPTH), headers=JSON) == "type_violation"
    assert asked(table, content=nested(MAX_DEPTH + 1), headers=JSON) == "malformed_json"


def test_a_number_may_have_digits_up_to_the_limit(table: Server) -> None:
    def row(num_digits: int) -> bytes:
        return json.dumps(ROW).replace("28500.5", "0." + "1" * (num_digits - 2)).encode()

    assert asked(table, content=row(MAX_DIGITS), headers=JSON) == "answered"
    assert asked(table, content=row(MAX_DIGITS + 1), headers=JSON) == "malformed_json"


def test_a_request_may_have_rows_and_values_up_to_the_limit(table: Server) -> None:
    assert asked(table, json={"rows": [ROW] * MAX_ROWS}) == "answered"
    assert asked(table, json={"rows": [ROW] * (MAX_ROWS + 1)}) == "too_many_rows"
    most = (MAX_ROWS + 1) * (len(COLUMNS.columns) + 4) + 1024
    assert asked(table, json={f"x{number}": 1 for number in range(most - 2)}) == "unknown_column"
    assert asked(table, json={f"x{number}": 1 for number in range(most - 1)}) == "too_many_rows"


@pytest.mark.parametrize("unit", [b"[", b'"",', b"{}", b'{"a":', b"0,"])
def test_refusing_the_largest_body_with_too_many_values_costs_little(
    table: Server, unit: bytes
) -> None:
    for _ in range(3):  # also once buffers of that size have been freed
        assert (
            asked(table, content=unit * (MAX_BODY_BYTES // len(unit)), headers=JSON)
            == "too_many_rows"
        )
    assert asked(table, json=ROW) == "answered"


def test_the_memory_check_notices_the_memory_that_a_request_takes(images: Server) -> None:
    """Three bodies held at once use more memory than one request may."""
    head = (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
        b"content-length: %d\r\n\r\n" % MAX_BODY_BYTES
    )
    with memory_of(images) as cost, ExitStack() as open_connections:
        for _ in range(3):
            connection = open_connections.enter_context(connect(images))
            connection.sendall(head + b"x" * (MAX_BODY_BYTES - 1))
        time.sleep(0.5)
    assert cost[0] > MAX_COST
