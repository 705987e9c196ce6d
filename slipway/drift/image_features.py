"""Drift features of images: brightness, contrast, sharpness, noise and similar, on a pixel grid."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature, Float
from slipway.inputs.images import ImageContract

_IMAGE_FEATURES = (
    "brightness",
    "contrast",
    "skewness",
    "sharpness",
    "noise",
    "black_fraction",
    "white_fraction",
    "centre",
    "top",
)
_COLOUR_FEATURES = ("red", "green", "blue", "saturation", "yellowness")
_LUMA = (np.float32(0.299), np.float32(0.587), np.float32(0.114))
_GRID = 48  # guess: sample positions per side; larger images are read with a stride
_BLOCK_BYTES = 1 << 22  # bytes of pixels processed at a time
_WHITE = 255


def image_features(contract: ImageContract) -> list[Feature]:
    """List the columns of `measure_images`."""
    names = [*_IMAGE_FEATURES, *(_COLOUR_FEATURES if contract.channels == 3 else ())]
    return [Feature(name=name, kind="number", origin="input", categories=[]) for name in names]


def measure_images(contract: ImageContract, inputs: NDArray[np.uint8]) -> Float:
    """Convert (rows, height, width, channels) pixels to (rows, features) float32."""
    block_rows = max(1, _BLOCK_BYTES // math.prod(contract.shape))
    blocks = [
        _image_features(np.asarray(inputs[start : start + block_rows]))
        for start in range(0, len(inputs), block_rows)
    ]
    return np.concatenate([np.empty((0, len(image_features(contract))), np.float32), *blocks])


def _image_features(pixels: NDArray[np.uint8]) -> Float:
    """Convert (rows, height, width, channels) uint8 to (rows, features).

    Most features are in grey levels from 0 to 255.

    skewness: third standardised moment. sharpness: log(1 + variance of the Laplacian) (Pech-Pacheco
    et al., ICPR 2000). noise: J. Immerkaer, Computer Vision and Image Understanding 64 (1996)
    300-302. black_fraction, white_fraction: fraction of pixels at 0 and 255. centre, top: mean of
    the middle quarter and of the upper half, less the overall mean. yellowness: mean of red and
    green, less blue (Hasler and Süsstrunk, SPIE 5007, 2003).
    """
    stride = max(1, pixels.shape[1] // _GRID)
    sampled = pixels[:, ::stride, ::stride]
    colours = np.moveaxis(sampled, 3, 0).astype(
        np.float32, order="C"
    )  # (channels, rows, grid, grid)
    grey = _grey(colours)  # (rows, grid, grid)
    brightness = _mean(grey)
    offsets = grey.reshape(len(grey), -1) - brightness[:, None]
    squares = offsets * offsets
    contrast = np.sqrt(squares.mean(axis=1))
    skewness = (squares * offsets).mean(axis=1) / np.maximum(contrast, 1e-3) ** 3
    quarter = grey.shape[1] // 4
    middle = grey[:, quarter : grey.shape[1] - quarter, quarter : grey.shape[2] - quarter]
    upper = grey[:, : (grey.shape[1] + 1) // 2]
    sharpness, noise = _sharpness_and_noise(pixels, grey, stride)
    features = [
        brightness,
        contrast,
        skewness,
        sharpness,
        noise,
        _mean(sampled == 0),
        _mean(sampled == _WHITE),
        _mean(middle) - brightness,
        _mean(upper) - brightness,
    ]
    if len(colours) == 3:
        red, green, blue = map(_mean, colours)
        saturation = _mean(colours.max(axis=0) - colours.min(axis=0))
        features += [red, green, blue, saturation, (red + green) / 2 - blue]
    return np.column_stack(features).astype(np.float32)


def _mean(values: NDArray[Any]) -> NDArray[Any]:
    """Return (rows,) the mean of each row of (rows, ...) values."""
    mean: NDArray[Any] = values.reshape(len(values), -1).mean(axis=1)
    return mean


def _grey(colours: Float) -> Float:
    """Convert (channels, ...) to grey (...): the only channel, or BT.601 luma as Pillow's "L"."""
    if len(colours) == 1:
        channel: Float = colours[0]
        return channel
    luma: Float = colours[0] * _LUMA[0] + colours[1] * _LUMA[1] + colours[2] * _LUMA[2]
    return luma


def _sharpness_and_noise(
    pixels: NDArray[np.uint8], grey: Float, stride: int
) -> tuple[Float, Float]:
    """Return (rows,) sharpness and (rows,) noise, from sampled pixels and their 8 neighbours.

    Both are 0 for images with fewer than 3 pixels on a side.
    """
    end = pixels.shape[1] - 1
    if end < 2:
        return np.zeros(len(pixels), np.float32), np.zeros(len(pixels), np.float32)

    def shifted(down: int, right: int) -> Float:
        rows = slice(1 + down, end + down, stride)
        columns = slice(1 + right, end + right, stride)
        if stride == 1:  # the whole image is in `grey` already
            return grey[:, rows, columns]
        return _grey(np.moveaxis(pixels[:, rows, columns], 3, 0).astype(np.float32, order="C"))

    middle = shifted(0, 0)
    straight = shifted(-1, 0) + shifted(1, 0) + shifted(0, -1) + shifted(0, 1)
    diagonal = shifted(-1, -1) + shifted(-1, 1) + shifted(1, -1) + shifted(1, 1)
    laplacian = straight - 4 * middle
    masked = diagonal - 2 * straight + 4 * middle
    noise = np.abs(masked).mean(axis=(1, 2)) * np.float32(math.sqrt(math.pi / 2) / 6)
    return np.log1p(laplacian.var(axis=(1, 2))), noise
