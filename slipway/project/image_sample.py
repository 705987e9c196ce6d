"""Samples images, to find their sizes and whether they have colour."""

import time
from collections.abc import Iterable

import numpy as np

from slipway.inputs.images import MAX_PIXELS, decode_with_pillow
from slipway.project.summary import ImageSample
from slipway.system.errors import DataError, ImageError

MOST_IMAGES = 200
_MOST_BYTES = 1 << 28
_MOST_SECONDS = 10.0
_ASPECT_TOLERANCE = 0.05
_USUAL_FRACTION = 0.9
_GREY_LEVELS = 6  # levels by which the channels of a grey JPEG may differ
_DARK = 1 << 14  # of the 65,536 values of a 16-bit image
_MAX_NAMED = 3


def sample_images(images: Iterable[tuple[str, bytes]]) -> ImageSample:
    """Decode (name, bytes) of images until enough are read; DataError if most cannot be read."""
    begin, num_bytes, num_read = time.monotonic(), 0, 0
    sizes: list[tuple[int, int]] = []
    num_coloured = num_dark = 0
    unreadable: dict[str, str] = {}
    for name, payload in images:
        num_read, num_bytes = num_read + 1, num_bytes + len(payload)
        try:
            image = decode_with_pillow(payload, MAX_PIXELS).image
        except ImageError as error:
            unreadable[name] = error.detail
        else:
            sizes.append(image.size)
            num_coloured += _has_colour(np.asarray(image.convert("RGB").reduce(2)))
            num_dark += image.mode.startswith("I") and int(np.asarray(image).max()) < _DARK
        is_late = time.monotonic() - begin > _MOST_SECONDS
        if num_read == MOST_IMAGES or num_bytes > _MOST_BYTES or is_late:
            break
    if 2 * len(sizes) <= num_read:  # embedded images may all have one name
        shown = "".join(
            f"  {name}: {reason}\n" for name, reason in list(unreadable.items())[:_MAX_NAMED]
        )
        num_bad = num_read - len(sizes)
        raise DataError(
            f"{num_bad} of {num_read} sampled files cannot be read as images:\n{shown}"
            "Expected photographs or drawings as JPEG, PNG, WebP, TIFF, BMP, GIF, HEIC or AVIF."
        )
    widths, heights = np.array(sizes).T
    aspects = widths / heights
    usual = np.median(aspects)
    is_usual = np.abs(aspects / usual - 1) <= _ASPECT_TOLERANCE
    return ImageSample(
        num_read=num_read,
        sides=(int(np.median(widths)), int(np.median(heights))),
        same_aspect=bool(is_usual.mean() >= _USUAL_FRACTION),
        has_colour=2 * num_coloured > len(sizes) * 0.1,
        dark_range=2 * num_dark > len(sizes),
        unreadable=dict(list(unreadable.items())[:_MAX_NAMED]),
    )


def _has_colour(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> bool:
    """Return True if more than a hundredth of the (H, W, 3) pixels are clearly not grey."""
    spread = pixels.max(axis=2).astype(int) - pixels.min(axis=2)
    return bool((spread > _GREY_LEVELS).mean() > 0.01)
