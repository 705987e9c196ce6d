"""Augmentation on the CPU and on a device: dtype, shape, range, identity, and equal results."""

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipway.data.augmentation.draws import Draw, MixDraw, crop_bounds, draw, draw_mixing, unchanged
from slipway.data.augmentation.plan import plan_from_params
from slipway.training.augmentation import host
from slipway.training.augmentation.batch import GREY, Changes, augment_batch, device_changes
from slipway.training.augmentation.host import StoredRows, changed_images, mixed_images
from tests.data.augmentation.test_plan import ON
from tests.project_params import augment_params

Pixels = NDArray[np.uint8]
Apply = Callable[[Pixels, Draw, int], Pixels]


def on_host(images: Pixels, change: Draw, size_px: int) -> Pixels:
    return changed_images(StoredRows([images]), np.arange(len(images)), change, size_px)


def on_device(images: Pixels, change: Draw, size_px: int, device: str = "cpu") -> Pixels:
    changes = device_changes(
        change, None, np.arange(len(images)), images.shape[1], size_px, images.shape[3]
    )
    moved: Changes = changes._replace(
        **{name: value.to(device) for name, value in changes._asdict().items() if value is not None}
    )
    result: Pixels = augment_batch(torch.from_numpy(images).to(device), moved).cpu().numpy()
    return result


BOTH = pytest.mark.parametrize("apply", [on_host, on_device])
PLAN = plan_from_params(augment_params(**ON), 7)


def batch(count: int, size_px: int, channels: int) -> Pixels:
    return np.random.default_rng(0).integers(
        0, 256, (count, size_px, size_px, channels), dtype=np.uint8
    )


def keys(count: int) -> Any:
    return np.random.default_rng(1).integers(0, 2**64, count, dtype=np.uint64)


def same(count: int, **values: Any) -> Draw:
    """Return the parameters of one change, repeated for `count` images."""
    return unchanged(count)._replace(
        **{name: np.array([value] * count) for name, value in values.items()}
    )


@BOTH
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size_px", [4, 16, 17, 32, 100])
def test_a_plan_without_operations_changes_no_pixel(
    apply: Apply, size_px: int, channels: int
) -> None:
    images = batch(9, size_px, channels)
    assert np.array_equal(apply(images, unchanged(9), size_px), images)


@BOTH
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored_px", [16, 24, 50])
def test_augmentation_keeps_dtype_and_layout_and_returns_the_networks_size(
    apply: Apply, stored_px: int, channels: int
) -> None:
    result = apply(batch(70, stored_px, channels), draw(PLAN, 0, keys(70)), 16)
    assert result.dtype == np.uint8
    assert result.shape == (70, 16, 16, channels)
    assert not np.array_equal(result[0], result[1])


@BOTH
@pytest.mark.parametrize("value", [0, 1, 254, 255])
@pytest.mark.parametrize("stored_px", [16, 23, 40])
def test_geometric_operations_do_not_change_a_uniform_image(
    apply: Apply, stored_px: int, value: int
) -> None:
    images = np.full((50, stored_px, stored_px, 3), value, dtype=np.uint8)
    off = {
        name: augment_params().model_dump()[name]
        for name in ("brightness", "contrast", "saturation", "hue", "erasing")
    }
    change = draw(plan_from_params(augment_params(**ON | off), 7), 0, keys(50))
    assert (apply(images, change, 16) == value).all()


@BOTH
def test_flips_mirror_every_pixel_exactly(apply: Apply) -> None:
    images = batch(5, 15, 3)
    assert np.array_equal(apply(images, same(5, horizontal_flip=True), 15), images[:, :, ::-1])
    assert np.array_equal(apply(images, same(5, vertical_flip=True), 15), images[:, ::-1])
    assert np.array_equal(
        apply(images, same(5, vertical_flip=True, horizontal_flip=True), 15), images[:, ::-1, ::-1]
    )


@BOTH
@pytest.mark.parametrize(("x", "y"), [(2, 0), (0, 3), (-1, 2), (-3, -3)])
@pytest.mark.parametrize("flip", [False, True])
def test_a_shift_moves_whole_pixels_and_repeats_the_border(
    apply: Apply, x: int, y: int, flip: bool
) -> None:
    images = batch(5, 16, 3)
    expected = images[:, ::-1, ::-1] if flip else images
    expected = expected[:, (np.arange(16) - y).clip(0, 15)][:, :, (np.arange(16) - x).clip(0, 15)]
    assert np.array_equal(
        apply(images, same(5, shift_px=[x, y], horizontal_flip=flip, vertical_flip=flip), 16),
        expected,
    )


@BOTH
@pytest.mark.parametrize(("rotation_deg", "quarter_turns"), [(90, 1), (180, 2), (-90, -1)])
def test_a_rotation_by_90_degrees_is_exact_and_counter_clockwise(
    apply: Apply, rotation_deg: int, quarter_turns: int
) -> None:
    images = batch(5, 16, 3)
    assert np.array_equal(
        apply(images, same(5, rotation_deg=float(rotation_deg)), 16),
        np.rot90(images, quarter_turns, (1, 2)),
    )


@BOTH
def test_enlarging_an_image_keeps_its_middle_and_cuts_off_its_border(apply: Apply) -> None:
    image = np.zeros((1, 16, 16, 1), dtype=np.uint8)
    image[:, 6:10, 6:10] = 255
    mean = float(image.mean())
    assert float(apply(image, same(1, scale=2.0), 16).mean()) == pytest.approx(4 * mean, rel=0.15)
    assert float(apply(image, same(1, scale=0.5), 16).mean()) == pytest.approx(mean / 4, rel=0.15)


@BOTH
def test_a_cropped_image_contains_only_pixels_of_the_crop(apply: Apply) -> None:
    images = np.zeros((1, 40, 40, 3), dtype=np.uint8)
    images[:, 10:30, 20:40] = 200
    change = same(1, crop=[0.5, 0.25, 0.5, 0.5])
    assert crop_bounds(change, 40).tolist() == [[20, 10, 40, 30]]
    assert (apply(images, change, 32) == 200).all()
    assert (
        apply(images, change._replace(rotation_deg=np.array([30.0])), 32) == 200
    ).all()  # its border goes on


@BOTH
def test_a_crop_in_whole_pixels_copies_its_pixels_exactly(apply: Apply) -> None:
    images = batch(3, 20, 3)
    assert np.array_equal(
        apply(images, same(3, crop=[0.1, 0.2, 0.8, 0.8]), 16), images[:, 4:, 2:18]
    )


@BOTH
@pytest.mark.parametrize("times", [2, 3])
def test_a_larger_stored_image_is_averaged_without_aliasing(apply: Apply, times: int) -> None:
    images = batch(4, 16 * times, 3)
    means = images.reshape(4, 16, times, 16, times, 3).mean(axis=(2, 4))
    assert np.abs(apply(images, unchanged(4), 16) - means).max() <= 0.51


@BOTH
def test_erasing_fills_a_rectangle_with_grey_and_changes_nothing_else(apply: Apply) -> None:
    images = batch(2, 16, 3)
    expected = images.copy()
    expected[:, 4:12, 2:6] = GREY
    assert np.array_equal(apply(images, same(2, erased=[0.125, 0.25, 0.25, 0.5]), 16), expected)


@BOTH
def test_changed_colours_are_clipped_to_the_range_0_to_255(apply: Apply) -> None:
    images = np.array([0, 100, 200], dtype=np.uint8).repeat(3).reshape(1, 1, 3, 3).repeat(3, axis=1)
    assert apply(images, same(1, brightness=2.0), 3)[0, 0, :, 0].tolist() == [0, 200, 255]
    assert apply(images, same(1, contrast=2.0), 3)[0, 0, :, 0].tolist() == [0, 100, 255]
    assert apply(images, same(1, contrast=0.0), 3)[0, 0, :, 0].tolist() == [100, 100, 100]


@BOTH
def test_the_augmentation_of_an_image_does_not_depend_on_the_rest_of_its_batch(
    apply: Apply,
) -> None:
    images, everyone = batch(150, 24, 3), keys(150)
    together = apply(images, draw(PLAN, 2, everyone), 16)
    for part in (slice(0, 1), slice(7, 12), slice(100, 150)):
        assert np.array_equal(
            apply(images[part], draw(PLAN, 2, everyone[part]), 16), together[part]
        )


@pytest.mark.parametrize("stored_px", [64, 80])
def test_the_number_of_threads_changes_no_augmented_pixel(
    stored_px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, plans = (
        batch(120, stored_px, 3),
        [PLAN, plan_from_params(augment_params(horizontal_flip=0.5, crop_padding_px=4), 7)],
    )
    results = []
    for num_threads in (1, 2, 3):
        torch_module = host.torch  # type: ignore[attr-defined]
        monkeypatch.setattr(torch_module, "get_num_threads", lambda count=num_threads: count)
        results.append([on_host(images, draw(plan, 0, keys(120)), 64) for plan in plans])
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


def smooth(count: int, size_px: int, channels: int) -> Pixels:
    """Return images without edges, which change little if a sampling point moves slightly."""
    coarse = batch(count, 8, channels)
    return np.stack(
        [
            cv2.resize(image, (size_px, size_px), interpolation=cv2.INTER_CUBIC).reshape(
                size_px, size_px, -1
            )
            for image in coarse
        ]
    )


@pytest.mark.parametrize("name", [*ON, "everything"])
@pytest.mark.parametrize(("stored_px", "channels"), [(32, 3), (40, 1), (40, 3), (96, 3)])
def test_host_and_device_augmentation_agree_within_grey_levels(
    name: str, stored_px: int, channels: int
) -> None:
    plan = plan_from_params(augment_params(**(ON if name == "everything" else {name: ON[name]})), 7)
    images, everyone, partners = (
        smooth(40, stored_px, channels),
        keys(40),
        np.roll(np.arange(40), 1),
    )
    change, mixing = draw(plan, 0, everyone), draw_mixing(plan, 0, everyone, 32)
    changes = device_changes(change, mixing, partners, stored_px, 32, channels)
    device = augment_batch(torch.from_numpy(images), changes).numpy().astype(int)
    difference = np.abs(device - mixed_images(on_host(images, change, 32), partners, mixing))
    assert difference.max() <= 3  # one for each rounding; colours can double one
    assert difference.mean() < 0.25


def mixed(images: Pixels, mixing: MixDraw, partners: NDArray[np.int64], where: str) -> Pixels:
    if where == "host":
        return mixed_images(images, partners, mixing)
    changes = device_changes(
        unchanged(len(images)), mixing, partners, images.shape[1], images.shape[1], images.shape[3]
    )
    result: Pixels = augment_batch(torch.from_numpy(images), changes).numpy()
    return result


@pytest.mark.parametrize("where", ["host", "device"])
def test_mixup_blends_two_images_and_cutmix_pastes_a_rectangle(where: str) -> None:
    images = np.stack(
        [np.full((8, 8, 3), value, dtype=np.uint8) for value in (200, 100, 0)]
    )  # two rows and a partner for them
    mixing = MixDraw(np.array([0.75, 0.875], np.float32), np.array([[0, 0, 0, 0], [4, 0, 8, 2]]))
    result = mixed(images, mixing, np.array([1, 2]), where)
    assert result.shape == (2, 8, 8, 3)
    assert (result[0] == 175).all()
    assert (result[1, :2, 4:] == 0).all()
    assert int(result[1].astype(int).sum()) == 100 * 3 * (64 - 8)


@BOTH
def test_an_empty_batch_is_augmented_to_an_empty_batch(apply: Apply) -> None:
    assert apply(batch(0, 16, 3), unchanged(0), 16).shape == (0, 16, 16, 3)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 8, 8, 3),
        torch.zeros(3, 8, 8, 3, dtype=torch.uint8),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
    ],
)
def test_augmentation_refuses_inputs_that_are_not_a_batch_of_pixels(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        augment_batch(images, device_changes(unchanged(2), None, np.arange(2), 8, 8, 3))


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_augments_as_the_cpu_within_two_grey_levels() -> None:
    images, change = smooth(64, 40, 3), draw(PLAN, 0, keys(64))
    on_gpu = on_device(images, change, 32, "cuda").astype(int)
    assert np.abs(on_gpu - on_device(images, change, 32)).max() <= 2
