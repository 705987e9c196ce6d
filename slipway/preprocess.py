"""The one way from encoded bytes to pixels, for training and for serving.

Pillow decodes in both, so both see the same pixels, bit for bit. Normalisation is not here: it is
inside the exported graph.
"""

import io
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from slipway import user_function
from slipway.contract import Contract
from slipway.errors import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 2**30 // 4 // 3  # from here on Pillow warns, and from twice as many it refuses, whatever our own limit is
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class TransformContract(Contract):
    """A function of the user's that is part of the preprocessing, and the code it was run with."""

    function: str  # "package.module:function"
    sha256: str  # hex digest of its code


class ImageContract(Contract):
    """What a network takes: uint8 pixels in [0, 255], laid out (rows, size_px, size_px, channels)."""

    kind: Literal["images"]
    size_px: int
    channels: Literal[1, 3]
    fit: Literal["stretch", "crop", "pad"]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    max_pixels: int
    transform: TransformContract | None  # a function of the user's on each decoded image; null for none

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of one image."""
        return (self.size_px, self.size_px, self.channels)

    @property
    def dtype(self) -> type[np.uint8]:
        """Of the pixels."""
        return np.uint8


def decode_image(payload: bytes, max_pixels: int) -> Image.Image:
    """Decode every pixel of an image and turn it upright by its EXIF orientation.

    Raises ImageError with the rule `empty`, `undecodable`, `truncated` or `pixel_bomb`; the size is
    checked before any pixel is decoded.
    """
    if not payload:
        raise ImageError("empty", "the file has 0 bytes, expected an image")
    try:
        image = Image.open(io.BytesIO(payload), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("pixel_bomb", f"{error}; the limit is {max_pixels} pixels") from error
    except Exception as error:
        raise ImageError("undecodable", f"not a readable image ({', '.join(FORMATS)} expected, {len(payload)} bytes found)") from error
    if image.mode == "F":
        raise ImageError("undecodable", "its pixels are floating-point numbers, which have no fixed range; expected 8- or 16-bit integers")
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError("pixel_bomb", f"{width}x{height} pixels, the limit is {max_pixels} pixels")
    try:
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception as error:
        raise ImageError("truncated", f"{image.format} of {width}x{height} breaks off or is damaged: {error}") from error


def image_array(image: Image.Image, contract: ImageContract) -> NDArray[np.uint8]:
    """(size_px, size_px, channels) uint8 in [0, 255] from a decoded image of any mode and size."""
    resized = _fit(_flatten(image, contract.channels), contract)
    return np.asarray(resized, dtype=np.uint8).reshape(contract.shape)


def array_from_bytes(payload: bytes, contract: ImageContract) -> NDArray[np.uint8]:
    """Encoded image to (size_px, size_px, channels) uint8; ImageError if it cannot be read."""
    return array_and_values(payload, contract)[0]


def array_and_values(payload: bytes, contract: ImageContract) -> tuple[NDArray[np.uint8], user_function.Values]:
    """The same array, and what the contract's transform found on the image; {} without one.

    ImageError with the rule `transform_failed` if it fails on this image.
    """
    image = decode_image(payload, contract.max_pixels)
    if contract.transform is None:
        return image_array(image, contract), {}
    made, values = user_function.run(contract.transform.function, contract.transform.sha256, image)
    return image_array(made, contract), values


def load_transform(contract: ImageContract) -> None:
    """Import the contract's transform now, if it has one.

    UnavailableError if it cannot be imported; IntegrityError if its code is not the one that the contract was made with.
    """
    if contract.transform is not None:
        user_function.load(contract.transform.function, contract.transform.sha256)


def _flatten(image: Image.Image, channels: int) -> Image.Image:
    """To grey or RGB: 16 bits are scaled to 8, transparency is laid over white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image, dtype=np.uint32).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("L" if channels == 1 else "RGB")


def _fit(image: Image.Image, contract: ImageContract) -> Image.Image:
    size = (contract.size_px, contract.size_px)
    if image.size == size:
        return image
    resampling = _RESAMPLING[contract.interpolation]
    if contract.fit == "crop":
        return ImageOps.fit(image, size, method=resampling)
    if contract.fit == "pad":
        return ImageOps.pad(image, size, method=resampling)
    return image.resize(size, resampling)
