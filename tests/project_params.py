"""The project's own params with some values changed, for tests that need a section."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from slipway.config.params import Params, load_params
from slipway.config.sections import CleanParams, SplitParams
from slipway.config.training import AugmentParams
from slipway.data.augmentation.plan import NEUTRAL
from slipway.kinds.registry import kind_of, settings_of_kinds

_PATH = Path(__file__).resolve().parents[1] / "params.yaml"
PROJECT: Params = load_params(_PATH)

NO_AUGMENTATION: dict[str, Any] = {
    **{name: list(value) if isinstance(value, tuple) else value for name, value in NEUTRAL.items()},
    "forbid": [],
    "offline_copies": 0,
}


def own_content() -> dict[str, Any]:
    """Return the content of the real params.yaml, free to change."""
    return copy.deepcopy(_own_content())


@cache
def _own_content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(_PATH.read_text())
    return content


def of_kind(content: dict[str, Any], task: str) -> dict[str, Any]:
    """Return the content of params.yaml for `task`, with the keys of its kind of input only."""
    changed = copy.deepcopy(content)
    changed["data"]["task"] = task
    own = kind_of(task).settings
    for key, value in settings_of_kinds().items():
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        if key in own:
            section.setdefault(name, copy.deepcopy(value))
        else:
            section.pop(name, None)
    return changed


def clean_params(**changes: Any) -> CleanParams:
    """Return the section clean; `rules` maps the rules to change."""
    rules = {**PROJECT.clean.rules.model_dump(), **changes.pop("rules", {})}
    return CleanParams.model_validate(_changed(PROJECT.clean, changes | {"rules": rules}))


def split_params(**changes: Any) -> SplitParams:
    """The section split."""
    return SplitParams.model_validate(_changed(PROJECT.split, changes))


def augment_params(**changes: Any) -> AugmentParams:
    """Return the section augment with only the operations in `changes`."""
    return AugmentParams.model_validate(_changed(PROJECT.augment, NO_AUGMENTATION | changes))


def _changed(section: BaseModel, changes: dict[str, Any]) -> dict[str, Any]:
    return section.model_dump() | changes
