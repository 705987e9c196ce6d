"""What is watched of a row: a few numbers and categories of what goes into the network and of what comes out.

Of an image: brightness, contrast, sharpness, noise and the like, on a grid of its pixels. Of a table's row: its columns. Of the answer:
class or value, how sure it is, and the outlier score, which is how far the network's penultimate features are from those of the
training rows: the summary of these features that the graph itself gives. Numpy alone, vectorised over the rows of a batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Bundle, OutputContract
from slipway.artifacts.input_contract import InputContract
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.system.contract import Contract

Float = NDArray[np.float32]

PREDICTED_CLASS = "predicted_class"
CONFIDENCE = "confidence"
OUTLIER_SCORE = "outlier_score"
_OF_IMAGES = (
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
_OF_COLOURS = ("red", "green", "blue", "saturation", "yellowness")
_LUMA = (np.float32(0.299), np.float32(0.587), np.float32(0.114))
_GRID = 48  # guess: positions along a side are enough; a larger image is sampled with the stride that leaves as many or more
_BLOCK_BYTES = 1 << 22  # pixels that are measured at a time
_WHITE = 255


class Feature(Contract):
    """One number or category of each row. A category is the position in `categories`; NaN is a missing value."""

    name: str
    kind: Literal["number", "category"]
    origin: Literal["input", "output"]
    categories: list[str]  # of a category; empty for a number


def features_of(contract: InputContract, output: OutputContract) -> list[Feature]:
    """What `extract` gives, in its order."""
    return [*input_features(contract), *output_features(output)]


def feature_names(manifest: Bundle) -> list[str]:
    """The names of the features of a bundle's rows, in the order of `extract`'s columns."""
    return [feature.name for feature in features_of(manifest.input, manifest.output)]


def extract(contract: InputContract, inputs: NDArray[Any], outputs: Float, scores: Float) -> Float:
    """(rows, features) float32 of `inputs` (rows, ...) as the network takes them and of what it answered.

    `outputs` (rows, labels) probabilities or (rows, 1) values, `scores` (rows,) outlier scores.
    """
    return np.concatenate(
        [extract_inputs(contract, inputs), extract_outputs(outputs, scores)], axis=1
    )


def extract_inputs(contract: InputContract, inputs: NDArray[Any]) -> Float:
    """(rows, features) float32: those of `extract`'s columns, the first ones, that no model is needed for."""
    if isinstance(contract, ColumnContract):
        return _of_rows(contract, inputs)
    rows = max(1, _BLOCK_BYTES // math.prod(contract.shape))
    blocks = [
        _of_images(np.asarray(inputs[start : start + rows]))
        for start in range(0, len(inputs), rows)
    ]
    return (
        np.concatenate(blocks)
        if blocks
        else np.empty((0, len(input_features(contract))), np.float32)
    )


def input_features(contract: InputContract) -> list[Feature]:
    """What `extract_inputs` gives, in its order."""
    if isinstance(contract, ImageContract):
        names = [*_OF_IMAGES, *(_OF_COLOURS if contract.channels == 3 else ())]
        return [Feature(name=name, kind="number", origin="input", categories=[]) for name in names]
    return [
        Feature(
            name=f"column {column.name}",
            kind="category" if column.kind in ("boolean", "category") else "number",
            origin="input",
            categories={
                "boolean": ["false", "true"],
                "category": ["missing or unknown", *column.categories],
            }.get(column.kind, []),
        )
        for column in [*contract.numeric, *contract.categorical]
    ]


def output_features(output: OutputContract) -> list[Feature]:
    """What `extract_outputs` gives, in its order."""

    def number(name: str) -> Feature:
        return Feature(name=name, kind="number", origin="output", categories=[])

    if output.kind == "value":
        return [number("value"), number(OUTLIER_SCORE)]
    label = Feature(
        name=PREDICTED_CLASS, kind="category", origin="output", categories=output.labels
    )
    return [label, number(CONFIDENCE), number("entropy"), number("margin"), number(OUTLIER_SCORE)]


def extract_outputs(outputs: Float, scores: Float) -> Float:
    """(rows, features) float32: the last ones of `extract`'s. Entropy in nats; the margin is the best probability less the second."""
    if outputs.shape[1] == 1:
        return np.column_stack([outputs[:, 0], scores]).astype(np.float32)
    probabilities = np.clip(outputs, np.finfo(np.float32).tiny, 1)
    entropy = -(probabilities * np.log(probabilities)).sum(axis=1)
    second, first = np.partition(outputs, -2, axis=1)[:, -2:].T
    return np.column_stack([outputs.argmax(axis=1), first, entropy, first - second, scores]).astype(
        np.float32
    )


def _of_rows(contract: ColumnContract, encoded: Float) -> Float:
    """The standardised numbers, NaN where they are missing; booleans as 0 and 1; the codes of categories."""
    numeric, indicated = contract.numeric, contract.indicated
    found = np.array(encoded[:, : len(numeric)], np.float32)
    missing = {
        column.name: encoded[:, len(numeric) + position] > 0
        for position, column in enumerate(indicated)
    }
    for position, column in enumerate(numeric):
        if column.kind == "boolean":
            found[:, position] = np.rint(found[:, position] * column.std + column.mean)
        if column.name in missing:
            found[missing[column.name], position] = np.nan
    return np.concatenate([found, encoded[:, len(numeric) + len(indicated) :]], axis=1)


def _of_images(pixels: NDArray[np.uint8]) -> Float:
    """(rows, height, width, channels) uint8 -> (rows, features), in grey levels of [0, 255] where nothing else is said.

    sharpness: the variance of the Laplacian (Pech-Pacheco et al., ICPR 2000), as log(1 + .). noise: J. Immerkaer, Fast noise variance
    estimation, Computer Vision and Image Understanding 64 (1996) 300-302. skewness: the third standardised moment. black_share and
    white_share: of pixels at 0 and 255. centre and top: the mean of the middle quarter, and of the upper half, less the mean.
    yellowness: the mean of red and green less blue (Hasler and Süsstrunk, Measuring colourfulness in natural images, SPIE 5007, 2003).
    """
    stride = max(1, pixels.shape[1] // _GRID)
    sampled = pixels[:, ::stride, ::stride]
    colours = [sampled[..., channel].astype(np.float32) for channel in range(pixels.shape[3])]
    grey = _grey(colours)  # (rows, grid, grid)
    flat = grey.reshape(len(grey), -1)
    mean = flat.mean(axis=1)
    offset = flat - mean[:, None]
    squares = offset * offset
    contrast = np.sqrt(squares.mean(axis=1))
    skewness = (squares * offset).mean(axis=1) / np.maximum(contrast, 1e-3) ** 3
    quarter = grey.shape[1] // 4
    middle = grey[:, quarter : grey.shape[1] - quarter, quarter : grey.shape[2] - quarter]
    upper = grey[:, : (grey.shape[1] + 1) // 2]
    sharpness, noise = _fine_structure(pixels, grey, stride)
    numbers = sampled.reshape(len(sampled), -1)
    shares = [(numbers == level).mean(axis=1) for level in (0, _WHITE)]
    found = [
        mean,
        contrast,
        skewness,
        sharpness,
        noise,
        *shares,
        _mean(middle) - mean,
        _mean(upper) - mean,
    ]
    if len(colours) == 3:
        red, green, blue = colours
        spread = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)
        means = [_mean(red), _mean(green), _mean(blue)]
        found += [*means, _mean(spread), (means[0] + means[1]) / 2 - means[2]]
    return np.column_stack(found).astype(np.float32)


def _mean(picture: Float) -> Float:
    """(rows, height, width) -> (rows,)"""
    mean: Float = picture.reshape(len(picture), -1).mean(axis=1)
    return mean


def _grey(colours: Sequence[Float]) -> Float:
    """One channel, or the luma of ITU-R BT.601, as Pillow's mode "L" has it."""
    if len(colours) == 1:
        return colours[0]
    red, green, blue = (weight * own for weight, own in zip(_LUMA, colours, strict=True))
    mixed: Float = red + green + blue
    return mixed


def _fine_structure(pixels: NDArray[np.uint8], grey: Float, stride: int) -> tuple[Float, Float]:
    """Sharpness and noise, (rows,) each, from each sampled pixel and its eight neighbours; 0 for a side below 3 pixels."""
    side = pixels.shape[1]
    if side < 3:
        return np.zeros(len(pixels), np.float32), np.zeros(len(pixels), np.float32)
    at = _neighbours(pixels, grey, stride)
    straight = at(-1, 0) + at(1, 0) + at(0, -1) + at(0, 1)
    diagonal = at(-1, -1) + at(-1, 1) + at(1, -1) + at(1, 1)
    middle = at(0, 0)
    laplacian = straight - 4 * middle
    masked = diagonal - 2 * straight + 4 * middle
    noise = np.abs(masked).mean(axis=(1, 2)) * np.float32(math.sqrt(math.pi / 2) / 6)
    return np.log1p(laplacian.var(axis=(1, 2))), noise


def _neighbours(pixels: NDArray[np.uint8], grey: Float, stride: int) -> Callable[[int, int], Float]:
    """The grey levels beside each sampled inner pixel, by (down, right). The whole picture is at hand in grey where none is skipped."""
    end = pixels.shape[1] - 1

    def at(down: int, right: int) -> Float:
        rows, columns = slice(1 + down, end + down, stride), slice(1 + right, end + right, stride)
        if stride == 1:
            return grey[:, rows, columns]
        return _grey(
            [
                pixels[:, rows, columns, channel].astype(np.float32)
                for channel in range(pixels.shape[3])
            ]
        )

    return at
