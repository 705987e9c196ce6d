import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.inputs.multipart import decode_images, encode_images
from slipway.serving.requests.bodies import FormReader

IMAGES = st.lists(
    st.binary(max_size=60) | st.sampled_from([b"\r\n", b"\r\n--slipway-", b"--", b"\r\n\r\n"]),
    min_size=1,
    max_size=6,
)


@given(IMAGES)
def test_forms_are_decoded_equally_by_the_request_log_and_the_service(
    images: list[bytes],
) -> None:
    content_type, body = encode_images(images)
    assert decode_images(content_type, body) == images
    if len(images) > 1:
        boundary = content_type.partition("boundary=")[2].encode()
        form = FormReader(boundary, len(images))
        form.write(body)
        assert form.images() == tuple(images)


def test_single_image_is_the_request_body_itself() -> None:
    assert encode_images([b"pixels"]) == ("application/octet-stream", b"pixels")


def test_boundary_avoids_bytes_that_occur_in_an_image() -> None:
    image = b"pixels"
    first = f"slipway-{hashlib.sha256(image * 2).hexdigest()[:32]}".encode()
    assert first in encode_images([image, image])[1]
    spoilt = [image, image[:3], first]
    digest = hashlib.sha256(b"".join(spoilt)).hexdigest()[:32].encode()
    assert f"slipway-{digest.decode()}" in encode_images(spoilt)[0]
    assert decode_images(*encode_images(spoilt)) == spoilt


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body[:-4],
        lambda body: b"x" + body,
        lambda body: body.replace(b'"image"', b'"other"'),
    ],
)
def test_decode_images_refuses_forms_that_encode_images_did_not_write(
    spoil: Callable[[bytes], bytes],
) -> None:
    content_type, body = encode_images([b"one", b"two"])
    with pytest.raises(ValueError, match="is not as Slipway writes it"):
        decode_images(content_type, spoil(body))
