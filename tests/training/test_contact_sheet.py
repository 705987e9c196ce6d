"""The contact sheet: a picture for any plan, task and number of images."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway import files
from slipway.data.augmentation import AugmentPlan
from slipway.data.packed import PackedManifest, TargetScale
from slipway.preprocess import ImageContract
from slipway.training.contact_sheet import contact_sheet
from tests.data.pictures import pixels
from tests.packed_rows import packed_split

FLIP = AugmentPlan(
    format_version=1, seed=7, rotation_deg=0, scale=(1, 1), crop_padding_px=0, horizontal_flip=0.5, vertical_flip=0, offline=None
)


def sheet(num_images: int, plan: AugmentPlan, channels: int = 1, task: Any = "image_classification") -> Image.Image:
    contract = ImageContract(
        kind="images", transform=None, size_px=8, channels=3 if channels == 3 else 1, fit="stretch", interpolation="nearest", max_pixels=100
    )
    train = packed_split(
        np.stack([pixels(seed, 8, channels) for seed in range(num_images)]),
        targets=np.arange(num_images, dtype=np.float64),
        ids=[files.sha256_bytes(str(seed).encode())[:32] for seed in range(num_images)],
        sources=[str(seed) for seed in range(num_images)],
    )
    manifest = PackedManifest(
        format_version=2,
        task=task,
        input=contract,
        classes=[f"class {index}" for index in range(num_images)] if task == "image_classification" else [],
        mean=[0.5] * channels,
        std=[0.5] * channels,
        target_scale=None if task == "image_classification" else TargetScale(mean=0, std=1),
        splits={},
    )
    return Image.open(io.BytesIO(contact_sheet(train, plan, manifest)))


def test_the_sheet_grows_with_images_and_operations() -> None:
    small, large = sheet(1, FLIP), sheet(2, FLIP.model_copy(update={"vertical_flip": 0.5}), channels=3)
    assert small.format == "PNG"
    assert large.width > small.width
    assert large.height > small.height


@pytest.mark.slow
def test_at_most_eight_images_are_shown() -> None:
    assert sheet(8, FLIP).size == sheet(50, FLIP, task="image_regression").size
