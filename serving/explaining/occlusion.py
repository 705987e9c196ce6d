"""What an image model looked at: how the answer changes when one place of the picture is covered.

Occlusion sensitivity (Zeiler and Fergus 2014, "Visualizing and Understanding Convolutional Networks", section 4.2). A place is covered with
the blurred picture itself, as in Fong and Vedaldi 2017 ("Interpretable Explanations of Black Boxes by Meaningful Perturbation"), since a
grey square would be a new object in the picture: on an empty ground it adds what was not there, and the model answers to that.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

SIDES = (8, 4, 2)  # places along one side, the first that the time allows
_BLUR_SHARE = (
    1 / 8
)  # of the side: standard deviation of the Gaussian; a place's own shapes are gone, its colour is not


def side_for(most_rows: int, size_px: int) -> int:
    """Places along one side of the picture: the finest grid of at most `most_rows` places, and the coarsest where none is."""
    return min(next((side for side in SIDES if side * side <= most_rows), SIDES[-1]), size_px)


def covered(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """(side * side, height, width, channels) uint8: the picture (height, width, channels) with one place covered in each, row by row.

    What is covered is twice as wide as its place, so that nothing falls between two of them.
    """
    blurred = _blurred(pixels)
    edges = [_edges(position, side, len(pixels)) for position in range(side)]
    pictures = np.repeat(pixels[np.newaxis], side * side, axis=0)
    for number in range(side * side):
        (top, bottom), (left, right) = edges[number // side], edges[number % side]
        pictures[number, top:bottom, left:right] = blurred[top:bottom, left:right]
    return pictures


def _edges(position: int, side: int, size_px: int) -> tuple[int, int]:
    """First and last + 1 pixel that is covered at a place: half a place more on both of its sides."""
    place_px = size_px / side
    return max(0, int(np.floor((position - 0.5) * place_px))), min(
        size_px, int(np.ceil((position + 1.5) * place_px))
    )


def _blurred(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    blurred = image.filter(ImageFilter.GaussianBlur(len(pixels) * _BLUR_SHARE))
    return np.asarray(blurred, dtype=np.uint8).reshape(pixels.shape)
