"""Draws the random parameters of image augmentation; `training/augmentation` applies them.

A draw is a pure function of (seed, epoch, sample id): a resumed run, another batch size or another
number of workers gets exactly the same images. Each value is computed from uniform random numbers
by a formula, without rejection sampling.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipway.data.augmentation.plan import AugmentPlan
from slipway.data.engine.randomness import uniform

# Red, green and blue to luma and two colour axes: YIQ of the NTSC standard of 1953 (FCC, 47 CFR
# 73.682).
_YIQ = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_YIQ_INVERSE = np.linalg.inv(_YIQ)
LUMA = _YIQ[0]
# Width over height; Zhong et al. 2020, "Random erasing data augmentation".
_PLACE = np.uint64(0xD1B54A32D192ED03)  # step between the keys of two places of a sample; odd
_ERASED_ASPECT = (0.3, 1 / 0.3)


class Draw(NamedTuple):
    """The random parameters of the augmentation of N images.

    The operations are applied in this order: crop, flips, scale and rotation about the centre,
    shifts, brightness, contrast, saturation, hue, erasing. Rectangles are (left, top, width,
    height) as fractions of the side.
    """

    crop: NDArray[np.float64]  # (N, 4) the part of the stored image that the network sees
    horizontal_flip: NDArray[np.bool_]  # (N,)
    vertical_flip: NDArray[np.bool_]  # (N,)
    scale: NDArray[np.float64]  # (N,) above 1 enlarges
    rotation_deg: NDArray[np.float64]  # (N,) counter-clockwise as seen
    shift: NDArray[np.float64]  # (N, 2) to the right and down, as fractions of the side
    shift_px: NDArray[np.int64]  # (N, 2) added to `shift`, in pixels of the network's image
    brightness: NDArray[np.float64]  # (N,) factor
    contrast: NDArray[np.float64]  # (N,) factor about the image's mean grey
    saturation: NDArray[np.float64]  # (N,) factor about each pixel's grey
    hue: NDArray[np.float64]  # (N,) turns of the colour circle
    erased: NDArray[np.float64]  # (N, 4) rectangle in the augmented image; width 0 for none

    def part(self, rows: slice) -> "Draw":
        """Return the parameters of the images at positions `rows`."""
        return Draw._make(values[rows] for values in self)

    @property
    def moves_whole_pixels(self) -> bool:
        """True if all images move by whole pixels, so that no image needs interpolation."""
        still = not self.rotation_deg.any() and not self.shift.any()
        return still and bool((self.scale == 1).all()) and bool((self.crop[:, 2:] == 1).all())

    @property
    def recolours(self) -> bool:
        """True if the colour of any pixel changes."""
        factors = (self.brightness, self.contrast, self.saturation)
        return bool(self.hue.any()) or not all((factor == 1).all() for factor in factors)


def draw_places(
    plan: AugmentPlan, epoch: int, keys: NDArray[np.uint64], length: int, stream: str
) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each position of each text, (N, length) float64.

    `stream` names the use of the numbers, see `uniform`.
    """
    with np.errstate(over="ignore"):
        places = keys[:, None] + np.arange(length, dtype=np.uint64) * _PLACE
    numbers = uniform(plan.seed, epoch, places.reshape(-1), stream)
    return numbers.reshape(len(keys), length)


class MixDraw(NamedTuple):
    """The parts and weights for mixing N images, each with another image."""

    # (N,) weight of the image in the mixed target; 1 without mixing
    own_fraction: NDArray[np.float32]
    # (N, 4) left, top, right, bottom in pixels: the partner's part (CutMix). An empty box means
    # that whole images are blended (MixUp).
    boxes: NDArray[np.int64]


def unchanged(count: int) -> Draw:
    """Return the parameters that leave `count` images unchanged."""
    return Draw(
        crop=_whole_images(count),
        horizontal_flip=np.zeros(count, bool),
        vertical_flip=np.zeros(count, bool),
        scale=np.ones(count),
        rotation_deg=np.zeros(count),
        shift=np.zeros((count, 2)),
        shift_px=np.zeros((count, 2), np.int64),
        brightness=np.ones(count),
        contrast=np.ones(count),
        saturation=np.ones(count),
        hue=np.zeros(count),
        erased=np.zeros((count, 4)),
    )


def draw(plan: AugmentPlan, epoch: int, keys: NDArray[np.uint64]) -> Draw:
    """Return the augmentation parameters of each sample in `epoch`.

    They are a pure function of (seed, epoch, key). `keys` is (N,), see `PackedSplit.keys`. Training
    counts epochs from 0; offline copies use negative epochs.
    """
    numbers = _Numbers(plan.seed, epoch, keys)
    pad = plan.crop_padding_px
    shift_px = np.zeros((len(keys), 2), np.int64)
    if pad:
        shift_px = np.floor(numbers.pairs(-pad, pad + 1, "shift")).astype(np.int64)
    return Draw(
        crop=numbers.rectangles(plan.random_resized_crop, plan.crop_aspect, "crop"),
        horizontal_flip=numbers.chance(plan.horizontal_flip, "horizontal_flip"),
        vertical_flip=numbers.chance(plan.vertical_flip, "vertical_flip"),
        scale=numbers.between(*plan.scale, "scale"),
        rotation_deg=numbers.between(-plan.rotation_deg, plan.rotation_deg, "rotation"),
        shift=numbers.pairs(-plan.translation, plan.translation, "translation"),
        shift_px=shift_px,
        brightness=numbers.factors(plan.brightness, "brightness"),
        contrast=numbers.factors(plan.contrast, "contrast"),
        saturation=numbers.factors(plan.saturation, "saturation"),
        hue=numbers.between(-plan.hue, plan.hue, "hue"),
        erased=_erased(plan, numbers),
    )


def draw_mixing(plan: AugmentPlan, epoch: int, keys: NDArray[np.uint64], size_px: int) -> MixDraw:
    """Return the mixing parameters of each sample in `epoch`, a pure function as in `draw`."""
    numbers = _Numbers(plan.seed, epoch, keys)
    mixed = numbers.chance(plan.mix_probability if plan.mixes else 0.0, "mix")
    cut = numbers.chance(_cutmix_probability(plan), "cutmix")
    # The names select the random numbers, so they stay: others would change every training.
    cutmix_fractions = numbers.beta(plan.cutmix_alpha, "cutmix_share")
    fractions = np.where(cut, cutmix_fractions, numbers.beta(plan.mixup_alpha, "mixup_share"))
    boxes = np.where((mixed & cut)[:, None], _boxes(1 - fractions, numbers, size_px), 0)
    covered = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / size_px**2
    own = np.where(mixed, np.where(cut, 1 - covered, fractions), 1.0)
    return MixDraw(own.astype(np.float32), boxes)


def crop_bounds(change: Draw, stored_px: int) -> NDArray[np.int64]:
    """Return the crops (N, 4): left, top, right, bottom in whole pixels of the stored images."""
    size = _whole(change.crop[:, 2:] * stored_px).clip(min=1)
    start = np.minimum(_whole(change.crop[:, :2] * stored_px), stored_px - size)
    return np.concatenate([start, start + size], axis=1)


def erased_bounds(change: Draw, size_px: int) -> NDArray[np.int64]:
    """Return the erased areas (N, 4): left, top, right, bottom in pixels of the augmented images.

    An area is empty if right equals left.
    """
    start = change.erased[:, :2]
    return _whole(np.concatenate([start, start + change.erased[:, 2:]], axis=1) * size_px)


def affine_matrices(change: Draw, size_px: int) -> NDArray[np.float32]:
    """Return affine maps (N, 2, 3) float32 from points of the output to points of the crop.

    Coordinates of both are in [-1, 1] from edge to edge, x to the right, y down, as in torch's
    `affine_grid` with align_corners=False. All operations are one matrix, so a pixel is
    interpolated once. The map is the inverse of the change: out = shift + rotate(scale * flip(in)).
    """
    angle = np.deg2rad(change.rotation_deg)
    cosine, sine = np.cos(angle) / change.scale, np.sin(angle) / change.scale
    flip_x = np.where(change.horizontal_flip, -1.0, 1.0)
    flip_y = np.where(change.vertical_flip, -1.0, 1.0)
    x_row = np.stack([flip_x * cosine, -flip_x * sine], -1)
    y_row = np.stack([flip_y * sine, flip_y * cosine], -1)
    linear = np.stack([x_row, y_row], 1)
    offset = -np.einsum("nij,nj->ni", linear, 2 * (change.shift + change.shift_px / size_px))
    return np.concatenate([linear, offset[:, :, None]], 2).astype(np.float32)


def colour_matrices(change: Draw, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return matrices (N, C, C) and shares (N,), both float32, that change the colours of N images.

    A pixel becomes matrix @ pixel + share * (the image's mean grey).

    Brightness, contrast, saturation (scales the colour axes) and hue (rotates them) are linear, and
    the last two do not change greys. So one matrix combines them. Values are clipped to [0, 255]
    once, at the end.
    """
    factor = change.brightness * change.contrast
    share = (1 - change.contrast) * change.brightness
    if channels == 1:
        return factor[:, None, None].astype(np.float32), share.astype(np.float32)
    angle = 2 * np.pi * change.hue
    turned = np.zeros((len(angle), 3, 3))
    turned[:, 0, 0] = 1
    turned[:, 1, 1] = turned[:, 2, 2] = change.saturation * np.cos(angle)
    turned[:, 2, 1] = change.saturation * np.sin(angle)
    turned[:, 1, 2] = -turned[:, 2, 1]
    matrices = factor[:, None, None] * (_YIQ_INVERSE @ turned @ _YIQ)
    return matrices.astype(np.float32), share.astype(np.float32)


class _Numbers:
    """Random numbers for N samples in one epoch; each stream gives independent numbers."""

    def __init__(self, seed: int, epoch: int, keys: NDArray[np.uint64]) -> None:
        self._seed, self._epoch, self._keys = seed, epoch, keys

    def uniform(self, stream: str) -> NDArray[np.float64]:
        return uniform(self._seed, self._epoch, self._keys, stream)

    def between(self, low: float, high: float, stream: str) -> NDArray[np.float64]:
        if low == high:  # low equals high for an operation that is switched off
            return np.full(len(self._keys), float(low))
        return low + (high - low) * self.uniform(stream)

    def factors(self, strength: float, stream: str) -> NDArray[np.float64]:
        return self.between(1 - strength, 1 + strength, stream)

    def pairs(self, low: float, high: float, stream: str) -> NDArray[np.float64]:
        return np.column_stack([self.between(low, high, f"{stream}_{axis}") for axis in "xy"])

    def chance(self, probability: float, stream: str) -> NDArray[np.bool_]:
        if probability in (0.0, 1.0):
            return np.full(len(self._keys), probability == 1.0)
        return self.uniform(stream) < probability

    def beta(self, alpha: float, stream: str) -> NDArray[np.float64]:
        """Return (N,) random numbers in [0, 1] from Beta(alpha, alpha); all are 1 for alpha 0.

        Uses two uniform numbers and no rejection: Bailey 1994, "Polar generation of random
        variates with the t-distribution"; t is a transformed symmetric beta (Devroye 1996, "Random
        variate generation in one line of code").
        """
        if not alpha:
            return np.ones(len(self._keys))
        radius = self.uniform(f"{stream}_radius") ** (1 / alpha)
        cosine = np.cos(2 * np.pi * self.uniform(f"{stream}_angle"))
        squared = (1 - radius) * cosine**2
        return np.asarray(0.5 + 0.5 * np.sign(cosine) * np.sqrt(squared / (radius + squared)))

    def rectangles(
        self, area: tuple[float, float], aspect: tuple[float, float], stream: str
    ) -> NDArray[np.float64]:
        """Return random boxes (N, 4) in the unit square, uniform in area and log aspect ratio.

        The aspect ratio is limited so that the box fits.
        """
        if area == (1.0, 1.0):
            return _whole_images(len(self._keys))
        areas = self.between(*area, f"{stream}_area")
        low, high = map(math.log, aspect)
        aspects = np.exp(self.between(low, high, f"{stream}_aspect")).clip(areas, 1 / areas)
        sides = np.sqrt(np.stack([areas * aspects, areas / aspects], axis=1)).clip(max=1.0)
        return np.concatenate([(1 - sides) * self.pairs(0.0, 1.0, stream), sides], axis=1)


def _erased(plan: AugmentPlan, numbers: _Numbers) -> NDArray[np.float64]:
    is_erased = numbers.chance(plan.erasing, "erasing")[:, None]
    if not plan.erasing:
        return np.zeros((len(is_erased), 4))
    rectangles = numbers.rectangles(plan.erasing_area, _ERASED_ASPECT, "erasing")
    return np.where(is_erased, rectangles, 0.0)


def _cutmix_probability(plan: AugmentPlan) -> float:
    if plan.mixup_alpha and plan.cutmix_alpha:
        return 0.5
    return 1.0 if plan.cutmix_alpha else 0.0


def _boxes(areas: NDArray[np.float64], numbers: _Numbers, size_px: int) -> NDArray[np.int64]:
    """Return random squares (N, 4) of the given areas, clipped to the image.

    See Yun et al. 2019, "CutMix".
    """
    half = np.sqrt(areas)[:, None] / 2
    centre = numbers.pairs(0.0, 1.0, "cutmix_centre")
    corners = np.concatenate([centre - half, centre + half], axis=1)
    return _whole(corners.clip(0.0, 1.0) * size_px)


def _whole_images(count: int) -> NDArray[np.float64]:
    rectangles = np.zeros((count, 4))
    rectangles[:, 2:] = 1
    return rectangles


def _whole(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.rint(numbers).astype(np.int64))
