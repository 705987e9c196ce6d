"""The augmentation plan: which random change each training image gets, as numbers, without touching a pixel.

A change is a pure function of (seed, epoch, sample id), so a resumed run, another batch size or another number of
workers sees the very same pictures. `slipway.training.augmentation` applies it. An operation that
`augment.forbid` names is refused.

data/augmented/plan.json    the plan
data/augmented/train/       the offline copies, where augment.offline_copies asks for them
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from slipway import files
from slipway.contract import Contract
from slipway.data.packed import PackedManifest, PackedSplit, PackedSplitManifest, open_split
from slipway.data.randomness import uniform
from slipway.errors import ParamsError, SchemaError
from slipway.params import AugmentParams


class AugmentPlan(Contract):
    """What may happen to a training image; the file `plan.json`."""

    format_version: Literal[1]
    seed: int
    rotation_deg: float  # up to this angle either way
    scale: tuple[float, float]  # zoom between these factors
    crop_padding_px: int  # shift by up to this many whole pixels either way
    horizontal_flip: float  # probability
    vertical_flip: float  # probability
    offline: PackedSplitManifest | None  # the copies in `train/`, or null

    @property
    def is_identity(self) -> bool:
        """Whether no draw can change a pixel."""
        return not operations(self)


class Draw(NamedTuple):
    """One change for each of N images. Applied in this order: flips, scale and rotation about the centre, shift."""

    rotation_deg: NDArray[np.float64]  # (N,) counter-clockwise as seen
    scale: NDArray[np.float64]  # (N,) above 1 enlarges
    shift_x_px: NDArray[np.int64]  # (N,) to the right
    shift_y_px: NDArray[np.int64]  # (N,) down
    horizontal_flip: NDArray[np.bool_]  # (N,)
    vertical_flip: NDArray[np.bool_]  # (N,)


def plan_from_params(params: AugmentParams, seed: int) -> AugmentPlan:
    """The plan that `params` asks for, without copies; ParamsError naming both keys if it asks for a forbidden operation."""
    plan = AugmentPlan(
        format_version=1,
        seed=seed,
        rotation_deg=params.rotation_deg,
        scale=(params.scale[0], params.scale[1]),
        crop_padding_px=params.crop_padding_px,
        horizontal_flip=params.horizontal_flip,
        vertical_flip=params.vertical_flip,
        offline=None,
    )
    asked_for = operations(plan)
    refused = [name for name in params.forbid if name in asked_for]
    if refused:
        lines = [
            f"  augment.{name} is {getattr(params, name)}, but augment.forbid names {name!r}; expected {_NEUTRAL[name]}" for name in refused
        ]
        raise ParamsError("params.yaml asks for augmentation that would change the label:\n" + "\n".join(lines))
    return plan


_NEUTRAL = {"rotation_deg": "0.0", "scale": "[1.0, 1.0]", "crop_padding_px": "0", "horizontal_flip": "0.0", "vertical_flip": "0.0"}


def operations(plan: AugmentPlan) -> list[str]:
    """The names of the operations that can change a pixel."""
    asked_for = {
        "rotation_deg": plan.rotation_deg > 0,
        "scale": plan.scale != (1.0, 1.0),
        "crop_padding_px": plan.crop_padding_px > 0,
        "horizontal_flip": plan.horizontal_flip > 0,
        "vertical_flip": plan.vertical_flip > 0,
    }
    return [name for name, asked in asked_for.items() if asked]


def draw(plan: AugmentPlan, epoch: int, keys: NDArray[np.uint64]) -> Draw:
    """The change of each sample in `epoch`: a pure function of (seed, epoch, key).

    `keys` is (N,), see `PackedSplit.keys`. Training counts epochs from 0; the offline copies are the negative ones.
    """

    def between(low: float, high: float, stream: str) -> NDArray[np.float64]:
        return low + (high - low) * uniform(plan.seed, epoch, keys, stream)

    def shift(stream: str) -> NDArray[np.int64]:
        return np.floor(between(-plan.crop_padding_px, plan.crop_padding_px + 1, stream)).astype(np.int64)

    return Draw(
        rotation_deg=between(-plan.rotation_deg, plan.rotation_deg, "rotation"),
        scale=between(*plan.scale, "scale"),
        shift_x_px=shift("shift_x"),
        shift_y_px=shift("shift_y"),
        horizontal_flip=uniform(plan.seed, epoch, keys, "horizontal_flip") < plan.horizontal_flip,
        vertical_flip=uniform(plan.seed, epoch, keys, "vertical_flip") < plan.vertical_flip,
    )


def affine_matrices(change: Draw, size_px: int) -> NDArray[np.float32]:
    """(N, 2, 3) float32: where each output point is read from in the input, both in [-1, 1] over the image's edges.

    x to the right, y down, as in torch's `affine_grid` with align_corners=False. All operations are one matrix, so a
    pixel is interpolated once. It is the inverse of the change: out = shift + rotate(scale * flip(in)).
    """
    angle = np.deg2rad(change.rotation_deg)
    cosine, sine = np.cos(angle) / change.scale, np.sin(angle) / change.scale
    flip_x = np.where(change.horizontal_flip, -1.0, 1.0)
    flip_y = np.where(change.vertical_flip, -1.0, 1.0)
    linear = np.stack([np.stack([flip_x * cosine, -flip_x * sine], -1), np.stack([flip_y * sine, flip_y * cosine], -1)], 1)
    shift = np.stack([change.shift_x_px, change.shift_y_px], -1) * (2.0 / size_px)
    offset = -np.einsum("nij,nj->ni", linear, shift)
    return np.concatenate([linear, offset[:, :, None]], 2).astype(np.float32)


def matrices(plan: AugmentPlan, epoch: int, keys: NDArray[np.uint64], size_px: int) -> NDArray[np.float32]:
    """(N, 2, 3) float32: the drawn changes as sampling matrices, see `draw` and `affine_matrices`."""
    return affine_matrices(draw(plan, epoch, keys), size_px)


def write_plan(root: Path, plan: AugmentPlan) -> None:
    """Write `plan.json`, last, when the copies (if any) are complete."""
    files.write_json(root / "plan.json", plan.model_dump(mode="json"))


def open_augmented(root: Path, manifest: PackedManifest, *, verify: bool = False) -> tuple[AugmentPlan, PackedSplit | None]:
    """The plan, and the offline copies of training rows where there are some. SchemaError if they do not fit `manifest`.

    `verify` first compares the copies with their digests (IntegrityError).
    """
    path = root / "plan.json"
    try:
        plan = AugmentPlan.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro augment`.") from None
    except (ValidationError, ValueError) as error:
        raise SchemaError(f"{path} is not an augmentation plan: {error}. Run `dvc repro --force augment`.") from error
    if plan.offline is None:
        return plan, None
    return plan, open_split(root, manifest.model_copy(update={"splits": {"train": plan.offline}}), "train", verify=verify)
