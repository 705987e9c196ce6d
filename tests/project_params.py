"""The project's own params with some values changed, for tests that need a section."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slipway.config.network_arguments import arguments_class
from slipway.config.params import Params, filled, load_params, read_content
from slipway.config.sections import CleanParams, SplitParams, default_of
from slipway.config.training import AugmentParams
from slipway.data.augmentation.plan import NEUTRAL
from slipway.kinds.inputs import network_family
from slipway.kinds.registry import input_kinds, kind_of

_PATH = Path(__file__).resolve().parents[1] / "params.yaml"
PROJECT: Params = load_params(_PATH)

NO_AUGMENTATION: dict[str, Any] = {
    **{name: list(value) if isinstance(value, tuple) else value for name, value in NEUTRAL.items()},
    "forbid": [],
    "offline_copies": 0,
}


def own_content() -> dict[str, Any]:
    """Return the content of the real params.yaml with the default of every other key."""
    return copy.deepcopy(_own_content())


@cache
def _own_content() -> dict[str, Any]:
    return filled(read_content(_PATH))


def of_kind(content: dict[str, Any], task: str) -> dict[str, Any]:
    """Return `content` for `task` with every key; those of other kinds have their defaults."""
    changed = filled(content)
    changed["data"]["task"] = task
    own = kind_of(task).input.keys
    foreign = {key for kind in input_kinds().values() for key in kind.keys} - {*own}
    for key in foreign:
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section.get(part, {})
        section[name] = default_of(Params, key)
    if not kind_of(task).target.has_classes:
        changed["train"]["label_smoothing"] = 0.0
    inputs, network = kind_of(task).input, changed["train"]["network"]
    if network_family(network) not in inputs.networks and ":" not in network:
        network = next(iter(inputs.networks))
        arguments = arguments_class(network)
        assert arguments is not None
        changed["train"] |= {"network": network, "network_arguments": arguments().model_dump()}
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
