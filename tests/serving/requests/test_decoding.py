import asyncio
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from slipway.inputs.images import array_from_bytes
from slipway.serving.http.responses import Refusal
from slipway.serving.requests import decoding
from slipway.serving.requests.bodies import FormReader
from slipway.serving.requests.decoding import INLINE_BYTES, INLINE_PIXELS, ImageDecoder
from tests.serving.bundles import CONTRACT, picture


def decoding_threads(monkeypatch: pytest.MonkeyPatch, payload: bytes) -> set[str]:
    """Return the names of the threads that decoded the payload."""
    seen: set[str] = set()

    def noting(content: bytes, contract: object) -> object:
        seen.add(threading.current_thread().name.split("_")[0])
        return array_from_bytes(content, CONTRACT)

    monkeypatch.setattr(decoding, "array_from_bytes", noting)
    decoder = ImageDecoder(CONTRACT)
    assert np.array_equal(
        asyncio.run(decoder.decode(payload)).inputs[0], array_from_bytes(payload, CONTRACT)
    )
    decoder.close()
    return seen


def test_a_small_image_is_decoded_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoding_threads(monkeypatch, picture(1, (28, 28))) == {"MainThread"}


def test_image_of_many_bytes_is_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = picture(1, (90, 90), "BMP") + b"\0" * INLINE_BYTES
    assert decoding_threads(monkeypatch, payload) == {"slipway-decode"}


def test_image_of_many_pixels_in_few_bytes_is_decoded_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (INLINE_PIXELS, 2)).save(stream, "WEBP", lossless=True)
    assert len(stream.getvalue()) < INLINE_BYTES
    assert decoding_threads(monkeypatch, stream.getvalue()) == {"slipway-decode"}


def test_pngs_up_to_the_pixel_limit_are_decoded_inline() -> None:
    """The size is read from the header, without Pillow."""
    at_the_limit, above = (
        picture(1, (INLINE_PIXELS // 96, 96)),
        picture(1, (INLINE_PIXELS // 96 + 1, 96)),
    )
    assert [decoding._is_small(image[:33]) for image in (at_the_limit, above)] == [True, False]


def test_several_images_are_decoded_in_order() -> None:
    payloads = [picture(seed, (20, 12)) for seed in range(9)]
    decoder = ImageDecoder(CONTRACT)
    decoded = asyncio.run(decoder.decode(*payloads))
    decoder.close()
    assert decoded.is_list
    assert np.array_equal(
        decoded.inputs, np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
    )


def test_error_names_the_first_bad_image_in_order() -> None:
    decoder = ImageDecoder(CONTRACT)
    refusal = refusal_or(
        lambda: asyncio.run(decoder.decode(picture(), b"", b"no image", picture()))
    )
    decoder.close()
    assert (refusal.code, refusal.field) == ("empty", "image[1]")
    assert refusal.message.startswith("image[1]: ")


HEADS = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP", b"BM", b"II*\0"]
PIECES = [b"--b", b"--b--", b"\r\n", b'Content-Disposition: form-data; name="image"; filename="x"']


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(HEADS), st.binary(max_size=300))
def test_any_bytes_decode_to_an_image_or_a_refusal(head: bytes, tail: bytes) -> None:
    decoder = ImageDecoder(CONTRACT)
    answer = refusal_or(lambda: asyncio.run(decoder.decode(head + tail)))
    assert (
        answer.field == "image"
        if isinstance(answer, Refusal)
        else answer.inputs.shape == (1, *CONTRACT.shape)
    )
    decoder.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(PIECES)), max_size=14))
def test_any_form_parses_to_files_or_a_refusal(pieces: list[bytes]) -> None:
    answer = refusal_or(lambda: read_form([b"".join(pieces)]))
    assert (
        answer.status in (400, 413, 422) if isinstance(answer, Refusal) else 1 <= len(answer) <= 2
    )
    in_pieces = refusal_or(lambda: read_form(pieces))
    if isinstance(answer, Refusal):
        assert isinstance(in_pieces, Refusal), "where the network cuts a form decides nothing"
    else:
        assert in_pieces == answer


def read_form(pieces: list[bytes]) -> tuple[bytes, ...]:
    form = FormReader(b"b", 2)
    for piece in pieces:
        form.write(piece)
    return form.images()


def refusal_or(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Refusal as refusal:
        return refusal
