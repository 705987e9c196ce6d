import asyncio
import gzip
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest

from slipway.serving.http.responses import ClientDisconnectedError, Refusal
from slipway.serving.http.routes import Request
from slipway.serving.requests.payload import Payload, receive_payload

BOUNDARY = b"limit"
FORM = b"multipart/form-data; boundary=" + BOUNDARY
MAX_ITEMS = 8


def free() -> None:
    """Admit every request, as an idle service does."""


def part(name: str = "image", content: bytes = b"pixels", filename: str | None = "x.png") -> bytes:
    disposition = f'form-data; name="{name}"' + (
        f'; filename="{filename}"' if filename is not None else ""
    )
    return (
        b"--"
        + BOUNDARY
        + b"\r\nContent-Disposition: "
        + disposition.encode()
        + b"\r\n\r\n"
        + content
        + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def request(headers: dict[bytes, bytes], receive: Any) -> Request:
    return Request("abc.1", "POST", "/predict", b"", headers, receive, 0.0)


def read(
    body: bytes | Iterable[bytes],
    content_type: bytes = FORM,
    *,
    declared: bool = True,
    max_bytes: int = 1000,
    encoding: bytes = b"",
) -> tuple[bytes, ...]:
    chunks = [body] if isinstance(body, bytes) else list(body)
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages[-1]["more_body"] = False
    length = (
        {b"content-length": str(sum(map(len, chunks))).encode()}
        if declared
        else {b"transfer-encoding": b"chunked"}
    )

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def work() -> tuple[bytes, ...]:
        headers = {b"content-type": content_type, b"content-encoding": encoding} | length
        asked = request(headers, receive)
        parse = await receive_payload(asked, max_bytes, MAX_ITEMS, "images", free)
        return parse().items

    return asyncio.run(work())


def refused(*arguments: Any, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        read(*arguments, **options)
    return refusal.value


@pytest.mark.parametrize(
    "content_type",
    [b"image/png", b"image/jpeg; charset=binary", b"application/octet-stream", b"IMAGE/PNG"],
)
def test_request_body_without_a_form_is_read_as_one_image(content_type: bytes) -> None:
    assert read(b"pixels", content_type) == (b"pixels",)


def test_form_with_one_file_called_image_is_read_as_the_image() -> None:
    assert read(form(part(content=b"pix\r\n--els"))) == (b"pix\r\n--els",)


def test_form_with_several_files_is_read_as_several_images_in_order() -> None:
    images = [f"image {number}".encode() for number in range(MAX_ITEMS + 1)]
    parts = [part(content=image) for image in images]
    assert read(form(*parts[:MAX_ITEMS]), max_bytes=10_000) == tuple(images[:MAX_ITEMS])
    refusal = refused(form(*parts), max_bytes=10_000)
    assert (refusal.code, refusal.field) == ("too_many_items", "image")
    assert "SLIPWAY_MAX_ITEMS" in refusal.message


def test_the_chunks_of_a_body_are_joined() -> None:
    assert read([b"pi", b"xe", b"ls"], b"image/png", declared=False) == (b"pixels",)


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"text/plain",
        b"application/json",
        b"application/x-www-form-urlencoded",
        b"imagex/png",
        b"\xff",
    ],
)
def test_request_for_images_with_another_content_type_is_refused(content_type: bytes) -> None:
    assert refused(b"pixels", content_type).code == "unsupported_media_type"


def test_a_body_at_the_limit_is_read_and_one_byte_above_is_refused() -> None:
    assert read(b"x" * 100, b"image/png", max_bytes=100) == (b"x" * 100,)
    assert refused(b"x" * 101, b"image/png", max_bytes=100).code == "body_too_large"


def test_chunked_body_beyond_the_limit_is_refused_and_not_read_further() -> None:
    def chunks() -> list[bytes]:
        return [b"x" * 60, b"x" * 60]

    assert refused(chunks(), b"image/png", declared=False, max_bytes=100).code == "body_too_large"
    assert read(chunks(), b"image/png", declared=False, max_bytes=120) == (b"x" * 120,)


@pytest.mark.parametrize(
    ("encoding", "compress"), [(b"GZIP", gzip.compress), (b" deflate ", zlib.compress)]
)
def test_compressed_bodies_are_read_up_to_the_limit_of_decompressed_bytes(
    encoding: bytes, compress: Callable[[bytes], bytes]
) -> None:
    large = bytes(range(256)) * 4000  # several pieces once it is decompressed
    for declared in (True, False):
        packed = compress(large)
        for body in (packed, [packed[at : at + 1000] for at in range(0, len(packed), 1000)]):
            limit: Any = {"max_bytes": len(large), "encoding": encoding, "declared": declared}
            assert read(body, b"image/png", **limit) == (large,)
            limit["max_bytes"] -= 1
            assert refused(body, b"image/png", **limit).code == "body_too_large"
        images = (part(content=large), part(content=b"small"))
        asked: Any = {"max_bytes": 2 * len(large), "encoding": encoding, "declared": declared}
        assert read(compress(form(*images)), **asked) == (large, b"small")


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (b"pixels", b"gzip", "malformed_body"),
        (gzip.compress(b"pixels", mtime=0)[:-1], b"gzip", "malformed_body"),
        ([gzip.compress(b"pixels", mtime=0), b"more"], b"gzip", "malformed_body"),
        (b"", b"deflate", "malformed_body"),
        (b"pixels", b"br", "unsupported_media_type"),
        (b"pixels", b"gzip, gzip", "unsupported_media_type"),
    ],
)
@pytest.mark.parametrize("content_type", [b"image/png", FORM])
def test_damaged_and_unknown_compression_is_refused(
    body: bytes | list[bytes], encoding: bytes, code: str, content_type: bytes
) -> None:
    refusal = refused(body, content_type, encoding=encoding)
    assert (refusal.code, refusal.field) == (code, "content-encoding")
    if code == "unsupported_media_type":
        assert refusal.headers == (("accept-encoding", "gzip, deflate"),)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "length_required"),
        ({b"content-length": b"11"}, "body_too_large"),
        ({b"content-length": b"9" * 5000}, "body_too_large"),
        ({b"content-length": b"-1"}, "malformed_body"),
        ({b"content-length": b"ten"}, "malformed_body"),
    ],
)
def test_a_missing_or_invalid_content_length_is_refused_before_reading_the_body(
    headers: dict[bytes, bytes], code: str
) -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("the body was read")

    with pytest.raises(Refusal) as refusal:
        asyncio.run(
            receive_payload(
                request({b"content-type": b"image/png"} | headers, never),
                10,
                MAX_ITEMS,
                "images",
                free,
            )
        )
    assert (refusal.value.code, refusal.value.field) == (
        code,
        "content-length" if code != "body_too_large" else None,
    )


def test_a_disconnect_while_reading_raises_client_disconnected() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnectedError):
        asyncio.run(
            receive_payload(
                request({b"content-type": b"image/png", b"content-length": b"10"}, gone),
                10,
                MAX_ITEMS,
                "images",
                free,
            )
        )


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (form(), "missing_field", "image"),
        (form(part(name="picture")), "unknown_field", "picture"),
        (form(part(), part(name="note", filename=None)), "unknown_field", "note"),
        (form(part(filename=None)), "not_a_file", "image"),
        (form(part(content=b"http://169.254.169.254/x.png", filename=None)), "not_a_file", "image"),
        (form(part(), part(filename=None)), "not_a_file", "image[1]"),
        (form(*[part(name="note")] * (MAX_ITEMS + 1)), "too_many_items", "image"),
        (part(), "malformed_body", None),
        (b"no form at all", "malformed_body", None),
        (b"--other\r\n\r\nx\r\n--other--", "malformed_body", None),
        (b"--limit\r\nbad header\r\n\r\nx\r\n--limit--\r\n", "malformed_body", None),
        (b"--limit\r\n\r\nx\r\n--limit--\r\n", "unknown_field", ""),
        (b"--limit\r\nContent-Disposition: " + b"x" * 100_000, "malformed_body", None),
    ],
)
def test_a_form_with_other_fields_is_refused_with_the_name_of_the_field(
    body: bytes, code: str, field: str | None
) -> None:
    refusal = refused(body, max_bytes=1_000_000)
    assert (refusal.code, refusal.field) == (code, field)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "preamble",
    [
        b"",
        b"\r\n",
        b"for readers without MIME: --limit\r\n",
        b"--other\r\n\r\nx\r\n",
        b"x" * 5000 + b"\r\n",
    ],
)
def test_form_reader_ignores_text_before_and_after_the_parts(preamble: bytes, size: int) -> None:
    body = preamble + form(part(content=b"\r\n--lim"), part()) + b"the end --limit\r\n"
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    assert read(chunks, max_bytes=10_000) == (b"\r\n--lim", b"pixels")


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"x" * 500,
    ],
)
def test_a_form_without_a_usable_boundary_is_refused(content_type: bytes) -> None:
    assert refused(form(part()), content_type).code == "malformed_body"


def read_as(kind: Literal["images", "columns"], content_type: bytes) -> Payload:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    return asyncio.run(
        receive_payload(
            request({b"content-type": content_type, b"content-length": b"2"}, receive),
            10,
            MAX_ITEMS,
            kind,
            free,
        )
    )()


@pytest.mark.parametrize(
    "content_type", [b"application/json", b"APPLICATION/JSON", b"application/json; charset=UTF-8"]
)
def test_json_is_read_for_a_table_and_refused_for_images(content_type: bytes) -> None:
    assert read_as("columns", content_type) == Payload("columns", (b"{}",))
    with pytest.raises(Refusal, match="takes images, not JSON"):
        read_as("images", content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        b"image/png",
        b"multipart/form-data",
        b"application/octet-stream",
        b"text/plain",
        b"",
        b"\xff",
    ],
)
def test_request_for_table_rows_with_another_content_type_is_refused(content_type: bytes) -> None:
    with pytest.raises(Refusal, match="application/json") as refusal:
        read_as("columns", content_type)
    assert refusal.value.code == "unsupported_media_type"
