"""Applies augmentation, drawn beforehand, to a batch of images on a GPU.

Each pixel is interpolated once, bilinearly; beyond the crop its border is repeated. Nothing is
random here: `slipway.data.augmentation.draws` draws the numbers. On the CPU, `host` does the same
several times faster; the results differ only by rounding.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

from slipway.data.augmentation.draws import (
    LUMA,
    Draw,
    MixDraw,
    affine_matrices,
    colour_matrices,
    crop_bounds,
    erased_bounds,
)

GREY = 128  # fills an erased rectangle


class Changes(NamedTuple):
    """Augmentation of R stored images: the first B form the batch, the others are mixed into it."""

    matrices: Tensor  # (R, 2, 3) float32, see `affine_matrices`
    bounds: Tensor  # (R, 4) int64 crops in stored pixels, see `crop_bounds`
    colours: Tensor | None  # (R, C, C) float32, see `colour_matrices`; None without colour changes
    greys: Tensor | None  # (R,) float32
    erased: Tensor  # (R, 4) int64, see `erased_bounds`
    partners: Tensor  # (B,) int64 in [0, R)
    own_fractions: Tensor  # (B,) float32, see `MixDraw`
    boxes: Tensor  # (B, 4) int64, see `MixDraw`
    sizes: Tensor  # (size_px,) unused bytes: transfer to a device keeps shapes, but no numbers


def device_changes(
    change: Draw,
    mixing: MixDraw | None,
    partners: NDArray[np.int64],
    stored_px: int,
    size_px: int,
    channels: int,
) -> Changes:
    """Convert the augmentation of R images, and the mixing of the first B, to CPU tensors."""
    colours, greys = (
        map(torch.from_numpy, colour_matrices(change, channels))
        if change.recolours
        else (None, None)
    )
    no_boxes = np.zeros((len(partners), 4), np.int64)
    unmixed = np.ones(len(partners), np.float32)
    return Changes(
        matrices=torch.from_numpy(affine_matrices(change, size_px)),
        bounds=torch.from_numpy(crop_bounds(change, stored_px)),
        colours=colours,
        greys=greys,
        erased=torch.from_numpy(erased_bounds(change, size_px)),
        partners=torch.from_numpy(partners),
        own_fractions=torch.from_numpy(mixing.own_fraction if mixing else unmixed),
        boxes=torch.from_numpy(mixing.boxes if mixing else no_boxes),
        sizes=torch.zeros(size_px, dtype=torch.uint8),
    )


def samples_per_pixel(stored_px: int, size_px: int) -> int:
    """Return the number of samples per side that are averaged into one pixel to avoid aliasing."""
    return max(1, round(stored_px / size_px))


def augment_batch(images: Tensor, changes: Changes) -> Tensor:
    """Augment images (R, S, S, C) uint8; return (B, size_px, size_px, C) uint8 on the same device.

    Each result depends only on its own image and on the image mixed into it.
    """
    if (
        images.dtype != torch.uint8
        or images.dim() != 4
        or changes.matrices.shape != (len(images), 2, 3)
    ):
        raise ValueError(
            f"images are {images.dtype} {tuple(images.shape)} and matrices "
            f"{tuple(changes.matrices.shape)}, expected uint8 (B, H, W, C) and (B, 2, 3)"
        )
    if not len(images):
        return images.new_empty((0, len(changes.sizes), len(changes.sizes), images.shape[3]))
    pixels = _resample(images, changes)
    if changes.colours is not None and changes.greys is not None:
        pixels = _recolour(pixels, changes.colours, changes.greys)
    pixels.masked_fill_(_inside(changes.erased, pixels.shape[1])[..., None], GREY)
    return _mix(pixels, changes)


def _resample(images: Tensor, changes: Changes) -> Tensor:
    size_px, stored_px = len(changes.sizes), images.shape[1]
    fold = samples_per_pixel(stored_px, size_px)
    grid = _sampling_grid(changes.matrices, changes.bounds, size_px * fold, stored_px)
    pixels = images.permute(0, 3, 1, 2).to(torch.float32)  # (B, H, W, C) -> (B, C, H, W)
    sampled = grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if fold > 1:
        sampled = avg_pool2d(sampled, fold)
    # A weighted mean is never below 0 or above 255, so rounding needs no clamp.
    return sampled.add_(0.5).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _sampling_grid(matrices: Tensor, bounds: Tensor, num_points: int, stored_px: int) -> Tensor:
    """Convert affine matrices (B, 2, 3) to sampling positions (B, P, P, 2).

    Computed element by element: a matrix product may round differently for another batch size.
    """
    centres = _pixel_centres(num_points, matrices.device)
    along_columns = (
        matrices[:, None, :, 0] * centres[None, :, None] + matrices[:, None, :, 2]
    )  # (B, W, 2)
    along_rows = matrices[:, None, :, 1] * centres[None, :, None]  # (B, H, 2)
    in_crop = along_rows[:, :, None] + along_columns[:, None]
    start, end = bounds[:, None, None, :2].float(), bounds[:, None, None, 2:].float()
    inside = 1 - 1 / (end - start)  # centre of the crop's last pixel; beyond it the border repeats
    limited = torch.maximum(torch.minimum(in_crop, inside), -inside)
    return (limited * (end - start) + (start + end)) / stored_px - 1


def _pixel_centres(count: int, device: torch.device) -> Tensor:
    """Return the centres of `count` equal pixels on the interval from -1 to 1, (count,).

    The ends of the interval are the edges of the image.
    """
    return (2 * torch.arange(count, device=device, dtype=torch.float32) + 1) / count - 1


def _recolour(pixels: Tensor, colours: Tensor, greys: Tensor) -> Tensor:
    channels = pixels.shape[3]
    weights = torch.tensor(
        LUMA if channels == 3 else [1.0], dtype=torch.float64, device=pixels.device
    )
    # A sum of integers is exact in any order.
    sums = pixels.sum((1, 2), dtype=torch.int64).double()
    means = sums / (pixels.shape[1] * pixels.shape[2])
    offset = greys * (means * weights).sum(1).float()
    # Channel by channel, because a matrix product may round differently for another batch size.
    values = sum(
        pixels[..., None, channel].float() * colours[:, None, None, :, channel]
        for channel in range(channels)
    )
    result: Tensor = values + offset[:, None, None, None]
    return result.round_().clamp_(0, 255).to(torch.uint8)


def _inside(bounds: Tensor, size_px: int) -> Tensor:
    """Return masks (B, size_px, size_px), True inside the rectangles `bounds` (B, 4).

    A rectangle is given as left, top, right, bottom.
    """
    places = torch.arange(size_px, device=bounds.device)
    left, top, right, bottom = (bound[:, None] for bound in bounds.T)
    columns, rows = (places >= left) & (places < right), (places >= top) & (places < bottom)
    inside: Tensor = columns[:, None, :] & rows[:, :, None]
    return inside


def _mix(pixels: Tensor, changes: Changes) -> Tensor:
    own, partners = pixels[: len(changes.partners)], pixels[changes.partners]
    cut = (changes.boxes[:, 2] > changes.boxes[:, 0]) & (changes.boxes[:, 3] > changes.boxes[:, 1])
    fractions = torch.where(cut, 1.0, changes.own_fractions)[:, None, None, None]
    blended = (own * fractions + partners * (1 - fractions)).round_().to(torch.uint8)
    return torch.where(_inside(changes.boxes, own.shape[1])[..., None], partners, blended)
