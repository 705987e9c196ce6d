"""The augmentation plan: the random operations on training images and texts, with their ranges.

An operation in `augment.forbid` is refused. `slipway.data.augmentation.draws` turns the plan into
numbers, `slipway.training` applies them. Tables are not augmented.

data/augmented/plan.json    the plan
data/augmented/train/       the offline copies, if augment.offline_copies is above 0
"""

from pathlib import Path
from typing import Literal

from slipway.config.training import AugmentParams
from slipway.config.yaml_text import as_yaml
from slipway.data.engine.rows import read_record
from slipway.data.store.packed import PackedManifest, PackedSplit, PackedSplitManifest, open_split
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import ParamsError


class AugmentPlan(Contract):
    """The content of `plan.json`: the operations on training images or texts, with their ranges.

    Units are those of docs/reference/params.md.
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
    token_dropout: float = 0.0
    word_deletion: float = 0.0
    offline: PackedSplitManifest | None  # the copies in `train/`, or null

    @property
    def is_identity(self) -> bool:
        """True if no operation of the plan can change a pixel."""
        return not operations(self)

    @property
    def mixes(self) -> bool:
        """True if the plan may mix an image with another one."""
        return self.mix_probability > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)


# The operations in the order of application, each with the value that changes nothing.
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
    names = [name for name, neutral in NEUTRAL.items() if getattr(plan, name) != neutral]
    return [name for name in names if plan.mixes or name not in ("mixup_alpha", "cutmix_alpha")]


def text_operations(plan: AugmentPlan) -> list[str]:
    """Return the names of the operations that can change a text."""
    return [name for name in ("token_dropout", "word_deletion") if getattr(plan, name)]


def plan_from_params(params: AugmentParams, seed: int) -> AugmentPlan:
    """Return the plan that `params` describe, without offline copies.

    Raises ParamsError if the plan uses an operation that is forbidden for this data.
    """
    values = params.model_dump(include=set(AugmentPlan.model_fields))
    plan = AugmentPlan(format_version=2, seed=seed, offline=None, **values)
    refused = [
        f"  augment.{name} is {getattr(params, name)}, but augment.forbid names {name!r}; "
        f"expected {as_yaml(NEUTRAL[name])}"
        for name in operations(plan)
        if name in params.forbid
    ]
    if refused:
        raise ParamsError(
            "params.yaml requests augmentation that would change the label:\n" + "\n".join(refused)
        )
    return plan


def without_operations(plan: AugmentPlan) -> AugmentPlan:
    """Return the plan with every operation on images switched off."""
    return plan.model_copy(update={**NEUTRAL, "offline": None})


def write_plan(root: Path, plan: AugmentPlan) -> None:
    """Write `plan.json`, after all copies are complete."""
    files.write_json(root / "plan.json", plan.model_dump(mode="json"))


def open_augmented(
    root: Path, manifest: PackedManifest, *, verify: bool = False
) -> tuple[AugmentPlan, PackedSplit | None]:
    """Read the plan, and open the offline copies of training rows if there are any.

    Raises SchemaError if the plan or the copies do not fit `manifest`. With `verify`, raises
    IntegrityError if a copy differs from its digest.
    """
    plan = read_record(AugmentPlan, root / "plan.json", "augment")
    if plan.offline is None:
        return plan, None
    copies = manifest.model_copy(update={"splits": {"train": plan.offline}})
    return plan, open_split(root, copies, "train", verify=verify)
