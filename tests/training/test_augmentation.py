"""Augmentation on batches: dtype, shape and range kept, identity exact, neighbours without influence."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipway.data.augmentation import AugmentPlan, Draw, affine_matrices, matrices
from slipway.training.augmentation import augment_batch

PLAN = AugmentPlan(
    format_version=1, seed=7, rotation_deg=20, scale=(0.8, 1.2), crop_padding_px=2, horizontal_flip=0.5, vertical_flip=0.5, offline=None
)


def batch(count: int, size_px: int, channels: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, size_px, size_px, channels), dtype=np.uint8))


def keys(count: int) -> Any:
    return np.random.default_rng(1).integers(0, 2**64, count, dtype=np.uint64)


def changed(images: Tensor, **values: Any) -> Tensor:
    """The same change for every image."""
    neutral: dict[str, Any] = {
        "rotation_deg": 0.0,
        "scale": 1.0,
        "shift_x_px": 0,
        "shift_y_px": 0,
        "horizontal_flip": False,
        "vertical_flip": False,
    }
    draw = Draw(**{name: np.full(len(images), value) for name, value in {**neutral, **values}.items()})
    return augment_batch(images, torch.from_numpy(affine_matrices(draw, images.shape[1])))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size_px", [4, 16, 17, 32, 100, 224])
def test_the_identity_gives_back_the_same_pixels(size_px: int, channels: int) -> None:
    images = batch(9, size_px, channels)
    assert torch.equal(changed(images), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_dtype_shape_and_layout_are_kept(channels: int) -> None:
    images = batch(70, 16, channels)
    result = augment_batch(images, torch.from_numpy(matrices(PLAN, 0, keys(70), 16)))
    assert (result.dtype, result.shape, result.is_contiguous()) == (torch.uint8, images.shape, True)
    assert not torch.equal(result, images)


@pytest.mark.parametrize("value", [0, 1, 254, 255])
def test_a_uniform_image_stays_as_it_is(value: int) -> None:
    images = torch.full((50, 16, 16, 3), value, dtype=torch.uint8)
    assert torch.equal(augment_batch(images, torch.from_numpy(matrices(PLAN, 0, keys(50), 16))), images)


def test_flips_are_exact() -> None:
    images = batch(5, 15, 3)
    assert torch.equal(changed(images, horizontal_flip=True), images.flip(2))
    assert torch.equal(changed(images, vertical_flip=True), images.flip(1))


@pytest.mark.parametrize(("x", "y"), [(2, 0), (0, 3), (-1, 2), (-3, -3)])
def test_a_shift_moves_whole_pixels_and_repeats_the_border(x: int, y: int) -> None:
    images = batch(5, 16, 3)
    from_row, from_column = (np.arange(16) - y).clip(0, 15), (np.arange(16) - x).clip(0, 15)
    assert torch.equal(changed(images, shift_x_px=x, shift_y_px=y), images[:, from_row][:, :, from_column])


@pytest.mark.parametrize(("rotation_deg", "quarter_turns"), [(90, 1), (180, 2), (-90, -1)])
def test_a_quarter_turn_is_exact_and_counter_clockwise(rotation_deg: int, quarter_turns: int) -> None:
    images = batch(5, 16, 3)
    assert torch.equal(changed(images, rotation_deg=float(rotation_deg)), torch.rot90(images, quarter_turns, (1, 2)))


def test_enlarging_keeps_the_middle_and_loses_the_border() -> None:
    image = torch.zeros(1, 16, 16, 1, dtype=torch.uint8)
    image[:, 6:10, 6:10] = 255
    mean = float(image.float().mean())
    assert float(changed(image, scale=2.0).float().mean()) == pytest.approx(4 * mean, rel=0.15)
    assert float(changed(image, scale=0.5).float().mean()) == pytest.approx(mean / 4, rel=0.15)


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    images, changes = batch(150, 16, 3), torch.from_numpy(matrices(PLAN, 2, keys(150), 16))
    together = augment_batch(images, changes)
    for part in (slice(0, 1), slice(7, 12), slice(100, 150)):
        assert torch.equal(augment_batch(images[part], changes[part]), together[part])


def test_an_empty_batch_stays_empty() -> None:
    assert augment_batch(batch(0, 16, 3), torch.zeros(0, 2, 3)).shape == (0, 16, 16, 3)


@pytest.mark.parametrize(
    ("images", "changes"),
    [(torch.zeros(2, 8, 8, 3), torch.zeros(2, 2, 3)), (batch(2, 8, 3), torch.zeros(3, 2, 3)), (batch(2, 8, 3)[0], torch.zeros(8, 2, 3))],
)
def test_what_is_no_batch_of_pixels_is_refused(images: Tensor, changes: Tensor) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        augment_batch(images, changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_the_same_pixels_within_one_grey_level() -> None:
    images, changes = batch(64, 32, 3), torch.from_numpy(matrices(PLAN, 0, keys(64), 32))
    on_gpu = augment_batch(images.cuda(), changes.cuda())
    assert on_gpu.device.type == "cuda"
    assert (on_gpu.cpu().int() - augment_batch(images, changes).int()).abs().max() <= 1
