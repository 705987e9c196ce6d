"""Pictures of an explanation: the input, and an overlay of the places that change the answer."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

OVERLAY_PX = 256  # smaller images are enlarged to about this size
# Vermilion and blue, which people with any kind of colour vision can distinguish.
_FOR, _AGAINST = (224, 72, 24), (37, 99, 235)
_OPACITY = 0.8  # at the place that changes the answer most


def image_of(pixels: NDArray[np.uint8]) -> Image.Image:
    """Return pixels (height, width, 1 or 3) uint8 as a Pillow image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def png_base64(pixels: NDArray[np.uint8]) -> str:
    """Encode pixels (height, width, 1 or 3) uint8 as PNG in base64."""
    stream = io.BytesIO()
    image_of(pixels).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def overlay(pixels: NDArray[np.uint8], changes: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the image in grey with `changes` (side, side) in colour, (height, width, 3) uint8.

    Positive changes are vermilion, negative ones blue. The opacity is relative to the largest
    change; without any change the image stays grey.
    """
    size_px = len(pixels) * max(1, OVERLAY_PX // len(pixels))
    image = image_of(pixels).convert("L").resize((size_px, size_px), Image.Resampling.NEAREST)
    grey = np.repeat(np.asarray(image, dtype=np.float32)[..., np.newaxis], 3, axis=2)
    coarse = Image.fromarray(changes.astype(np.float32))
    resized = coarse.resize((size_px, size_px), Image.Resampling.BILINEAR)
    heat = np.asarray(resized)[..., np.newaxis]
    strongest = float(np.abs(changes).max())
    opacity = _OPACITY * np.abs(heat) / strongest if strongest else np.zeros_like(grey)
    colour = np.where(heat > 0, np.array(_FOR, np.float32), np.array(_AGAINST, np.float32))
    return (grey * (1 - opacity) + colour * opacity).round().clip(0, 255).astype(np.uint8)
