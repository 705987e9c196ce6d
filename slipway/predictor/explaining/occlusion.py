"""Occlusion sensitivity: the change of the answer when one place of the image is covered.

Zeiler and Fergus 2014, "Visualizing and Understanding Convolutional Networks", section 4.2. A
place is covered with a blurred copy of the image, as in Fong and Vedaldi 2017 ("Interpretable
Explanations of Black Boxes by Meaningful Perturbation"), because a grey square would be a new
object: on an empty background the model would react to the square.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFilter

from slipway.predictor.explaining.pictures import image_of

SIDES = (8, 4, 2)  # places along one side; the first that the time allows is used
# Standard deviation of the Gaussian per side: removes the shapes of a place, keeps its colour.
_BLUR_FRACTION = 1 / 8


def side_for(most_rows: int, size_px: int) -> int:
    """Return the number of places along one side of the grid to use.

    It is the finest grid with at most `most_rows` places in all, or else the coarsest grid.
    """
    side = next((side for side in SIDES if side * side <= most_rows), SIDES[-1])
    return min(side, size_px)


def covered(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return a copy of the image for each place of a `side` x `side` grid, with this place covered.

    The result is (side * side, height, width, channels) uint8; places are in row-major order. Each
    cover is twice as wide as its place, so that it also hides details on the border of two places.
    """
    blurred = _blurred(pixels)
    edges = [_edges(position, side, len(pixels)) for position in range(side)]
    copies = np.repeat(pixels[np.newaxis], side * side, axis=0)
    for number in range(side * side):
        (top, bottom), (left, right) = edges[number // side], edges[number % side]
        copies[number, top:bottom, left:right] = blurred[top:bottom, left:right]
    return copies


def _edges(position: int, side: int, size_px: int) -> tuple[int, int]:
    """Return the first pixel of a cover, and the one after its last, along one side of the image.

    A cover is its place and half a place on both sides.
    """
    place_px = size_px / side
    begin = int(np.floor((position - 0.5) * place_px))
    end = int(np.ceil((position + 1.5) * place_px))
    return max(0, begin), min(size_px, end)


def _blurred(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    blurred = image_of(pixels).filter(ImageFilter.GaussianBlur(len(pixels) * _BLUR_FRACTION))
    return np.asarray(blurred, dtype=np.uint8).reshape(pixels.shape)
