"""What is sent while the service is measured: the caller's own files, or else what the bundle knows of its input.

Golden rows are images as the network takes them. As PNG of that size they are quick to decode: callers who send photographs of
a camera should give some, since decoding then counts for more than the model.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.api_docs.description import example_row
from serving.load_test.load import http_request
from slipway.artifacts.bundle import LoadedBundle
from slipway.inputs.columns import ColumnContract
from slipway.system.errors import DataError

_MAX_SAMPLES = 64
_MAX_BYTES = 64 << 20  # of all of them together
_JSON, _BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Samples:
    """Whole requests, sent again and again in their order."""

    requests: list[bytes]
    what: str  # for the card

    def __call__(self, number: int) -> bytes:
        """The request of that number."""
        return self.requests[number % len(self.requests)]


def samples_of(bundle: LoadedBundle, given: Path | None = None) -> Samples:
    """The files in `given` (a file or a folder), or what is in the bundle. DataError if there are none that can be sent."""
    is_table = isinstance(bundle.manifest.input, ColumnContract)
    if given is not None:
        bodies, what = _read(given), f"files of {given}"
    elif isinstance(bundle.manifest.input, ColumnContract):
        bodies, what = (
            [json.dumps(example_row(bundle.manifest.input)).encode()],
            "the example row of the bundle's columns",
        )
    else:
        bodies, what = _pictures(bundle)
    content_type = _JSON if is_table else _BYTES
    return Samples(
        [http_request(body=body, content_type=content_type) for body in bodies],
        f"{len(bodies)}: {what}",
    )


def _read(given: Path) -> list[bytes]:
    paths = (
        sorted(path for path in given.iterdir() if path.is_file())[:_MAX_SAMPLES]
        if given.is_dir()
        else [given]
    )
    try:
        num_bytes = sum(path.stat().st_size for path in paths)
        if not 0 < num_bytes <= _MAX_BYTES:
            raise DataError(
                f"{given} has {num_bytes} bytes to send, expected 1 to {_MAX_BYTES}. Give a file or a folder of request bodies."
            )
        return [path.read_bytes() for path in paths]
    except OSError as error:
        raise DataError(
            f"{given} cannot be read: {error.strerror}. Give a file or a folder of request bodies with --samples."
        ) from None


def _pictures(bundle: LoadedBundle) -> tuple[list[bytes], str]:
    rows = bundle.golden_rows()
    pixels = bundle.manifest.input.example_rows(1) if rows is None else rows.inputs[:_MAX_SAMPLES]
    what = (
        "an image that the network takes, as PNG"
        if rows is None
        else "the bundle's golden rows, as PNG"
    )
    return [_png(row) for row in pixels], what


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """A file of one (height, width, channels) image."""
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return stream.getvalue()
