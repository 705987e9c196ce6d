"""The augmentation plan: which random changes training images may get, checked against what is forbidden.

`slipway.data.augmentation.draws` turns it into numbers, `slipway.training` applies them. An operation that `augment.forbid` names is
refused. Tables are not augmented.

data/augmented/plan.json    the plan
data/augmented/train/       the offline copies, where augment.offline_copies asks for them
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from slipway.config.sections import AugmentParams
from slipway.data.store.packed import PackedManifest, PackedSplit, PackedSplitManifest, open_split
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import ParamsError, SchemaError


class AugmentPlan(Contract):
    """The allowed changes of a training image.

    Content of `plan.json`, units as in docs/params.md.
    """

    format_version: Literal[2]
    seed: int
    random_resized_crop: tuple[float, float]
    crop_aspect: tuple[float, float]
    rotation_deg: float
    scale: tuple[float, float]
    translation: float
    crop_padding_px: int
    horizontal_flip: float
    vertical_flip: float
    brightness: float
    contrast: float
    saturation: float
    hue: float
    erasing: float
    erasing_area: tuple[float, float]
    mixup_alpha: float
    cutmix_alpha: float
    mix_probability: float
    offline: PackedSplitManifest | None  # the copies in `train/`, or null

    @property
    def is_identity(self) -> bool:
        """True if no draw can change a pixel."""
        return not operations(self)

    @property
    def mixes(self) -> bool:
        """True if a row may be mixed with another one."""
        return self.mix_probability > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)


# Every operation, in the order in which it is applied, and the value that leaves an image as it is.
NEUTRAL: dict[str, float | tuple[float, float]] = {
    "random_resized_crop": (1.0, 1.0),
    "horizontal_flip": 0.0,
    "vertical_flip": 0.0,
    "scale": (1.0, 1.0),
    "rotation_deg": 0.0,
    "translation": 0.0,
    "crop_padding_px": 0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
    "erasing": 0.0,
    "mixup_alpha": 0.0,
    "cutmix_alpha": 0.0,
}


def operations(plan: AugmentPlan) -> list[str]:
    """Return the names of the operations that can change a pixel, in order of application."""
    asked_for = [name for name, neutral in NEUTRAL.items() if getattr(plan, name) != neutral]
    return [name for name in asked_for if plan.mixes or name not in ("mixup_alpha", "cutmix_alpha")]


def plan_from_params(params: AugmentParams, seed: int) -> AugmentPlan:
    """Return the plan without copies; ParamsError if a forbidden operation is switched on."""
    names = [name for name in AugmentPlan.model_fields if name in AugmentParams.model_fields]
    values = {
        name: tuple(value) if isinstance(value := getattr(params, name), list) else value
        for name in names
    }
    plan = AugmentPlan(format_version=2, seed=seed, offline=None, **values)
    refused = [name for name in operations(plan) if name in params.forbid]
    if refused:
        lines = [
            f"  augment.{name} is {getattr(params, name)}, but augment.forbid names {name!r}; expected {_as_yaml(NEUTRAL[name])}"
            for name in refused
        ]
        raise ParamsError(
            "params.yaml asks for augmentation that would change the label:\n" + "\n".join(lines)
        )
    return plan


def without_operations(plan: AugmentPlan) -> AugmentPlan:
    """Return the plan with every operation switched off, as for a table."""
    return plan.model_copy(update={**NEUTRAL, "offline": None})


def _as_yaml(value: float | tuple[float, float]) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def write_plan(root: Path, plan: AugmentPlan) -> None:
    """Write `plan.json`, after all copies are complete."""
    files.write_json(root / "plan.json", plan.model_dump(mode="json"))


def open_augmented(
    root: Path, manifest: PackedManifest, *, verify: bool = False
) -> tuple[AugmentPlan, PackedSplit | None]:
    """The plan, and the offline copies of training rows where there are some. SchemaError if they do not fit `manifest`.

    `verify` first compares the copies with their digests (IntegrityError).
    """
    path = root / "plan.json"
    try:
        plan = AugmentPlan.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro augment`.") from None
    except (ValidationError, ValueError) as error:
        raise SchemaError(
            f"{path} is not an augmentation plan: {error}. Run `dvc repro --force augment`."
        ) from error
    if plan.offline is None:
        return plan, None
    return plan, open_split(
        root,
        manifest.model_copy(update={"splits": {"train": plan.offline}}),
        "train",
        verify=verify,
    )
