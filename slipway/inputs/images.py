"""The one way from encoded bytes to pixels, for training and for serving.

The same code decodes in both, so both see the same pixels, bit for bit: libjpeg-turbo straight into an array for an upright JPEG
without a flaw, libspng for a plain PNG, Pillow for everything else and for every doubt. Where
two can decode, their pixels are equal.
Normalisation is not here: it is inside the exported graph.
"""

import io
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from slipway.inputs import user_function
from slipway.inputs.png import decode_plain_png
from slipway.system.contract import Contract
from slipway.system.errors import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = (
    2**30 // 4 // 3
)  # from here on Pillow warns, and from twice as many it refuses, whatever our own limit is
UNKNOWN = "not a readable image"  # how the detail begins where the bytes are of no format
_FORMAT_OF = {"MPO": "JPEG"}  # a JPEG with further pictures behind it, as telephones write it
_MOST_OF_16_BITS = 65535
_JPEG, _START_OF_SCAN, _METADATA = b"\xff\xd8", b"\xda", b"\xe1"
_PLAIN_COLOURS = ("Gray", "YCbCr", "RGB")  # others (CMYK, YCCK) are Pillow's
_PLAIN_SUBSAMPLINGS = (
    "444",
    "422",
    "420",
    "440",
    "411",
)  # the chroma of others may be beyond libjpeg-turbo, whose luma is not
_ORIENTATION = 0x0112  # the tag of EXIF
_PLAIN_MODES = (
    "1",
    "L",
    "LA",
    "RGB",
    "RGBA",
    "I",
    "I;16",
)  # Pillow converts each of them to grey and RGB
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
    resize_mode: Literal["stretch", "crop", "pad"]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    max_pixels: int
    transform: (
        TransformContract | None
    )  # a function of the user's on each decoded image; null for none

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of one image."""
        return (self.size_px, self.size_px, self.channels)

    @property
    def dtype(self) -> type[np.uint8]:
        """Of the pixels."""
        return np.uint8


class Decoded(NamedTuple):
    """An image as Pillow holds it, upright, and what its file said of itself."""

    image: Image.Image  # of mode 1, L, LA, RGB, RGBA, I or I;16
    image_format: str  # one of FORMATS
    orientation: int  # of EXIF, 1 to 8; the image has been turned by it already


def decode_image(payload: bytes, max_pixels: int) -> Image.Image:
    """Decode every pixel of an image and turn it upright by its EXIF orientation.

    Raises ImageError with the rule `empty`, `undecodable`, `truncated` or `pixel_bomb`; the size is
    checked before any pixel is decoded.
    """
    pixels = _decode_plain(payload, max_pixels)
    return decode_with_pillow(payload, max_pixels).image if pixels is None else _as_image(pixels)


def _decode_plain(payload: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    """(H, W) grey, (H, W, 3) RGB or (H, W, 4) RGBA pixels, alpha 255, of what others than Pillow read; ImageError as in `decode_image`."""
    pixels = decode_plain_png(payload, max_pixels)
    return decode_jpeg(payload, max_pixels) if pixels is None else pixels


def _as_image(pixels: NDArray[np.uint8]) -> Image.Image:
    if pixels.ndim == 2 or pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    # Pillow holds four bytes for each RGB pixel, too: this is one copy, less than half of what fromarray takes from three.
    return Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGBX")


class PixelBuffer:
    """Memory for one decoded image after the other: fresh memory for each costs a twentieth of the decoding."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, num_bytes: int) -> bytearray:
        """At least so many bytes, whose content is of no worth."""
        if len(self._memory) < num_bytes:
            self._memory = bytearray(num_bytes)
        return self._memory


class JpegHeader(NamedTuple):
    """What libjpeg-turbo says of an upright JPEG before any pixel is decoded."""

    width: int
    height: int
    is_grey: bool
    has_luma: bool  # its colours are stored as luma and chroma, and these can be decoded


def read_jpeg_header(payload: bytes, max_pixels: int) -> JpegHeader | None:
    """None where `decode_with_pillow` is to be asked: no JPEG, not upright, of unusual colours, or damaged.

    Raises ImageError with the rule `pixel_bomb`.
    """
    if not payload.startswith(_JPEG) or not _is_upright(payload):
        return None
    try:
        height, width, colours, subsampling = simplejpeg.decode_jpeg_header(payload)
    except ValueError:
        return None
    if colours not in _PLAIN_COLOURS:
        return None
    _check_size(width, height, max_pixels)
    return JpegHeader(
        width, height, colours == "Gray", colours == "YCbCr" and subsampling in _PLAIN_SUBSAMPLINGS
    )


def decode_jpeg(
    payload: bytes, max_pixels: int, buffer: PixelBuffer | None = None
) -> NDArray[np.uint8] | None:
    """(H, W) grey or (H, W, 4) RGBA pixels, alpha 255, of an upright JPEG without a flaw; None: ask `decode_with_pillow`.

    It refuses whatever libjpeg-turbo as much as warns of; Pillow then decides, and names the rule. With `buffer` the pixels
    are written into it, and valid until its next use. Raises ImageError with the rule `pixel_bomb`.
    """
    header = read_jpeg_header(payload, max_pixels)
    return None if header is None else decode_jpeg_pixels(payload, header, buffer)


def decode_jpeg_pixels(
    payload: bytes, header: JpegHeader, buffer: PixelBuffer | None = None
) -> NDArray[np.uint8] | None:
    """`decode_jpeg` of the JPEG with this `header`."""
    return (
        decode_jpeg_grey(payload, header, buffer)
        if header.is_grey
        else _decode(payload, header, "RGBA", 4, buffer)
    )


def decode_jpeg_grey(
    payload: bytes, header: JpegHeader, buffer: PixelBuffer | None = None
) -> NDArray[np.uint8] | None:
    """(H, W) luma of the JPEG with this `header`, or None as in `decode_jpeg`, and for the same payloads.

    All that is stored is read, but of the chroma no pixel is computed. With rounding, 0.299 R + 0.587 G + 0.114 B of the
    decoded colours is this very luma, except where a colour was cut off at 0 or 255.
    """
    pixels = _decode(payload, header, "GRAY", 1, buffer)
    return None if pixels is None else pixels[:, :, 0]


def _decode(
    payload: bytes, header: JpegHeader, colours: str, channels: int, buffer: PixelBuffer | None
) -> NDArray[np.uint8] | None:
    memory = buffer.of(header.width * header.height * channels) if buffer else None
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(payload, colours, buffer=memory)
    except ValueError:
        return None
    return pixels


def decode_with_pillow(payload: bytes, max_pixels: int) -> Decoded:
    """Any image of FORMATS, every pixel decoded and turned upright; ImageError as in `decode_image`."""
    image = _open(payload, max_pixels)
    image_format = _FORMAT_OF.get(str(image.format), str(image.format))
    try:
        orientation, upright = _upright(image, image_format)
    except MemoryError:  # says nothing about the image
        raise
    except Exception as error:
        raise ImageError(
            "truncated",
            f"{image_format} of {image.width}x{image.height} breaks off or is damaged: {error}",
        ) from error
    _check_range(upright)
    try:
        plain = _in_plain_mode(upright)
    except MemoryError:
        raise
    except Exception as error:
        detail = (
            f"{image_format} with pixels of mode {upright.mode}, which cannot become RGB: {error}"
        )
        raise ImageError("undecodable", detail) from error
    return Decoded(plain, image_format, orientation)


def _upright(image: Image.Image, image_format: str) -> tuple[int, Image.Image]:
    """The orientation that the file says, and the image turned by it."""
    if (
        image_format == "TIFF"
    ):  # Pillow itself turns a TIFF when it loads the pixels, and forgets the tag
        orientation = image.getexif().get(_ORIENTATION, 1)
        image.load()
        return orientation, image
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation, image if orientation == 1 else ImageOps.exif_transpose(image)


def _check_range(image: Image.Image) -> None:
    """A wide integer has no fixed range, either: to cut it off at 16 bits would make other pictures of some."""
    if image.mode != "I":
        return
    low, high = np.asarray(image).min(), np.asarray(image).max()
    if low < 0 or high > _MOST_OF_16_BITS:
        raise ImageError(
            "undecodable",
            f"its pixels are integers from {low} to {high}; expected 8 or 16 bits without a sign",
        )


def _in_plain_mode(image: Image.Image) -> Image.Image:
    """The image in one of _PLAIN_MODES; ValueError, or an error of Pillow's own, if it has none."""
    if image.mode in _PLAIN_MODES and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits in another byte order, or with a transparent value
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        # Optimised, it would interpolate in a table and be some levels off.
        exact = ImageCms.buildTransform(lab, srgb, "LAB", "RGB", flags=ImageCms.Flags.NOOPTIMIZE)
        return exact.apply(image)
    if image.mode == "La":  # Pillow converts it to nothing else
        return image.convert("LA")
    if image.mode in ("P", "PA") and image.palette is None:
        raise ValueError("it has no palette before its pixels")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _open(payload: bytes, max_pixels: int) -> Image.Image:
    if not payload:
        raise ImageError("empty", "the file has 0 bytes, expected an image")
    try:
        image = Image.open(io.BytesIO(payload), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(
            "pixel_bomb",
            f"more than {MAX_PIXELS} pixels by its header, the limit is {max_pixels} pixels",
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(
            "undecodable", f"{UNKNOWN} ({', '.join(FORMATS)} expected, {len(payload)} bytes found)"
        ) from error
    if image.mode == "F":
        raise ImageError(
            "undecodable",
            "its pixels are floating-point numbers, which have no fixed range; expected 8- or 16-bit integers",
        )
    _check_size(*image.size, max_pixels)
    return image


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError("pixel_bomb", f"{width}x{height} pixels, the limit is {max_pixels} pixels")


def _is_upright(payload: bytes) -> bool:
    """Whether a JPEG says nothing of an orientation, or that it is upright. EXIF and XMP are in segments before the first scan."""
    position = 2
    while payload[position : position + 1] == b"\xff":
        marker = payload[position + 1 : position + 2]
        if marker == _START_OF_SCAN:
            return True
        if marker == _METADATA:
            return _orientation_is_upright(payload)
        position += 2 + int.from_bytes(payload[position + 2 : position + 4])
    return False  # an unusual header: Pillow reads it


def _orientation_is_upright(payload: bytes) -> bool:
    try:
        return bool(
            Image.open(io.BytesIO(payload), formats=["JPEG"]).getexif().get(_ORIENTATION, 1) == 1
        )
    except MemoryError:
        raise
    except Exception:
        return False


def image_array(image: Image.Image, contract: ImageContract) -> NDArray[np.uint8]:
    """(size_px, size_px, channels) uint8 in [0, 255] from a decoded image of any mode and size."""
    resized = _fit(flatten(image, contract.channels), contract)
    return np.frombuffer(resized.tobytes(), dtype=np.uint8).reshape(
        contract.shape
    )  # asarray does the same, and more


def array_from_bytes(payload: bytes, contract: ImageContract) -> NDArray[np.uint8]:
    """Encoded image to (size_px, size_px, channels) uint8; ImageError if it cannot be read."""
    return array_and_values(payload, contract)[0]


def array_and_values(
    payload: bytes, contract: ImageContract
) -> tuple[NDArray[np.uint8], user_function.Values]:
    """The same array, and what the contract's transform found on the image; {} without one.

    ImageError with the rule `transform_failed` if it fails on this image.
    """
    pixels = _decode_plain(payload, contract.max_pixels)
    if (
        contract.transform is None
        and pixels is not None
        and (array := _as_it_is(pixels, contract)) is not None
    ):
        return array, {}
    image = (
        decode_with_pillow(payload, contract.max_pixels).image
        if pixels is None
        else _as_image(pixels)
    )
    if contract.transform is None:
        return image_array(image, contract), {}
    made, values = user_function.run(contract.transform.function, contract.transform.sha256, image)
    try:
        return image_array(made, contract), values
    except MemoryError:
        raise
    except Exception as error:
        detail = f"{contract.transform.function} returned an image of mode {made.mode}, which cannot become RGB: {error}"
        raise ImageError("transform_failed", detail) from error


def _as_it_is(pixels: NDArray[np.uint8], contract: ImageContract) -> NDArray[np.uint8] | None:
    """What `image_array` would give, where nothing is to be resized or converted: an image object takes longer than small pixels."""
    size = (contract.size_px, contract.size_px)
    if contract.channels == 1:
        return pixels[:, :, np.newaxis] if pixels.shape == size else None
    if pixels.ndim == 3 and pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels[:, :, :3])
    return None


def load_transform(contract: ImageContract) -> None:
    """Import the contract's transform now, if it has one.

    UnavailableError if it cannot be imported; IntegrityError if its code is not the one that the contract was made with.
    """
    if contract.transform is not None:
        user_function.load(contract.transform.function, contract.transform.sha256)


def flatten(image: Image.Image, channels: int) -> Image.Image:
    """Any mode to grey (1 channel) or RGB (3): 16 bits are scaled to 8, transparency is laid over white."""
    image = _in_plain_mode(image)
    if image.mode in ("I", "I;16"):
        image = Image.fromarray(
            (np.asarray(image, dtype=np.uint32).clip(0, _MOST_OF_16_BITS) // 257).astype(np.uint8)
        )
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _fit(image: Image.Image, contract: ImageContract) -> Image.Image:
    size = (contract.size_px, contract.size_px)
    if image.size == size:
        return image
    resampling = _RESAMPLING[contract.interpolation]
    if contract.resize_mode == "crop":
        return ImageOps.fit(image, size, method=resampling)
    if contract.resize_mode == "pad":
        return ImageOps.pad(image, size, method=resampling)
    return image.resize(size, resampling)
