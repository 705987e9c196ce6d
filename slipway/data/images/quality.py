"""Measures the quality of an image, and makes its thumbnail, from a sample of its pixel rows.

The measures show if an image is blurred, dark, bright or constant. Decoding an image takes 0.3 ms,
and measuring must add only a few percent, so only strips of rows, spread over the height, are read.
A measure that would break a rule is repeated on every pixel, so no image is refused or flagged
because of the sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

THUMBNAIL_PX = 16
_ROWS_PER_CELL = 4  # thumbnail rows; with 2, crops of a twentieth are missed four times as often
_STRIPS = 8  # strips of three adjacent rows for the Laplacian; the middle one is a thumbnail's row
_SMALLEST_SAMPLED_PX = 8 * THUMBNAIL_PX  # every row of a smaller image is measured
_SMALLEST_BLURRED_PX = 3  # the Laplacian needs neighbours

Pixels = NDArray[np.uint8]  # (H, W) grey or (H, W, 4) RGBA, [0, 255]

cv2.setNumThreads(1)  # images are already spread over processes


@dataclass(frozen=True)
class Quality:
    """Measures of one image in grey levels, 0 to 255.

    `laplacian` is None if a side is shorter than 3 pixels.
    """

    mean: float
    std: float
    laplacian: float | None


def grey(pixels: Pixels) -> Pixels:
    """Convert pixels (H, W) or (H, W, 4) to grey (H, W); alpha is ignored."""
    if pixels.ndim == 2:
        return np.ascontiguousarray(pixels)
    return np.asarray(cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGBA2GRAY), np.uint8)


def measure(pixels: Pixels) -> tuple[Quality, Pixels]:
    """Measure an image on sampled rows; return the measures and the grey thumbnail (16, 16)."""
    height = pixels.shape[0]
    if height < _SMALLEST_SAMPLED_PX:
        whole = grey(pixels)
        return quality(whole), _thumbnail(whole)
    rows, thumbnail_rows = _sampled_rows(height)
    sampled = grey(pixels[rows])
    strips = sampled[: 3 * _STRIPS]
    return _quality(strips, lambda laplacian: laplacian[1::3]), _thumbnail(sampled[thumbnail_rows])


def quality(whole: Pixels) -> Quality:
    """Measure an image (H, W) in grey on all of its pixels."""
    return _quality(whole, lambda laplacian: laplacian)


def _quality(
    pixels: Pixels, valid_rows: Callable[[NDArray[np.int16]], NDArray[np.int16]]
) -> Quality:
    mean, std = (float(value[0, 0]) for value in cv2.meanStdDev(pixels))
    if min(pixels.shape) < _SMALLEST_BLURRED_PX:
        return Quality(mean, std, None)
    laplacian = valid_rows(np.asarray(cv2.Laplacian(pixels, cv2.CV_16S), np.int16))
    # Apart from the border the Laplacian sums to 0, so its mean square is its variance.
    variance = float(cv2.norm(laplacian, cv2.NORM_L2SQR)) / laplacian.size
    return Quality(mean, std, variance)


@lru_cache(maxsize=256)
def _sampled_rows(height: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows to read, strips first, and the thumbnail's rows as positions among them."""
    num_rows = THUMBNAIL_PX * _ROWS_PER_CELL
    spread = ((np.arange(num_rows) + 0.5) * height / num_rows).astype(np.intp)
    in_strips = np.arange(num_rows // _STRIPS // 2, num_rows, num_rows // _STRIPS)
    strips = (spread[in_strips][:, None] + np.arange(-1, 2)).ravel()
    others = np.delete(np.arange(num_rows), in_strips)
    places = np.empty(num_rows, np.intp)
    places[in_strips] = np.arange(1, 3 * _STRIPS, 3)
    places[others] = 3 * _STRIPS + np.arange(len(others))
    return np.concatenate([strips, spread[others]]), places


def _thumbnail(pixels: Pixels) -> Pixels:
    size = (THUMBNAIL_PX, THUMBNAIL_PX)
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)
