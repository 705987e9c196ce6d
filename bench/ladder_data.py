"""Data of `bench.ladder`: JPEGs in class folders, packed images, the expensive function."""

from collections.abc import Collection, Iterator
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
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


def denoise(image: Image.Image) -> Image.Image:
    """Denoise by non-local means (Buades et al. 2005), patches of 5 px, window of 11 px: slow."""
    cv2.setNumThreads(1)
    return Image.fromarray(
        cv2.fastNlMeansDenoisingColored(np.asarray(image.convert("RGB")), None, 5, 5, 5, 11)
    )


def write_images(folder: Path) -> None:
    """Write a folder for each split, with JPEGs of 400x300 in a folder for each class."""
    for split, num_rows in NUM_ROWS.items():
        for number in range(num_rows):
            path = folder / split / str(number % NUM_CLASSES) / f"{number:04}.jpg"
            if not path.exists():
                files.write_bytes(path, photograph(1000 * len(split) + number))


def pack_images(images: Path, folder: Path, transform: str | None) -> None:
    """Pack these images, with the user's function if given, and a plan of flips and crops."""
    changes = {
        "image_size_px": SIZE_PX,
        "channels": 3,
        "resize_mode": "stretch",
        "transform": transform,
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
        plan_from_params(augment_params(crop_padding_px=4, horizontal_flip=0.5), PROJECT.seed),
    )


def _samples(images: Path) -> Iterator[RawSample]:
    for path in sorted(images.rglob("*.jpg")):
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
    facts = {
        "id": sha256[:32],
        "source": sample.source,
        "label": sample.label,
        "width": 400,
        "height": 300,
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
