"""Inspects images in worker processes: reads, decodes and measures them, and checks rules.

Each block of samples becomes one Arrow batch of facts, which is cheap to send between processes and
to hold for a million rows, unlike Python objects.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.label_sets import labels_in
from slipway.config.sections import CleanParams
from slipway.data.images.quality import THUMBNAIL_PX, Quality, grey, measure, quality
from slipway.data.rules import rules
from slipway.data.sources.samples import Fault, RawSample, loaded, looks_like
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
        pa.field("rule", pa.string()),  # the rule that refuses the sample on its own, if any
        pa.field("detail", pa.string()),
        # The broken rules that only flag.
        pa.field("flags", pa.list_(pa.string()), nullable=False),
        pa.field("flag_details", pa.list_(pa.string()), nullable=False),
        # The columns below are null if the image could not be decoded.
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.binary(32)),  # null only if there are no bytes
        # Digest of size and pixels; null for a JPEG of which only the luma was decoded.
        pa.field("pixels", pa.binary(16)),
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
# A smaller JPEG is decoded in colour at once, because decoding only the luma would save little.
_SMALLEST_GREY_PX = 1 << 14
_SIXTEEN_BITS = ("I", "I;16")
OF_16_BITS = "of 65535: it uses"
_OF_DARKNESS = ("constant_image", "too_dark")
_NARROW = 65535 // 4  # the highest value of an image that uses a quarter of 16 bits
_EXTENSIONS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    ".png": "PNG",
    ".webp": "WEBP",
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIF"),
    **{
        f".{name}": name.upper()
        for name in ("gif", "avif", "svg", "ico", "psd", "pdf", "txt", "csv", "json", "mp4")
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
    """A picklable function that digests all pixels of samples that passed inspection."""

    max_pixels: int

    def __call__(self, samples: list[RawSample]) -> pa.RecordBatch:
        """Return a batch of PIXELS for samples; null if an image can no longer be decoded."""
        buffer = PixelBuffer()
        rows = [self._digests(loaded(sample), buffer) for sample in samples]
        return pa.RecordBatch.from_pylist(rows, PIXELS)

    def _digests(self, sample: RawSample, buffer: PixelBuffer) -> dict[str, Any]:
        digests: dict[str, Any] = {"sha256": hashlib.sha256(sample.payload).digest()}
        with suppress(ImageError):
            array = decode_jpeg(sample.payload, self.max_pixels, buffer)
            digests["pixels"] = None if array is None else _digest(array, "")
        return {"source": sample.source, **digests}


@dataclass(frozen=True)
class Inspector:
    """A picklable function that decodes samples and returns their facts as a batch of FACTS.

    It can be pickled, so that other processes can call it.
    """

    params: CleanParams
    classes: frozenset[str] | None
    several: bool = False  # labels of samples are sets

    def __call__(self, samples: list[RawSample]) -> pa.RecordBatch:
        buffer = PixelBuffer()
        rows = [self._facts(loaded(sample), buffer) for sample in samples]
        return pa.RecordBatch.from_pylist(rows, FACTS)

    def _facts(self, sample: RawSample, buffer: PixelBuffer) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "source": sample.source,
            "label": sample.label,
            "target": sample.target,
            "group": sample.group,
            "time": sample.time,
            "weight": sample.weight,
            "given_split": sample.given_split,
            "corrections": list(sample.corrections),
            "flags": [],
            "flag_details": [],
        }
        if sample.payload:
            digest = hashlib.sha256(sample.payload).digest()
            facts |= {"bytes": len(sample.payload), "sha256": digest}
        fault = sample.fault or self._inspect(sample, buffer, facts)
        return facts | fault._asdict() if fault else facts

    def _inspect(
        self, sample: RawSample, buffer: PixelBuffer, facts: dict[str, Any]
    ) -> Fault | None:
        """Decode a sample, and append measures of its pixels to `facts`.

        Returns the fault for which the sample is refused, or None.
        """
        try:
            picture = _decode(sample.payload, self.params.max_pixels, buffer)
        except ImageError as error:
            is_unknown = error.detail.startswith(UNKNOWN)
            looks = f"; it looks like {looks_like(sample.payload)}" if is_unknown else ""
            return Fault(error.rule, error.detail + looks)
        sampled, thumbnail = measure(picture.shown)
        facts |= {
            "width": picture.width,
            "height": picture.height,
            "pixels": picture.digest,
            "thumbnail": thumbnail.tobytes(),
        }
        if picture.orientation in _TURNS:
            facts["corrections"].append(f"exif: {_TURNS[picture.orientation]}")
        refusing, narrow = None, ""
        for fault in self._faults(sample, picture, sampled):
            narrow = f"; {fault.detail}" if fault.rule == "narrow_range" else narrow
            if fault.rule in _OF_DARKNESS:
                fault = fault._replace(detail=fault.detail + narrow)
            action = rules.action(fault.rule, self.params.rules)
            if action == "refuse":
                refusing = refusing or fault
            elif action == "flag":
                facts["flags"].append(fault.rule)
                facts["flag_details"].append(fault.detail)
        return refusing

    def _faults(self, sample: RawSample, picture: "_Picture", sampled: Quality) -> Iterator[Fault]:
        """Yield every rule that the sample breaks by itself, the most serious rule first."""
        params = self.params
        if picture.highest is not None and picture.highest <= _NARROW:
            yield Fault(
                "narrow_range",
                f"its highest value is {picture.highest} {OF_16_BITS} "
                f"{picture.highest / 65535:.0%} of its range",
            )
        shorter, longer = sorted((picture.width, picture.height))
        label, classes = sample.label, self.classes
        if classes is not None and label is not None:
            labels = labels_in(label) if self.several else [label]
            if unknown := [name for name in labels if name not in classes]:
                named = ", ".join(map(repr, unknown))
                yield Fault(
                    "unknown_label",
                    f"the class is {named}, which is not among the {len(classes)} of data.classes",
                )
        if shorter < params.min_side_px:
            yield Fault("too_small", f"{picture.size}, clean.min_side_px is {params.min_side_px}")
        if longer > params.max_aspect * shorter:
            yield Fault(
                "odd_aspect",
                f"{picture.size}, a ratio of {longer / shorter:.1f}, "
                f"clean.max_aspect is {params.max_aspect:g}",
            )
        ending = os.path.splitext(sample.source)[1].lower()
        if _EXTENSIONS.get(ending, picture.image_format) != picture.image_format:
            yield Fault(
                "wrong_extension",
                f"the name ends in {ending}, the content is {picture.image_format}",
            )
        # The sampled rows only raise a suspicion; all pixels decide.
        if any(_quality_faults(sampled, params)):
            yield from _quality_faults(quality(grey(picture.shown)), params)


def _quality_faults(found: Quality, params: CleanParams) -> Iterator[Fault]:
    if found.std < params.constant_std:
        yield Fault(
            "constant_image",
            f"grey levels spread by {found.std:.2f}, clean.constant_std is {params.constant_std:g}",
        )
    elif found.laplacian is not None and found.laplacian < params.blur_variance:
        yield Fault(
            "blurred",
            f"the Laplacian's variance is {found.laplacian:.1f}, "
            f"clean.blur_variance is {params.blur_variance:g}",
        )
    level = f"a mean grey level of {found.mean:.1f}"
    if found.mean < params.dark_mean:
        yield Fault("too_dark", f"{level}, clean.dark_mean is {params.dark_mean:g}")
    if found.mean > params.bright_mean:
        yield Fault("too_bright", f"{level}, clean.bright_mean is {params.bright_mean:g}")


class _Picture(NamedTuple):
    shown: NDArray[np.uint8]  # (H, W) grey or (H, W, 4) RGBA, upright, transparency over white
    digest: bytes | None
    width: int
    height: int
    image_format: str
    orientation: int
    highest: int | None = None  # value of an image of 16 bits

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
    highest = int(np.asarray(image).max()) if image.mode in _SIXTEEN_BITS else None
    shown, digest = _shown_and_digest(image)
    return _Picture(shown, digest, image.width, image.height, image_format, orientation, highest)


def _shown_and_digest(image: Image.Image) -> tuple[NDArray[np.uint8], bytes]:
    if image.mode in ("L", "1"):
        array = np.asarray(image.convert("L"))
        return array, _digest(array, "")
    if image.mode in _SIXTEEN_BITS:  # two images of 16 bits may differ only in the lower 8 bits
        return np.asarray(flatten(image, 1)), _digest(np.asarray(image).astype(np.uint16), "I;16")
    array = np.asarray(image.convert("RGBA"))
    shown = np.asarray(flatten(image, 1)) if image.has_transparency_data else array
    return shown, _digest(array, "")


def _digest(array: NDArray[Any], mode: str) -> bytes:
    """Digest the size, channels and values of an image; equal pixels give equal digests."""
    seed = xxhash.xxh3_64_intdigest(f"{array.shape} {mode}".encode())
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).data, seed=seed)
