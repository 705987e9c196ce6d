"""Generates hostile requests from a seed: the bytes to send, and the right prediction if known.

Each is framed as HTTP/1.1 requires, so that the service can find its end. Others are in
tests/serving/http/test_hostile_clients.py.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    ROW,
    picture,
    probabilities,
    row_probabilities,
    table_row,
)

Made = TypeVar("Made")
KINDS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "POST")
PATHS = (
    "/",
    "/predict",
    "/predict/",
    "/model",
    "/metrics",
    "/livez",
    "/healthz",
    "/readyz",
    "/docs.json",
    "/schema.json",
    "/explain",
    "/status",
)
MEDIA_TYPES = (
    "image/png", "image/jpeg", "IMAGE/PNG", "image/", "application/octet-stream",
    "application/json", "application/json; charset=utf-8", "application/json; charset=latin-1",
    "text/plain", "text/html; x", "application/x-www-form-urlencoded", "multipart/form-data",
    "multipart/form-data; boundary=", "multipart/form-data; boundary=b",
    'multipart/form-data; boundary="b', "multipart/mixed; boundary=b",
    "application/vnd.bentoml+pickle", "", ";", ";;;=", "a", "/", "image/png; charset=\xff",
    "x" * 300,
)  # fmt: skip
HEADERS = (
    ("x-request-id", "mine-1"), ("x-request-id", "../../etc"), ("x-request-id", "a" * 100),
    ("accept", "text/html"), ("accept", ""), ("accept-encoding", "gzip, br"),
    ("expect", "100-continue"), ("range", "bytes=0-1"), ("cookie", "a=b; c"),
    ("authorization", "Basic x"), ("if-none-match", "*"), ("x-forwarded-for", "1.2.3.4, evil"),
    ("x-forwarded-proto", "gopher"), ("te", "trailers"), ("forwarded", "for=\"[::1]\""),
    ("x", "\xff\xfe"), ("x", "a" * 4000), ("via", "1.0 x"),
)  # fmt: skip
REFUSED_HEADERS = (
    ("content-encoding", "gzip"), ("origin", "null"), ("origin", "http://elsewhere.example"),
    ("expect", "200-maybe"), ("expect", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request, and its expected probabilities if the request is valid."""

    kind: str
    request: bytes
    right: list[list[float]] | None = None


def image_case(seed: int) -> Case:
    """Generate a request for a service of images."""
    draw = random.Random(seed)
    make = draw.choice(
        [
            _right_image,
            _right_form,
            _changed_image,
            _changed_image,
            _changed_form,
            _changed_form,
            _other_body,
            _other_request,
        ]
    )
    return make(draw)


def table_case(seed: int) -> Case:
    """Generate a request for a service of table rows."""
    draw = random.Random(seed)
    make = draw.choice(
        [
            _right_row,
            _right_rows,
            _changed_json,
            _changed_json,
            _wrong_cells,
            _wrong_cells,
            _other_body,
            _other_request,
        ]
    )
    return make(draw)


def is_right(case: Case, content: dict[str, Any]) -> bool:
    """Return True if the response to a valid request has the expected probabilities."""
    assert case.right is not None
    answers = content.get("predictions", [content])
    found = [[answer["probabilities"][label] for label in LABELS] for answer in answers]
    return np.shape(found) == np.shape(case.right) and np.allclose(found, case.right, atol=1e-5)


def framed(
    draw: random.Random,
    media_type: str | None,
    body: bytes,
    method: str = "POST",
    path: str = "/predict",
    is_right: bool = False,
) -> bytes:
    """Build a request with that body, of declared length or in chunks, with unexpected headers.

    The headers are harmless if the request is valid (`is_right`).
    """
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    if media_type is not None:
        lines.append(f"content-type: {media_type}")
    headers = HEADERS if is_right else HEADERS + REFUSED_HEADERS
    lines += [
        f"{name}: {value}" for name, value in draw.sample(headers, draw.choice([0, 0, 0, 1, 3]))
    ]
    if draw.random() < 0.8:
        return (
            "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body
        )
    pieces, rest = [], body
    while rest:
        length = draw.randint(1, max(1, min(len(rest), 1 << draw.randint(0, 14))))
        pieces.append(b"%x\r\n%s\r\n" % (length, rest[:length]))
        rest = rest[length:]
    return (
        "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode("latin-1")
        + b"".join(pieces)
        + b"0\r\n\r\n"
    )


def _one_of(draw: random.Random, *makers: Callable[[], Made]) -> Made:
    """Return the result of a randomly drawn maker."""
    return draw.choice(makers)()


def _draw_picture(draw: random.Random) -> bytes:
    return picture(
        draw.randrange(1000), (draw.randint(1, 40), draw.randint(1, 40)), draw.choice(KINDS)
    )


def _expected(images: list[bytes]) -> list[list[float]]:
    answers: list[list[float]] = probabilities(
        np.stack([array_from_bytes(image, CONTRACT) for image in images])
    ).tolist()
    return answers


def _right_image(draw: random.Random) -> Case:
    image = _draw_picture(draw)
    media_type = draw.choice(["image/png", "image/jpeg", "application/octet-stream", "IMAGE/x"])
    return Case("right image", framed(draw, media_type, image, is_right=True), _expected([image]))


def _part(draw: random.Random, content: bytes) -> bytes:
    filename = draw.choice(["x.png", "", "ä.png", "../x", "a b"])
    disposition = f'Content-Disposition: form-data; name="image"; filename="{filename}"'
    return (
        disposition.encode()
        + draw.choice([b"", b"\r\nContent-Type: image/png", b"\r\nX-Other: 1"])
        + b"\r\n\r\n"
        + content
    )


def _form(draw: random.Random, parts: list[bytes]) -> tuple[str, bytes]:
    boundary = draw.choice(["b", "----WebKitFormBoundary7MA4YWxk", "0123456789", "a'()+_,-./:=?z"])
    body = (
        b"".join(b"--" + boundary.encode() + b"\r\n" + part + b"\r\n" for part in parts)
        + b"--"
        + boundary.encode()
        + b"--\r\n"
    )
    return f'multipart/form-data; boundary="{boundary}"', body


def _right_form(draw: random.Random) -> Case:
    images = [_draw_picture(draw) for _ in range(draw.choice([1, 1, 2, 5]))]
    media_type, body = _form(draw, [_part(draw, image) for image in images])
    return Case("right form", framed(draw, media_type, body, is_right=True), _expected(images))


def _changed(draw: random.Random, content: bytes) -> bytes:
    """Return the body truncated, padded, doubled, or with some bytes changed."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        if not changed:
            break
        at = draw.randrange(len(changed))
        match draw.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                changed[at] = draw.randrange(256)
            case 2:
                changed[at : at + draw.randint(1, 40)] = draw.randbytes(draw.randint(0, 40))
            case 3:
                changed[at:] = bytes(len(changed) - at)
            case 4:
                changed[at:at] = changed[at : at + draw.randint(1, 200)]
            case _:
                changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _changed_image(draw: random.Random) -> Case:
    content = _one_of(
        draw,
        lambda: _changed(draw, _draw_picture(draw)),
        lambda: draw.randbytes(draw.randint(0, 300)),
        lambda: b"",
    )
    if draw.random() < 0.5:
        return Case("changed image", framed(draw, "image/png", content))
    return Case("changed image in a form", framed(draw, *_form(draw, [_part(draw, content)])))


def _changed_form(draw: random.Random) -> Case:
    parts = [
        _one_of(
            draw,
            lambda: _part(draw, _draw_picture(draw)),
            lambda: b'Content-Disposition: form-data; name="image"\r\n\r\nhttp://127.0.0.1:1/x.png',
            lambda: (
                b'Content-Disposition: form-data; name="other"; filename="x"\r\n\r\n'
                + draw.randbytes(20)
            ),
            lambda: b"\r\n\r\n",
            lambda: draw.randbytes(30),
            lambda: b"Content-Disposition: attachment\r\n\r\nx",
            lambda: (
                b'content-disposition: form-data; name="image"; filename="x"; '
                b"filename*=UTF-8''%ff\r\n\r\nx"
            ),
        )
        for _ in range(draw.choice([0, 1, 1, 2, 3, 40]))
    ]
    media_type, body = _form(draw, parts)
    if draw.random() < 0.7:
        body = _changed(draw, body)
    return Case(
        "changed form",
        framed(
            draw, draw.choice([media_type, media_type, "multipart/form-data; boundary=b"]), body
        ),
    )


def _right_row(draw: random.Random) -> Case:
    row = table_row(draw.randrange(1000))
    body = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()
    media_type = draw.choice(["application/json", "application/json; charset=UTF-8"])
    return Case("right row", framed(draw, media_type, body, is_right=True), _expected_rows([row]))


def _right_rows(draw: random.Random) -> Case:
    rows = [table_row(draw.randrange(1000)) for _ in range(draw.choice([1, 2, 20]))]
    return Case(
        "right rows",
        framed(draw, "application/json", json.dumps({"rows": rows}).encode(), is_right=True),
        _expected_rows(rows),
    )


def _expected_rows(rows: list[dict[str, Any]]) -> list[list[float]]:
    answers: list[list[float]] = row_probabilities(
        encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    ).tolist()
    return answers


def _changed_json(draw: random.Random) -> Case:
    row = table_row(draw.randrange(1000))
    body = json.dumps(draw.choice([row, {"rows": [row, row]}])).encode()
    return Case("changed JSON", framed(draw, "application/json", _changed(draw, body)))


_NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 400,
    "1e-999",
    "1E400",
    "0.1" + "0" * 500,
    "-0",
    "1e38",
    "9" * 30,
    "01",
    "+1",
)
_VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: None,
    lambda draw: draw.choice([True, False]),
    lambda draw: draw.randint(-(10**40), 10**40),
    lambda draw: draw.uniform(-1e308, 1e308),
    lambda draw: "".join(
        chr(draw.choice([0, 10, 34, 92, 65, 0xE4, 0x1F600])) for _ in range(draw.randint(0, 8))
    ),
    lambda draw: [],
    lambda draw: {},
    lambda draw: [[1], {"a": [None]}],
    lambda draw: {"age": 1},
    lambda draw: draw.choice(
        ["red", "Zürich", "2021-03-04", "9999-99-99", "2021-03-04T25:00:00Z", "true", "41"]
    ),
]


def _wrong_cells(draw: random.Random) -> Case:
    """Generate a row with mistyped, unknown, missing, repeated or out-of-range values."""
    row = dict(ROW)
    for _ in range(draw.choice([1, 1, 3])):
        name = draw.choice([*ROW, "rows", "", "unknown", "__proto__", "a" * 200])
        if draw.random() < 0.2:
            row.pop(name, None)
        else:
            row[name] = draw.choice(_VALUES)(draw)
    text = json.dumps(row)
    match draw.randrange(6):
        case 0:
            text = text.replace("41", draw.choice(_NUMBERS), 1)
        case 1:
            text = text[:-1] + ', "age": 1}'
        case 2:
            depth = draw.choice([3, 10, 10_000])
            text = text[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"
        case 3:
            text = '{"rows": [' + ", ".join([text] * draw.choice([1, 2, 1100])) + "]}"
        case 4:
            text = draw.choice(
                ["[%s]", '"%s', "%s%s", "{%s}", '{"rows": %s}', '{"rows": [[%s]]}', '{"rows": []}']
            ).replace("%s", text)
        case _:
            pass
    body = text.encode(
        draw.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"]), "surrogatepass"
    )
    return Case("wrong cells", framed(draw, "application/json", body))


def _other_body(draw: random.Random) -> Case:
    """Generate a request with a body of any content type."""
    body = _one_of(
        draw,
        lambda: _draw_picture(draw),
        lambda: json.dumps(table_row(1)).encode(),
        lambda: b"http://127.0.0.1:1/x.png",
        lambda: b"\x80\x05N.",
        lambda: draw.randbytes(draw.randint(0, 2000)),
        lambda: bytes(draw.choice([70_000, 210_000])),
        lambda: b"",
    )
    return Case("other body", framed(draw, draw.choice([None, *MEDIA_TYPES]), body))


def _other_request(draw: random.Random) -> Case:
    """Generate a request with another method or path."""
    method, path = draw.choice(METHODS), draw.choice(PATHS)
    if draw.random() < 0.5:
        path = _one_of(
            draw,
            lambda: "/" + "".join(draw.choice("abc/.%~") for _ in range(draw.randint(0, 30))),
            lambda: "/../../etc/passwd",
            lambda: "/%2e%2e/%00/%ff",
            lambda: "//predict",
            lambda: "/predict?image=http://127.0.0.1:1/x.png&" + "a" * draw.choice([1, 3000]),
            lambda: "/" + "a" * 2000,
            lambda: "/static_content/x",
            lambda: f"/scan/{draw.randrange(10**9)}",
        )
    body = draw.choice([b"", b"", b"x", b'{"a": NaN}'])
    if method in ("GET", "HEAD") and draw.random() < 0.7:
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "", ""]
        return Case("other request", "\r\n".join(lines).encode("latin-1"))
    return Case(
        "other request", framed(draw, draw.choice([None, *MEDIA_TYPES]), body, method, path)
    )


def finite(content: Any) -> bool:
    """Return True if all numbers in a JSON value are finite."""
    if isinstance(content, dict):
        return all(map(finite, content.values()))
    if isinstance(content, list):
        return all(map(finite, content))
    return not isinstance(content, float) or math.isfinite(content)
