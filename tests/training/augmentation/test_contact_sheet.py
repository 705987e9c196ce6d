"""Tests of the contact sheet: a picture is drawn for any plan, task and number of images."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.data.augmentation.plan import (
    NEUTRAL,
    AugmentPlan,
    operations,
    plan_from_params,
    without_operations,
)
from slipway.data.store.packed import PackedManifest, TargetScale
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.system import files
from slipway.training.augmentation.contact_sheet import TITLE_PX, contact_sheet
from tests.data.augmentation.test_plan import ON
from tests.data.pictures import pixels
from tests.packed_rows import packed_split
from tests.project_params import augment_params

FLIP = plan_from_params(augment_params(horizontal_flip=0.5), seed=7)


def sheet(
    num_images: int, plan: AugmentPlan, channels: int = 1, task: Any = "image_classification"
) -> Image.Image:
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=8,
        channels=3 if channels == 3 else 1,
        resize_mode="stretch",
        interpolation="nearest",
        max_pixels=100,
    )
    train = packed_split(
        np.stack([pixels(seed, 8, channels) for seed in range(num_images)]),
        targets=np.arange(num_images, dtype=np.float64),
        ids=[files.sha256_bytes(str(seed).encode())[:32] for seed in range(num_images)],
        sources=[str(seed) for seed in range(num_images)],
    )
    manifest = PackedManifest(
        format_version=3,
        task=task,
        input=contract,
        classes=[f"class {index}" for index in range(num_images)]
        if task == "image_classification"
        else [],
        mean=[0.5] * channels,
        std=[0.5] * channels,
        target_scale=None if task == "image_classification" else TargetScale(mean=0, std=1),
        splits={},
    )
    return Image.open(io.BytesIO(contact_sheet(train, plan, manifest)))


@pytest.mark.process
def test_the_contact_sheet_has_a_line_for_each_operation() -> None:
    everything = plan_from_params(augment_params(**ON), seed=7)
    nothing = without_operations(everything)
    line = sheet(3, FLIP, 3).height - sheet(3, nothing, 3).height
    alone = {name: nothing.model_copy(update={name: getattr(everything, name)}) for name in NEUTRAL}
    for plan in alone.values():
        assert sheet(3, plan, 3).height - sheet(3, nothing, 3).height == line
    assert sheet(3, everything, 3).height == sheet(3, FLIP, 3).height + (
        len(operations(everything)) - 1
    ) * (line - TITLE_PX)


@pytest.mark.process
def test_each_line_of_the_contact_sheet_shows_its_operation_change_the_image() -> None:
    pictures = {
        name: np.asarray(sheet(3, plan_from_params(augment_params(**{name: ON[name]}), seed=7), 3))
        for name in ON
    }
    assert len({picture.tobytes() for picture in pictures.values()}) == len(ON)


def test_a_contact_sheet_of_one_image_can_be_drawn() -> None:
    assert sheet(1, plan_from_params(augment_params(**ON), seed=7)).format == "PNG"


def test_the_contact_sheet_of_grey_images_has_no_line_for_colour_operations() -> None:
    hue = plan_from_params(augment_params(hue=0.1), seed=7)
    assert sheet(3, hue, 1).height < sheet(3, hue, 3).height


def test_contact_sheet_of_a_table_states_that_tables_are_not_augmented() -> None:
    manifest = PackedManifest(
        format_version=3,
        task="table_regression",
        input=ColumnContract(kind="columns", columns=[]),
        classes=[],
        mean=[],
        std=[],
        target_scale=TargetScale(mean=0, std=1),
        splits={},
    )
    picture = Image.open(
        io.BytesIO(
            contact_sheet(
                packed_split(np.zeros((2, 3)), [0, 1], ["00", "01"], ["a", "b"]), FLIP, manifest
            )
        )
    )
    assert picture.format == "PNG"
    assert np.asarray(picture).min() < 100  # ink


@pytest.mark.process
def test_a_contact_sheet_shows_at_most_eight_images() -> None:
    assert sheet(8, FLIP).size == sheet(50, FLIP, task="image_regression").size
