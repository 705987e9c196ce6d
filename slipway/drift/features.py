"""Drift features: a few numbers and categories per row, from a model's input and its answer.

Images: brightness, contrast, sharpness, noise and similar, on a grid of pixels. Table rows: their
columns. Answers: the class or value, its certainty, and the OOD score, which summarises how far the
network's penultimate activations are from those of training rows. Vectorised numpy only.
"""

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.input_contract import InputContract
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.system.contract import Contract

Float = NDArray[np.float32]

PREDICTED_CLASS = "predicted_class"
CONFIDENCE = "confidence"
OUTLIER_SCORE = "outlier_score"
_IMAGE_FEATURES = (
    "brightness",
    "contrast",
    "skewness",
    "sharpness",
    "noise",
    "black_share",
    "white_share",
    "centre",
    "top",
)
_COLOUR_FEATURES = ("red", "green", "blue", "saturation", "yellowness")
_LUMA = (np.float32(0.299), np.float32(0.587), np.float32(0.114))
_GRID = 48  # guess: sample positions per side; larger images are read with a stride
_BLOCK_BYTES = 1 << 22  # of pixels processed at a time
_WHITE = 255


class Feature(Contract):
    """One number or category per row. A category is an index into `categories`; NaN is missing."""

    name: str
    kind: Literal["number", "category"]
    origin: Literal["input", "output"]
    categories: list[str]  # empty for a number


def extract(contract: InputContract, inputs: NDArray[Any], outputs: Float, scores: Float) -> Float:
    """(rows, features) float32: input features, then output features.

    Args:
        inputs: (rows, ...) as the network takes them.
        outputs: (rows, labels) probabilities or (rows, 1) values.
        scores: (rows,) OOD scores.
    """
    return np.concatenate(
        [extract_inputs(contract, inputs), extract_outputs(outputs, scores)], axis=1
    )


def input_features(contract: InputContract) -> list[Feature]:
    """List the columns of `extract_inputs`."""
    if isinstance(contract, ImageContract):
        names = [*_IMAGE_FEATURES, *(_COLOUR_FEATURES if contract.channels == 3 else ())]
        return [Feature(name=name, kind="number", origin="input", categories=[]) for name in names]
    features = []
    for column in [*contract.numeric, *contract.categorical]:
        categories = []
        if column.kind == "boolean":
            categories = ["false", "true"]
        elif column.kind == "category":
            categories = ["missing or unknown", *column.categories]
        kind: Literal["number", "category"] = "category" if categories else "number"
        features.append(
            Feature(name=f"column {column.name}", kind=kind, origin="input", categories=categories)
        )
    return features


def extract_inputs(contract: InputContract, inputs: NDArray[Any]) -> Float:
    """(rows, features) float32 of the inputs; needs no model."""
    if isinstance(contract, ColumnContract):
        return _table_features(contract, inputs)
    block_rows = max(1, _BLOCK_BYTES // math.prod(contract.shape))
    blocks = [
        _image_features(np.asarray(inputs[start : start + block_rows]))
        for start in range(0, len(inputs), block_rows)
    ]
    return np.concatenate([np.empty((0, len(input_features(contract))), np.float32), *blocks])


def output_features(output: OutputContract) -> list[Feature]:
    """List the columns of `extract_outputs`."""
    if output.kind == "value":
        return [_output_number("value"), _output_number(OUTLIER_SCORE)]
    numbers = (CONFIDENCE, "entropy", "margin", OUTLIER_SCORE)
    label = Feature(
        name=PREDICTED_CLASS, kind="category", origin="output", categories=output.labels
    )
    return [label, *map(_output_number, numbers)]


def _output_number(name: str) -> Feature:
    return Feature(name=name, kind="number", origin="output", categories=[])


def extract_outputs(outputs: Float, scores: Float) -> Float:
    """(rows, features) float32 of the answers.

    Entropy is in nats; the margin is the largest probability less the second largest.
    """
    if outputs.shape[1] == 1:
        return np.column_stack([outputs[:, 0], scores]).astype(np.float32)
    probabilities = np.clip(outputs, np.finfo(np.float32).tiny, 1)
    entropy = -(probabilities * np.log(probabilities)).sum(axis=1)
    second, first = np.partition(outputs, -2, axis=1)[:, -2:].T
    columns = [outputs.argmax(axis=1), first, entropy, first - second, scores]
    return np.column_stack(columns).astype(np.float32)


def _table_features(contract: ColumnContract, encoded: Float) -> Float:
    """Standardised numbers (NaN where missing), booleans as 0 and 1, and category codes."""
    num_numeric, num_indicated = len(contract.numeric), len(contract.indicated)
    features = np.array(encoded[:, :num_numeric], np.float32)
    indicator = num_numeric
    for position, column in enumerate(contract.numeric):
        if column.kind == "boolean":
            features[:, position] = np.rint(features[:, position] * column.std + column.mean)
        if column.has_missing:
            features[encoded[:, indicator] > 0, position] = np.nan
            indicator += 1
    return np.concatenate([features, encoded[:, num_numeric + num_indicated :]], axis=1)


def _image_features(pixels: NDArray[np.uint8]) -> Float:
    """(rows, height, width, channels) uint8 -> (rows, features), mostly in grey levels 0 to 255.

    skewness: third standardised moment. sharpness: log(1 + variance of the Laplacian) (Pech-Pacheco
    et al., ICPR 2000). noise: J. Immerkaer, Computer Vision and Image Understanding 64 (1996)
    300-302. black_share, white_share: fraction of pixels at 0 and 255. centre, top: mean of the
    middle quarter and of the upper half, less the overall mean. yellowness: mean of red and green,
    less blue (Hasler and Süsstrunk, SPIE 5007, 2003).
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
    """(rows, ...) -> (rows,)"""
    mean: NDArray[Any] = values.reshape(len(values), -1).mean(axis=1)
    return mean


def _grey(colours: Float) -> Float:
    """(channels, ...) -> (...): the one channel, or the luma of ITU-R BT.601 as in Pillow's "L"."""
    if len(colours) == 1:
        channel: Float = colours[0]
        return channel
    luma: Float = colours[0] * _LUMA[0] + colours[1] * _LUMA[1] + colours[2] * _LUMA[2]
    return luma


def _sharpness_and_noise(
    pixels: NDArray[np.uint8], grey: Float, stride: int
) -> tuple[Float, Float]:
    """(rows,) each, from every sampled pixel and its eight neighbours; 0 below 3 pixels a side."""
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
