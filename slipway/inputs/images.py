"""Decodes and resizes images, for training and serving alike, so both see identical pixels.

libjpeg-turbo decodes intact upright JPEGs, and libspng plain PNGs, straight into arrays. Pillow
decodes everything else and every doubtful file. If two decoders accept a file, their pixels are
equal.
"""

import io
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pi_heif
import simplejpeg
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageCms, ImageOps, TiffImagePlugin

from slipway.inputs import heif
from slipway.inputs.contract import InputContract
from slipway.inputs.png import MAX_TEXT_BYTES, decode_plain_png, has_too_much_text
from slipway.system.contract import Contract
from slipway.system.errors import ImageError

if TYPE_CHECKING:  # most services have no user code, and do not load what reads it
    from slipway.inputs.user_function import Values

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF")
MAX_PIXELS = 2**30 // 4 // 3  # Pillow warns above this and refuses twice as many
UNKNOWN = "not a readable image"  # start of the detail if no decoder knows the format
_FORMAT_OF = {"MPO": "JPEG"}  # a JPEG followed by further pictures, as phones write it
_MAX_UINT16 = 65535
_JPEG, _START_OF_SCAN, _METADATA = b"\xff\xd8", b"\xda", b"\xe1"
_PLAIN_COLOURS = ("Gray", "YCbCr", "RGB")  # Pillow decodes others (CMYK, YCCK)
# libjpeg-turbo may fail to decode the chroma of other subsamplings.
_PLAIN_SUBSAMPLINGS = ("444", "422", "420", "440", "411")
_ORIENTATION = 0x0112  # EXIF tag of the orientation
_BITS_PER_SAMPLE, _SAMPLES_PER_PIXEL, _SAMPLE_FORMAT = 0x0102, 0x0115, 0x0153  # TIFF tags
_READ_NUMBERS = ("unsigned integers of 8 bits", "unsigned integers of 16 bits")
_EXPECTED = "expected unsigned integers of 8 or 16 bits: scale it to 16 bits and save it again"
_PLAIN_MODES = ("1", "L", "LA", "RGB", "RGBA", "I", "I;16")  # Pillow converts these to L and RGB
_MAX_PICTURES = 4  # colours, transparency, a preview and one more, each of the most pixels
_AVIF_FILM, _AVIF = b"ftypavis", b"ftypavif"
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
pi_heif.register_heif_opener(decode_threads=1)
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class TransformContract(Contract):
    """A user function that is part of preprocessing, and the digest of its code."""

    function: str  # "package.module:function"
    sha256: str  # hex digest of its code


class ImageContract(InputContract):
    """Input of an image network: (rows, size_px, size_px, channels) uint8 in [0, 255]."""

    kind: Literal["images"]
    size_px: int
    channels: Literal[1, 3]
    resize_mode: Literal["stretch", "crop", "pad"]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    max_pixels: int
    transform: TransformContract | None  # user function applied to each decoded image

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image: (height, width, channels)."""
        return (self.size_px, self.size_px, self.channels)

    @property
    def dtype(self) -> type[np.uint8]:
        return np.uint8

    def require_usable(self) -> None:
        """Import the user's transform, if any. Raises IntegrityError if its code changed."""
        load_transform(self)

    def example_rows(self, num_rows: int) -> NDArray[np.uint8]:
        """Return made-up pixels (num_rows, size_px, size_px, channels) uint8 of many levels."""
        pixels = np.arange(num_rows * int(np.prod(self.shape)), dtype=np.uint64) % 251
        return pixels.astype(self.dtype).reshape(num_rows, *self.shape)


class DecodedImage(NamedTuple):
    """An upright Pillow image, with metadata of its file."""

    image: Image.Image  # image of mode 1, L, LA, RGB, RGBA, I or I;16
    image_format: str  # one of FORMATS
    orientation: int  # EXIF, 1 to 8; already applied to the image


def resize_rows(rows: NDArray[np.uint8], contract: ImageContract) -> NDArray[np.uint8]:
    """Resize pixels (rows, height, width, channels) of any size by the rules of `contract`."""
    return np.stack(
        [
            image_array(Image.fromarray(row[..., 0] if contract.channels == 1 else row), contract)
            for row in rows
        ]
    )


def decode_image(payload: bytes, max_pixels: int) -> Image.Image:
    """Decode every pixel of an image and rotate it upright by its EXIF orientation.

    Raises ImageError with the rule `empty`, `undecodable`, `truncated` or `pixel_bomb`; the size is
    checked before any pixel is decoded.
    """
    pixels = _decode_fast(payload, max_pixels)
    return decode_with_pillow(payload, max_pixels).image if pixels is None else _as_image(pixels)


def _decode_fast(payload: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    """Decode a plain PNG or an intact upright JPEG; None for any other file.

    The pixels are uint8: (H, W) grey, (H, W, 3) RGB or (H, W, 4) opaque RGBA.
    """
    pixels = decode_plain_png(payload, max_pixels)
    return decode_jpeg(payload, max_pixels) if pixels is None else pixels


def _as_image(pixels: NDArray[np.uint8]) -> Image.Image:
    if pixels.ndim == 2 or pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    # Pillow also stores 4 bytes per RGB pixel: one copy, in less than half of fromarray's time.
    return Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGBX")


class PixelBuffer:
    """Reusable memory for decoded images: allocating it each time costs 5 % of decoding."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, num_bytes: int) -> bytearray:
        """Return the buffer, grown to at least `num_bytes` bytes. Its content is arbitrary."""
        if len(self._memory) < num_bytes:
            self._memory = bytearray(num_bytes)
        return self._memory


class JpegHeader(NamedTuple):
    """Header of an upright JPEG, read before any pixel is decoded."""

    width: int
    height: int
    is_grey: bool
    has_luma: bool  # stored as luma and chroma that libjpeg-turbo can decode


def read_jpeg_header(payload: bytes, max_pixels: int) -> JpegHeader | None:
    """Read the header of a JPEG; None if it is not one that libjpeg-turbo may decode here.

    That is so for rotated, damaged or unusually coloured JPEGs, which Pillow must decode. Raises
    ImageError with the rule `pixel_bomb`.
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
    """Decode an intact upright JPEG to (H, W) grey or (H, W, 4) RGBA with alpha 255.

    Returns None for any file that libjpeg-turbo warns about: Pillow then decodes it or names the
    rule. With `buffer` the pixels are valid until its next use. Raises ImageError with the rule
    `pixel_bomb`.
    """
    header = read_jpeg_header(payload, max_pixels)
    return None if header is None else decode_jpeg_pixels(payload, header, buffer)


def decode_jpeg_pixels(
    payload: bytes, header: JpegHeader, buffer: PixelBuffer | None = None
) -> NDArray[np.uint8] | None:
    """Decode a JPEG as `decode_jpeg` does, given its header."""
    if header.is_grey:
        return decode_jpeg_grey(payload, header, buffer)
    return _decode(payload, header, "RGBA", 4, buffer)


def decode_jpeg_grey(
    payload: bytes, header: JpegHeader, buffer: PixelBuffer | None = None
) -> NDArray[np.uint8] | None:
    """Decode a JPEG to (H, W) luma; None for the same payloads as `decode_jpeg`.

    Reads the whole file but computes no chroma. Up to rounding it equals 0.299 R + 0.587 G +
    0.114 B of the decoded colours, unless a colour was clipped at 0 or 255.
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


def decode_with_pillow(payload: bytes, max_pixels: int) -> DecodedImage:
    """Decode any image of FORMATS as `decode_image` does, and return its metadata too."""
    image = _open(payload, max_pixels)
    image_format = _FORMAT_OF.get(str(image.format), str(image.format))
    try:
        orientation, upright = _upright(image, image_format)
    except MemoryError:  # running out of memory is not the image's fault
        raise
    except Exception as error:
        raise ImageError(
            "truncated",
            f"{image_format} of {image.width}x{image.height} is truncated or damaged: {error}",
        ) from error
    _check_range(upright, payload)
    try:
        plain = _in_plain_mode(upright)
    except MemoryError:
        raise
    except Exception as error:
        detail = (
            f"{image_format} with pixels of mode {upright.mode}, which cannot become RGB: {error}"
        )
        raise ImageError("undecodable", detail) from error
    return DecodedImage(plain, image_format, orientation)


def _upright(image: Image.Image, image_format: str) -> tuple[int, Image.Image]:
    """Return the EXIF orientation (1 to 8) of a file, and the image rotated upright by it."""
    if image_format == "TIFF":  # Pillow rotates a TIFF when it loads it, and drops the tag
        orientation = image.getexif().get(_ORIENTATION, 1)
        image.load()
        return orientation, image
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation, image if orientation == 1 else ImageOps.exif_transpose(image)


def _check_range(image: Image.Image, payload: bytes) -> None:
    """Raise ImageError for integers beyond 16 bits: clipping them would change the picture."""
    if image.mode != "I":
        return
    values, numbers = np.asarray(image), _tiff_numbers(payload)[0] or "integers"
    if numbers.startswith("unsigned"):  # Pillow reads them as signed
        values = values.view(np.uint32)
    low, high = values.min(), values.max()
    if low < 0 or high > _MAX_UINT16:
        raise ImageError(
            "undecodable", f"its pixels are {numbers} from {low} to {high}; {_EXPECTED}"
        )


def _tiff_numbers(payload: bytes) -> tuple[str, int]:
    """Return a TIFF's number type, as in "unsigned integers of 32 bits", and values per pixel.

    Returns ("", 0) for other files.
    """
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(payload[:8])
        file = io.BytesIO(payload)
        file.seek(tags.next)
        tags.load(file)
        kinds = {1: "unsigned integers", 2: "signed integers", 3: "floating-point numbers"}
        kind = kinds[tags.get(_SAMPLE_FORMAT, (1,))[0]]
        return f"{kind} of {tags[_BITS_PER_SAMPLE][0]} bits", tags.get(_SAMPLES_PER_PIXEL, 1)
    except MemoryError:
        raise
    except Exception:
        return "", 0


def _in_plain_mode(image: Image.Image) -> Image.Image:
    """Convert an image to one of _PLAIN_MODES. Raises ValueError or Pillow's own errors."""
    if image.mode in _PLAIN_MODES and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # other byte order, or a transparent value
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        # The optimised transform interpolates in a table and is some levels off.
        exact = ImageCms.buildTransform(lab, srgb, "LAB", "RGB", flags=ImageCms.Flags.NOOPTIMIZE)
        return exact.apply(image)
    if image.mode == "La":  # Pillow has no other conversion
        return image.convert("LA")
    if image.mode in ("P", "PA") and image.palette is None:
        raise ValueError("it has no palette before its pixels")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _open(payload: bytes, max_pixels: int) -> Image.Image:
    if not payload:
        raise ImageError("empty", "the file has 0 bytes, expected an image")
    if has_too_much_text(payload):
        limit = f"the limit of {MAX_TEXT_BYTES} bytes; save it without metadata"
        raise ImageError("undecodable", f"its text and colour profiles exceed {limit}")
    if payload[4:12] == _AVIF_FILM:  # the first frame of a film is a picture as well
        payload = payload[:4] + _AVIF + payload[12:]
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
        numbers, num_bands = _tiff_numbers(payload)
        if numbers not in ("", *_READ_NUMBERS):
            raise ImageError("undecodable", f"its pixels are {numbers}; {_EXPECTED}") from error
        if num_bands > 1:
            raise ImageError(
                "undecodable",
                f"its pixels have {num_bands} bands of {numbers}, which is not a colour format; "
                "expected grey, RGB or RGBA: save it as one of these",
            ) from error
        raise ImageError(
            "undecodable", f"{UNKNOWN} ({', '.join(FORMATS)} expected, {len(payload)} bytes found)"
        ) from error
    if image.mode == "F":
        raise ImageError(
            "undecodable",
            f"its pixels are floating-point numbers, which have no fixed range; {_EXPECTED}",
        )
    _check_size(*image.size, max_pixels)
    if image.format in ("AVIF", "HEIF"):
        _check_pictures(payload, image.format, max_pixels)
    return image


def _check_pictures(payload: bytes, image_format: str, max_pixels: int) -> None:
    """Check the sizes of all pictures in a HEIC or an AVIF, which may hold several.

    Raises ImageError with the rule `pixel_bomb` or `truncated`.
    """
    try:
        for width, height in heif.stated_sizes(payload):  # encoders round up to 64 pixels
            _check_size(max(width - 63, 1), max(height - 63, 1), max_pixels)
        num_pixels = 0
        for width, height in heif.av1_sizes(payload) if image_format == "AVIF" else ():
            _check_size(width, height, max_pixels)
            num_pixels += width * height
            if num_pixels > _MAX_PICTURES * max_pixels:
                limit = f"{_MAX_PICTURES} times the limit of {max_pixels} pixels"
                raise ImageError("pixel_bomb", f"its pictures together have more than {limit}")
    except (ValueError, LookupError, struct.error) as error:
        raise ImageError("truncated", f"{image_format} is truncated or damaged: {error}") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError("pixel_bomb", f"{width}x{height} pixels, the limit is {max_pixels} pixels")


def _is_upright(payload: bytes) -> bool:
    """Return True for a JPEG that has no EXIF orientation, or the upright one.

    EXIF and XMP are in segments before the first scan.
    """
    position = 2
    while payload[position : position + 1] == b"\xff":
        marker = payload[position + 1 : position + 2]
        if marker == _START_OF_SCAN:
            return True
        if marker == _METADATA:
            return _orientation_is_upright(payload)
        position += 2 + int.from_bytes(payload[position + 2 : position + 4])
    return False  # the header is unusual


def _orientation_is_upright(payload: bytes) -> bool:
    try:
        exif = Image.open(io.BytesIO(payload), formats=["JPEG"]).getexif()
        return bool(exif.get(_ORIENTATION, 1) == 1)
    except MemoryError:
        raise
    except Exception:
        return False


def image_array(image: Image.Image, contract: ImageContract) -> NDArray[np.uint8]:
    """Convert an image of any mode and size to (size_px, size_px, channels) uint8 in [0, 255]."""
    resized = _fit(flatten(image, contract.channels), contract)
    return np.frombuffer(resized.tobytes(), dtype=np.uint8).reshape(contract.shape)


def array_from_bytes(payload: bytes, contract: ImageContract) -> NDArray[np.uint8]:
    """Decode an image to (size_px, size_px, channels) uint8. Raises ImageError if unreadable."""
    return array_and_values(payload, contract)[0]


def array_and_values(payload: bytes, contract: ImageContract) -> "tuple[NDArray[np.uint8], Values]":
    """Decode an image, and return its array with the values that the user's transform returned.

    The array is (size_px, size_px, channels) uint8. Without a transform the values are {}. Raises
    ImageError if the image is unreadable, with the rule `transform_failed` if the transform fails.
    """
    pixels = _decode_fast(payload, contract.max_pixels)
    if pixels is None:
        image = decode_with_pillow(payload, contract.max_pixels).image
    else:
        array = None if contract.transform else _exact_size(pixels, contract)
        if array is not None:
            return array, {}
        image = _as_image(pixels)
    if contract.transform is None:
        return image_array(image, contract), {}
    from slipway.inputs import user_function

    made, values = user_function.run(contract.transform.function, contract.transform.sha256, image)
    try:
        return image_array(made, contract), values
    except MemoryError:
        raise
    except Exception as error:
        detail = (
            f"{contract.transform.function} returned an image of mode {made.mode}, which cannot "
            f"become RGB: {error}"
        )
        raise ImageError("transform_failed", detail) from error


def _exact_size(pixels: NDArray[np.uint8], contract: ImageContract) -> NDArray[np.uint8] | None:
    """Return pixels (size_px, size_px, channels) if they need no resizing or conversion; or None.

    This spares the slow way through a Pillow image.
    """
    size = (contract.size_px, contract.size_px)
    if contract.channels == 1:
        return pixels[:, :, np.newaxis] if pixels.shape == size else None
    if pixels.ndim == 3 and pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels[:, :, :3])
    return None


def load_transform(contract: ImageContract) -> None:
    """Import the contract's transform, if it has one.

    Raises UnavailableError if it cannot be imported, IntegrityError if its code has another digest.
    """
    if contract.transform is not None:
        from slipway.inputs import user_function

        user_function.load(contract.transform.function, contract.transform.sha256)


def flatten(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image of any mode to grey (1 channel) or RGB (3).

    16-bit values become 8-bit, and transparent pixels become white.
    """
    image = _in_plain_mode(image)
    if image.mode in ("I", "I;16"):
        image = Image.fromarray(
            (np.asarray(image, dtype=np.uint32).clip(0, _MAX_UINT16) // 257).astype(np.uint8)
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
