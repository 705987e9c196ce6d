"""The project's own params with some values changed, for tests that need a section."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slipway.params import AugmentParams, CleanParams, Params, SplitParams, load_params

PROJECT: Params = load_params(Path(__file__).resolve().parents[1] / "params.yaml")

NO_AUGMENTATION: dict[str, Any] = {
    "random_resized_crop": [1.0, 1.0],
    "rotation_deg": 0.0,
    "scale": [1.0, 1.0],
    "translation": 0.0,
    "crop_padding_px": 0,
    "horizontal_flip": 0.0,
    "vertical_flip": 0.0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
    "erasing": 0.0,
    "mixup_alpha": 0.0,
    "cutmix_alpha": 0.0,
    "forbid": [],
    "offline_copies": 0,
}


def clean_params(**changes: Any) -> CleanParams:
    """The section clean; `rules` is a mapping of the rules that change."""
    rules = {**PROJECT.clean.rules.model_dump(), **changes.pop("rules", {})}
    return CleanParams.model_validate(_changed(PROJECT.clean, changes | {"rules": rules}))


def split_params(**changes: Any) -> SplitParams:
    """The section split."""
    return SplitParams.model_validate(_changed(PROJECT.split, changes))


def augment_params(**changes: Any) -> AugmentParams:
    """The section augment, without any operation but those in `changes`."""
    return AugmentParams.model_validate(_changed(PROJECT.augment, NO_AUGMENTATION | changes))


def _changed(section: BaseModel, changes: dict[str, Any]) -> dict[str, Any]:
    return section.model_dump() | changes
