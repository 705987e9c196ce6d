"""One sample after the other: read, decode, measure, and note which rules it breaks. This runs in the worker processes.

A block of samples becomes one Arrow batch of facts, so that neither the way between the processes nor a million rows in memory
cost Python objects.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from PIL import Image

from slipway.config.sections import CleanParams
from slipway.data.images.quality import THUMBNAIL_PX, Quality, grey, measure, quality
from slipway.data.rules import rules
from slipway.data.sources.file_signatures import looks_like
from slipway.data.sources.samples import Fault, RawSample, loaded
from slipway.inputs.images import (
    UNKNOWN,
    PixelBuffer,
    decode_jpeg,
    decode_jpeg_grey,
    decode_jpeg_pixels,
    decode_with_pillow,
    flatten,
    read_jpeg_header,
)
from slipway.system.errors import ImageError

FACTS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("target", pa.float64()),
        pa.field("group", pa.string()),
        pa.field("time", pa.float64()),
        pa.field("weight", pa.float64()),
        pa.field("given_split", pa.string()),
        pa.field("corrections", pa.list_(pa.string()), nullable=False),
        pa.field("rule", pa.string()),  # under which it is refused; null: not refused by itself
        pa.field("detail", pa.string()),
        pa.field(
            "flags", pa.list_(pa.string()), nullable=False
        ),  # rules that it breaks and that only flag
        pa.field("flag_details", pa.list_(pa.string()), nullable=False),
        pa.field("width", pa.int32()),  # this and all below: null where nothing could be decoded
        pa.field("height", pa.int32()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.binary(32)),  # null only where there are no bytes
        pa.field(
            "pixels", pa.binary(16)
        ),  # digest of size and pixels; null of a JPEG of which only the luma was decoded
        pa.field("thumbnail", pa.binary(THUMBNAIL_PX**2)),
    ]
)
PIXELS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.binary(32)),
        pa.field("pixels", pa.binary(16)),
    ]
)
_SMALLEST_GREY_PX = (
    1 << 14
)  # of a JPEG smaller than this all colours are decoded at once: luma alone would save little
_EXTENSIONS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    ".png": "PNG",
    ".webp": "WEBP",
    **{
        f".{name}": name.upper()
        for name in ("gif", "heic", "avif", "svg", "ico", "psd", "pdf", "txt", "csv", "json", "mp4")
    },
}
_TURNS = {
    2: "mirrored",
    3: "turned by 180",
    4: "mirrored upside down",
    5: "mirrored and turned by 270",
    6: "turned by 90",
    7: "mirrored and turned by 90",
    8: "turned by 270",
}


@dataclass(frozen=True)
class PixelDigester:
    """Picklable function from inspected samples to a batch of PIXELS."""

    max_pixels: int

    def __call__(self, samples: list[RawSample]) -> pa.RecordBatch:
        """Digest all pixels of a block of samples; null if an image can no longer be decoded."""
        buffer = PixelBuffer()
        rows = [
            (sample.source, *self._digests(loaded(sample).payload, buffer)) for sample in samples
        ]
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), PIXELS, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=PIXELS)

    def _digests(self, payload: bytes, buffer: PixelBuffer) -> tuple[bytes, bytes | None]:
        try:
            array = decode_jpeg(payload, self.max_pixels, buffer)
        except ImageError:
            array = None
        return hashlib.sha256(payload).digest(), None if array is None else _digest(array, "")


@dataclass(frozen=True)
class Inspector:
    """Picklable function from samples to a batch of FACTS."""

    params: CleanParams
    classes: frozenset[str] | None

    def __call__(self, samples: list[RawSample]) -> pa.RecordBatch:
        """Inspect a block of samples, in order."""
        buffer = PixelBuffer()
        columns = zip(*(self._facts(loaded(sample), buffer) for sample in samples), strict=True)
        return pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, FACTS, strict=True)],
            schema=FACTS,
        )

    def _facts(self, sample: RawSample, buffer: PixelBuffer) -> tuple[Any, ...]:
        found = _Found(sample.fault)
        if found.fault is None:
            found = self._inspect(sample, buffer)
        said = (
            sample.source,
            sample.label,
            sample.target,
            sample.group,
            sample.time,
            sample.weight,
            sample.given_split,
        )
        num_bytes, sha256 = (
            (len(sample.payload), hashlib.sha256(sample.payload).digest())
            if sample.payload
            else (None, None)
        )
        rule, detail = found.fault or (None, None)
        flags, flag_details = (
            [flag.rule for flag in found.flags],
            [flag.detail for flag in found.flags],
        )
        measured = (found.width, found.height, num_bytes, sha256, found.pixels, found.thumbnail)
        return (
            *said,
            [*sample.corrections, *found.corrections],
            rule,
            detail,
            flags,
            flag_details,
            *measured,
        )

    def _inspect(self, sample: RawSample, buffer: PixelBuffer) -> "_Found":
        try:
            picture = _decode(sample.payload, self.params.max_pixels, buffer)
        except ImageError as error:
            looks = (
                f"; it looks like {looks_like(sample.payload)}"
                if error.detail.startswith(UNKNOWN)
                else ""
            )
            return _Found(Fault(error.rule, error.detail + looks))
        sampled, thumbnail = measure(picture.shown)
        broken = list(self._broken(sample, picture, sampled))
        refusing = [
            fault for fault in broken if rules.action(fault.rule, self.params.rules) == "refuse"
        ]
        flags = tuple(
            fault for fault in broken if rules.action(fault.rule, self.params.rules) == "flag"
        )
        turned = (f"exif: {_TURNS[picture.orientation]}",) if picture.orientation in _TURNS else ()
        fault = refusing[0] if refusing else None
        return _Found(
            fault, flags, turned, picture.width, picture.height, picture.digest, thumbnail.tobytes()
        )

    def _broken(self, sample: RawSample, picture: "_Picture", sampled: Quality) -> Iterator[Fault]:
        """Yield every rule that the sample breaks on its own, the most serious first."""
        shorter, longer = sorted((picture.width, picture.height))
        if (
            self.classes is not None
            and sample.label is not None
            and sample.label not in self.classes
        ):
            yield Fault(
                "unknown_label",
                f"the class is {sample.label!r}, data.classes has {len(self.classes)} others",
            )
        if shorter < self.params.min_side_px:
            yield Fault(
                "too_small", f"{picture.size}, clean.min_side_px is {self.params.min_side_px}"
            )
        if longer > self.params.max_aspect * shorter:
            yield Fault(
                "odd_aspect",
                f"{picture.size}, a ratio of {longer / shorter:.1f}, clean.max_aspect is {self.params.max_aspect:g}",
            )
        ending = os.path.splitext(sample.source)[1].lower()
        if _EXTENSIONS.get(ending, picture.image_format) != picture.image_format:
            yield Fault(
                "wrong_extension",
                f"the name ends in {ending}, the content is {picture.image_format}",
            )
        if _is_suspect(sampled, self.params):
            yield from _poor(quality(grey(picture.shown)), self.params)


def _is_suspect(sampled: Quality, params: CleanParams) -> bool:
    return any(True for _ in _poor(sampled, params))


def _poor(found: Quality, params: CleanParams) -> Iterator[Fault]:
    if found.std < params.constant_std:
        yield Fault(
            "constant_image",
            f"grey levels spread by {found.std:.2f}, clean.constant_std is {params.constant_std:g}",
        )
    elif found.laplacian is not None and found.laplacian < params.blur_variance:
        yield Fault(
            "blurred",
            f"the Laplacian's variance is {found.laplacian:.1f}, clean.blur_variance is {params.blur_variance:g}",
        )
    if found.mean < params.dark_mean:
        yield Fault(
            "too_dark",
            f"a mean grey level of {found.mean:.1f}, clean.dark_mean is {params.dark_mean:g}",
        )
    if found.mean > params.bright_mean:
        yield Fault(
            "too_bright",
            f"a mean grey level of {found.mean:.1f}, clean.bright_mean is {params.bright_mean:g}",
        )


class _Found(NamedTuple):
    fault: Fault | None
    flags: tuple[Fault, ...] = ()
    corrections: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    pixels: bytes | None = None
    thumbnail: bytes | None = None


class _Picture(NamedTuple):
    shown: NDArray[
        np.uint8
    ]  # (H, W) grey or (H, W, 4) RGBA as it is seen, transparency laid over white
    digest: bytes | None
    width: int
    height: int
    image_format: str
    orientation: int

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height} pixels"


def _decode(payload: bytes, max_pixels: int, buffer: PixelBuffer) -> _Picture:
    header = read_jpeg_header(payload, max_pixels)
    if header is not None:
        if header.has_luma and header.width * header.height >= _SMALLEST_GREY_PX:
            array, digest = decode_jpeg_grey(payload, header, buffer), None
        else:
            array = decode_jpeg_pixels(payload, header, buffer)
            digest = None if array is None else _digest(array, "")
        if array is not None:
            return _Picture(array, digest, header.width, header.height, "JPEG", 1)
    image, image_format, orientation = decode_with_pillow(payload, max_pixels)
    return _Picture(*_shown_and_digest(image), image.width, image.height, image_format, orientation)


def _shown_and_digest(image: Image.Image) -> tuple[NDArray[np.uint8], bytes]:
    if image.mode in ("L", "1"):
        array = np.asarray(image.convert("L"))
        return array, _digest(array, "")
    if image.mode in (
        "I",
        "I;16",
    ):  # 16 bits: two pictures may differ in what 8 of them do not show
        return np.asarray(flatten(image, 1)), _digest(np.asarray(image).astype(np.uint16), "I;16")
    array = np.asarray(image.convert("RGBA"))
    shown = np.asarray(flatten(image, 1)) if image.has_transparency_data else array
    return shown, _digest(array, "")


def _digest(array: NDArray[Any], mode: str) -> bytes:
    """Digest size, channels and values: equal for equal pixels in any format."""
    seed = xxhash.xxh3_64_intdigest(f"{array.shape} {mode}".encode())
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).data, seed=seed)
