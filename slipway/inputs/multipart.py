"""Multipart forms with several images (RFC 7578), as Slipway itself writes them in the request log.

Forms of callers are read by the service's strict parser instead. The boundary is derived from the
images, occurs in none of them, and equal images give equal bytes.
"""

import hashlib
from collections.abc import Sequence

FIELD = "image"
FORM = "multipart/form-data; boundary="
ONE_IMAGE = "application/octet-stream"


def encode_images(images: Sequence[bytes]) -> tuple[str, bytes]:
    """Return the content type and body of a request; a single image is the body itself."""
    if len(images) == 1:
        return ONE_IMAGE, images[0]
    boundary = _boundary(images)
    parts = []
    for number, image in enumerate(images):
        disposition = f'form-data; name="{FIELD}"; filename="{number}"'
        head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n"
        parts.append(head.encode() + image + b"\r\n")
    return FORM + boundary, b"".join([*parts, f"--{boundary}--\r\n".encode()])


def decode_images(content_type: str, body: bytes) -> list[bytes]:
    """Return the images of a body made by `encode_images`. Raises ValueError for any other body."""
    if not content_type.startswith(FORM):
        return [body]
    boundary = content_type.removeprefix(FORM)
    parts = (b"\r\n" + body).split(f"\r\n--{boundary}".encode())[1:-1]
    images = [part.partition(b"\r\n\r\n")[2] for part in parts]
    if encode_images(images) != (content_type, body):
        raise ValueError("its multipart body is not as Slipway writes it to the request log")
    return images


def _boundary(images: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    while True:
        for image in images:
            digest.update(image)
        boundary = f"slipway-{digest.hexdigest()[:32]}"
        if not any(boundary.encode() in image for image in images):
            return boundary
