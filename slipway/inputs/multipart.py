"""Several encoded images as one body that `/predict` takes: a multipart form with a file `image` for each (RFC 7578).

What callers send is read by the service's own strict reader. This is for what Slipway itself writes, such as kept requests: the
boundary is made from the images, occurs in none of them, and the same images give the same bytes.
"""

import hashlib
from collections.abc import Sequence

FIELD = "image"
FORM = "multipart/form-data; boundary="
ONE_IMAGE = "application/octet-stream"  # of a body that is one image


def encode_images(images: Sequence[bytes]) -> tuple[str, bytes]:
    """The content type and body of a request about `images`: one is the body itself."""
    if len(images) == 1:
        return ONE_IMAGE, images[0]
    boundary = _boundary(images)
    parts = [_head(boundary, number) + image + b"\r\n" for number, image in enumerate(images)]
    return FORM + boundary, b"".join([*parts, f"--{boundary}--\r\n".encode()])


def decode_images(content_type: str, body: bytes) -> list[bytes]:
    """The images of what `encode_images` made; ValueError where it made no such body."""
    if not content_type.startswith(FORM):
        return [body]
    boundary = content_type.removeprefix(FORM)
    parts = (b"\r\n" + body).split(f"\r\n--{boundary}".encode())[1:-1]
    images = [part.partition(b"\r\n\r\n")[2] for part in parts]
    if encode_images(images) != (content_type, body):
        raise ValueError("the form is not one that Slipway writes")
    return images


def _head(boundary: str, number: int) -> bytes:
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{FIELD}"; filename="{number}"\r\n\r\n'.encode()


def _boundary(images: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    while True:
        for image in images:
            digest.update(image)
        boundary = f"slipway-{digest.hexdigest()[:32]}"
        if not any(boundary.encode() in image for image in images):
            return boundary
