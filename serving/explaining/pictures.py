"""The pictures of an explanation: what the model saw, and where in it the answer comes from."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

OVERLAY_PX = 256  # smaller pictures are enlarged to about this, larger ones stay
_FOR, _AGAINST = (
    (224, 72, 24),
    (37, 99, 235),
)  # vermilion and blue are told apart with any kind of colour vision
_OPACITY = 0.8  # at the place that changes the answer most


def png_base64(pixels: NDArray[np.uint8]) -> str:
    """(height, width, 1 or 3) uint8 as PNG, in base64."""
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def overlay(pixels: NDArray[np.uint8], changes: NDArray[np.float64]) -> NDArray[np.uint8]:
    """(height, width, 3) uint8: the picture in grey, under vermilion where (side, side) `changes` are positive and blue where negative.

    The opacity is relative to the largest change; without any the picture stays grey.
    """
    size_px = len(pixels) * max(1, OVERLAY_PX // len(pixels))
    image = (
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        .convert("L")
        .resize((size_px, size_px), Image.Resampling.NEAREST)
    )
    grey = np.repeat(np.asarray(image, dtype=np.float32)[..., np.newaxis], 3, axis=2)
    heat = np.asarray(
        Image.fromarray(changes.astype(np.float32)).resize(
            (size_px, size_px), Image.Resampling.BILINEAR
        )
    )
    strongest = float(np.abs(changes).max())
    opacity = (
        _OPACITY * np.abs(heat)[..., np.newaxis] / strongest if strongest else np.zeros_like(grey)
    )
    colour = np.where(
        heat[..., np.newaxis] > 0, np.array(_FOR, np.float32), np.array(_AGAINST, np.float32)
    )
    return (grey * (1 - opacity) + colour * opacity).round().clip(0, 255).astype(np.uint8)
