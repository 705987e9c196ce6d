"""Every limit of the real service, at the limit and one above; and what a refused request costs."""

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

from serving.http.framing import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES
from serving.http.responses import ERRORS
from serving.http.strict_json import MAX_DEPTH, MAX_DIGITS
from slipway.inputs.images import FORMATS
from tests import plain_http
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    ROW,
    certify,
    picture,
    row_classifier,
    write_bundle,
)
from tests.serving.server import Server, running
from tests.serving.test_connections import answers, connect, error_in, rest_of
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
    """The code of the error, or "answered"; a refused request costs little."""
    with memory_of(server) as cost:
        answer = plain_http.post(server.url + "/predict", timeout=30, **request)
    if answer.status_code == 200:
        return "answered"
    code: str = answer.json()["error"]["code"]
    assert cost[0] < MAX_COST, code
    return code


@contextmanager
def memory_of(server: Server) -> Iterator[list[float]]:
    """Fills the list with the bytes that the worker held at most beyond what it had at the beginning."""
    process, cost = Path(f"/proc/{server.worker()}"), [0.0]
    (process / "clear_refs").write_text("5")  # its peak is what it holds now: proc(5)
    before = peak_memory(server)
    yield cost
    cost[0] = peak_memory(server) - before


def in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1 << 20):
        yield body[start : start + (1 << 20)]


def form_of(num_bytes: int) -> bytes:
    """A form of so many bytes with one file, which is no image."""
    head, tail = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n',
        b"\r\n--b--\r\n",
    )
    return head + b"x" * (num_bytes - len(head) - len(tail)) + tail


def test_a_body_declared_in_pieces_or_in_a_form_is_taken_up_to_its_limit(images: Server) -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    for headers, body_of in ((PNG, lambda num_bytes: b"x" * num_bytes), (form, form_of)):
        at_limit, above = body_of(MAX_BODY_BYTES), body_of(MAX_BODY_BYTES + 1)
        assert asked(images, content=at_limit, headers=headers) == "undecodable"
        assert asked(images, content=above, headers=headers) == "body_too_large"
        assert asked(images, content=in_pieces(at_limit), headers=headers) == "undecodable"
        assert asked(images, content=in_pieces(above), headers=headers) == "body_too_large"


LARGE = bytes(40 << 20)


@pytest.mark.parametrize(("path", "code"), [("/predict", "body_too_large"), ("/nope", "not_found")])
def test_a_caller_that_asks_for_one_answer_only_reads_why_its_large_body_is_refused(
    images: Server, path: str, code: str
) -> None:
    """urllib sends `Connection: close` with every request, and the whole body before it reads."""
    for _ in range(5):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(images.url + path, LARGE, PNG))
        with refused.value:
            assert json.load(refused.value)["error"]["code"] == code
            assert refused.value.status == ERRORS[code]


def test_a_form_holds_as_many_images_as_the_limit(images: Server) -> None:
    files = [
        ("image", (f"{number}.png", picture(number), "image/png"))
        for number in range(MAX_ITEMS + 1)
    ]
    assert asked(images, files=files[:-1]) == "answered"
    assert asked(images, files=files) == "too_many_items"


def test_an_image_has_as_many_pixels_as_the_limit(images: Server) -> None:
    assert asked(images, content=png_of(100, MAX_PIXELS // 100), headers=PNG) == "answered"
    assert asked(images, content=png_of(MAX_PIXELS + 1, 1), headers=PNG) == "pixel_bomb"
    assert asked(images, content=png_of(5_000, 5_000), headers=PNG) == "pixel_bomb"


def with_text(num_bytes: int) -> bytes:
    """A PNG with a compressed text of so many bytes beside its pixels."""
    image = png_of(8, 8)
    text = chunk(b"zTXt", b"comment\0\0" + zlib.compress(b"x" * num_bytes, 9))
    return image[:33] + text + image[33:]


def test_what_is_packed_beside_the_pixels_is_not_unpacked_beyond_a_megabyte(images: Server) -> None:
    assert asked(images, content=with_text(1 << 20), headers=PNG) == "answered"
    assert asked(images, content=with_text((1 << 20) + 1), headers=PNG) == "undecodable"
    assert asked(images, content=with_text(1 << 26), headers=PNG) == "undecodable"


def encoded(image_format: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(stream, image_format)
    return stream.getvalue()


def test_only_the_formats_of_the_training_are_decoded(images: Server) -> None:
    for image_format in FORMATS:
        assert asked(images, content=encoded(image_format), headers=PNG) == "answered", image_format
    for image_format in ("GIF", "PPM", "TGA", "ICO", "SGI", "PCX", "DDS", "JPEG2000"):
        assert asked(images, content=encoded(image_format), headers=PNG) == "undecodable", (
            image_format
        )


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "x"])
def test_a_compressed_body_is_refused_before_it_is_read(
    images: Server, table: Server, encoding: str
) -> None:
    for server, body, headers in (
        (images, picture(), PNG),
        (table, json.dumps(ROW).encode(), JSON),
    ):
        assert (
            asked(server, content=body, headers=headers | {"content-encoding": encoding})
            == "unsupported_media_type"
        )
        assert (
            asked(server, content=body, headers=headers | {"content-encoding": "identity"})
            == "answered"
        )


def head_of(url_bytes: int = 6, num_headers: int = 2, num_bytes: int = 0) -> bytes:
    """A request for /livez with a URL of so many bytes, so many headers and at least so many bytes in all."""
    url = b"/livez" + (b"?" + b"u" * (url_bytes - 7) if url_bytes > 6 else b"")
    start = b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" % url
    start += b"".join(b"x%d: y\r\n" % number for number in range(num_headers - 2))
    padding = num_bytes - len(start) - len(b"pad: \r\n\r\n")
    return start + (b"pad: " + b"p" * padding + b"\r\n\r\n" if padding > 0 else b"\r\n")


def test_a_request_has_as_long_a_url_as_many_headers_and_bytes_of_them_as_the_limits(
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


def test_headers_have_as_long_as_the_limit_to_arrive(images: Server) -> None:
    head = head_of()
    with connect(images) as in_time, connect(images) as too_late:
        for connection in (in_time, too_late):
            connection.sendall(head[:20])
        time.sleep(TIMEOUT_S / 3)
        in_time.sendall(head[20:])
        assert rest_of(in_time).startswith(b"HTTP/1.1 200 ")
        assert error_in(rest_of(too_late))["code"] == "header_timeout"


def test_json_is_nested_as_deep_as_the_limit(table: Server) -> None:
    def nested(depth: int) -> bytes:
        return b'{"rows":[{"age":' + b"[" * (depth - 3) + b"]" * (depth - 3) + b"}]}"

    assert asked(table, content=nested(MAX_DEPTH), headers=JSON) == "type_violation"
    assert asked(table, content=nested(MAX_DEPTH + 1), headers=JSON) == "malformed_json"


def test_a_number_has_as_many_digits_as_the_limit(table: Server) -> None:
    def row(num_digits: int) -> bytes:
        return json.dumps(ROW).replace("28500.5", "0." + "1" * (num_digits - 2)).encode()

    assert asked(table, content=row(MAX_DIGITS), headers=JSON) == "answered"
    assert asked(table, content=row(MAX_DIGITS + 1), headers=JSON) == "malformed_json"


def test_a_request_has_as_many_rows_and_values_as_the_limit(table: Server) -> None:
    assert asked(table, json={"rows": [ROW] * MAX_ROWS}) == "answered"
    assert asked(table, json={"rows": [ROW] * (MAX_ROWS + 1)}) == "too_many_rows"
    most = (MAX_ROWS + 1) * (len(COLUMNS.columns) + 4) + 1024
    assert asked(table, json={f"x{number}": 1 for number in range(most - 2)}) == "unknown_column"
    assert asked(table, json={f"x{number}": 1 for number in range(most - 1)}) == "too_many_rows"


@pytest.mark.parametrize("unit", [b"[", b'"",', b"{}", b'{"a":', b"0,"])
def test_a_body_of_the_largest_size_that_holds_too_many_values_costs_little(
    table: Server, unit: bytes
) -> None:
    for _ in range(3):  # also once buffers of that size have been freed
        assert (
            asked(table, content=unit * (MAX_BODY_BYTES // len(unit)), headers=JSON)
            == "too_many_rows"
        )
    assert asked(table, json=ROW) == "answered"


def test_what_requests_cost_is_seen(images: Server) -> None:
    """The twin: three bodies that the service has to hold at once are more than one may cost."""
    head = (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\ncontent-length: %d\r\n\r\n"
        % MAX_BODY_BYTES
    )
    with memory_of(images) as cost, ExitStack() as open_connections:
        for _ in range(3):
            connection = open_connections.enter_context(connect(images))
            connection.sendall(head + b"x" * (MAX_BODY_BYTES - 1))
        time.sleep(0.5)
    assert cost[0] > MAX_COST
