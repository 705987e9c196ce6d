"""Data of `bench.ladder`: images and frames in class folders, expensive functions, stores."""

import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from bench.precompute import photograph
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.sources.samples import RawSample
from slipway.data.store.packing import pack
from slipway.data.store.store_form import store_form
from slipway.system import files
from tests.project_params import PROJECT, augment_params

SIZE_PX, NUM_CLASSES, MAX_PIXELS = 32, 10, 10**6
NUM_ROWS = {"train": 256, "val": 32, "test": 32}
FRAME_PX = (640, 360)  # width, height
MARGIN = 0.3  # of the object, on each side
_DETECTED = 4  # times smaller than the frame


@dataclass(frozen=True)
class DataSet:
    """Files of a row of the ladder, and how they become the network's inputs."""

    folder: str
    transform: str | None  # as in params.yaml
    resize_mode: str
    augment: dict[str, Any]


_CROPS = {"crop_padding_px": 4, "horizontal_flip": 0.5}
_TURNS = {"rotation_deg": 10.0, "scale": [0.9, 1.1], "translation": 0.05}
DATA_SETS = {
    "plain": DataSet("images", None, "stretch", _CROPS),
    "denoised": DataSet("images", "bench.ladder_data:denoise", "stretch", _CROPS),
    "video": DataSet("frames", "bench.ladder_data:cut_out", "pad", _TURNS),
}


def denoise(image: Image.Image) -> Image.Image:
    """Denoise by non-local means (Buades et al. 2005), patches of 5 px, window of 11 px: slow."""
    cv2.setNumThreads(1)
    return Image.fromarray(
        cv2.fastNlMeansDenoisingColored(np.asarray(image.convert("RGB")), None, 5, 5, 5, 11)
    )


def cut_out(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    """Cut the object out of a frame, with a margin of 30 % and black outside its hull.

    GrabCut (Rother et al. 2004) detects it in a smaller copy of the frame; its landmarks are the
    corners of the hull, refined in the whole frame.
    """
    cv2.setNumThreads(1)
    cv2.setRNGSeed(0)
    pixels = np.asarray(image.convert("RGB"))
    outline = _detect(pixels)
    if outline is None:
        return image, {"found": False, "corners": 0}
    hull = cv2.convexHull(outline)
    rough = cv2.approxPolyDP(hull, 0.015 * cv2.arcLength(hull, True), True).astype(np.float32)
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    stop = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_COUNT, 20, 0.05)
    landmarks = cv2.cornerSubPix(grey, rough, (5, 5), (-1, -1), stop)
    inside = np.zeros(pixels.shape[:2], np.uint8)
    cv2.fillConvexPoly(inside, cv2.convexHull(landmarks).round().astype(np.int32), 255)
    left, top, width, height = cv2.boundingRect(landmarks)
    margin = round(MARGIN * max(width, height))
    box = (left - margin, top - margin, left + width + margin, top + height + margin)
    masked = Image.fromarray(cv2.bitwise_and(pixels, pixels, mask=inside))
    return masked.crop(box), {"found": True, "corners": len(landmarks)}


def _detect(pixels: NDArray[np.uint8]) -> NDArray[np.int32] | None:
    """Return the outline of the largest foreground object in pixels of the frame, or None."""
    height, width = (side // _DETECTED for side in pixels.shape[:2])
    small = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    mask = np.zeros((height, width), np.uint8)
    models = np.zeros((1, 65)), np.zeros((1, 65))
    frame = (2, 2, width - 4, height - 4)
    cv2.grabCut(small, mask, frame, *models, 2, cv2.GC_INIT_WITH_RECT)
    is_object = np.isin(mask, (cv2.GC_FGD, cv2.GC_PR_FGD)).astype(np.uint8)
    outlines, _ = cv2.findContours(is_object, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    largest = max(outlines, key=cv2.contourArea, default=None)
    return None if largest is None else np.asarray(largest * _DETECTED, np.int32)


def video_frame(num_corners: int, seed: int) -> NDArray[np.uint8]:
    """Make a frame, (360, 640, 3) uint8, with a bright polygon on an uneven, noisy ground."""
    generator = np.random.default_rng(seed)
    width, height = FRAME_PX
    coarse = generator.integers(40, 110, (9, 16, 3), dtype=np.uint8)
    pixels = np.asarray(cv2.resize(coarse, FRAME_PX, interpolation=cv2.INTER_CUBIC), np.uint8)
    pixels += generator.integers(0, 20, pixels.shape, dtype=np.uint8)
    centre = generator.integers([120, 110], [width - 120, height - 110])
    angles = generator.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(num_corners) / num_corners
    radius = generator.integers(60, 90)
    corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    inside = np.zeros(pixels.shape[:2], np.uint8)
    cv2.fillConvexPoly(inside, corners.round().astype(np.int32), 255)
    surface = generator.integers(150, 230, 3) + generator.integers(-25, 25, pixels.shape)
    pixels[inside > 0] = surface[inside > 0]
    return pixels


def write_images(folder: Path) -> None:
    """Write a folder for each split, with JPEGs of 400x300 in a folder for each class."""
    for path, number in _places(folder, ".jpg"):
        files.write_bytes(path, photograph(number))


def write_frames(folder: Path) -> None:
    """Write PNGs of 640x360 likewise; a class is a number of corners."""
    for path, number in _places(folder, ".png"):
        frame = video_frame(3 + int(path.parent.name), number)
        files.write_bytes(path, cv2.imencode(".png", frame)[1].tobytes())


def _places(folder: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """Yield the paths that do not exist yet, and a number for each."""
    for split, num_rows in NUM_ROWS.items():
        for number in range(num_rows):
            path = folder / split / str(number % NUM_CLASSES) / f"{number:04}{suffix}"
            if not path.exists():
                yield path, 1000 * len(split) + number


def pack_images(images: Path, folder: Path, made: DataSet) -> None:
    """Pack these images and a plan of their augmentation."""
    changes = {
        "image_size_px": SIZE_PX,
        "channels": 3,
        "resize_mode": made.resize_mode,
        "transform": made.transform,
    }
    form = store_form(PROJECT.precompute.model_copy(update=changes), MAX_PIXELS)
    samples = list(_samples(images))
    payloads = {sample.source: sample for sample in samples}
    rows = pa.Table.from_pylist([_row(sample) for sample in samples], schema=SPLIT_ROWS)

    def read(wanted: Collection[str]) -> Iterator[RawSample]:
        return (payloads[source] for source in wanted)

    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for _ in pack(read, rows, form, "image_classification", work, 0):
        pass
    files.move_directory(work / "store", folder / "packed")
    write_plan(
        folder / "augmented",
        plan_from_params(augment_params(**made.augment), PROJECT.seed),
    )


def _samples(images: Path) -> Iterator[RawSample]:
    for path in sorted(images.rglob("*.*")):
        yield RawSample(
            path.relative_to(images).as_posix(),
            path.read_bytes(),
            path.parent.name,
            None,
            None,
            None,
        )


def _row(sample: RawSample) -> dict[str, object]:
    sha256 = files.sha256_bytes(sample.payload)
    nothing = dict.fromkeys(SPLIT_ROWS.names)
    split = sample.source.partition("/")[0]
    width, height = Image.open(io.BytesIO(sample.payload)).size
    facts = {
        "id": sha256[:32],
        "source": sample.source,
        "label": sample.label,
        "width": width,
        "height": height,
    }
    return (
        nothing
        | facts
        | {
            "bytes": len(sample.payload),
            "sha256": sha256,
            "flags": [],
            "corrections": [],
            "split": split,
            "leaked": False,
        }
    )
