"""Contents of params.yaml that tests change, and the message that a mistake in one gets."""

import copy
from typing import Any

import pytest

from slipway.config.network_arguments import TabmArguments
from slipway.config.params import parse_params
from slipway.kinds.registry import KINDS
from slipway.system.errors import ParamsError
from tests.project_params import of_kind, own_content

OWN: dict[str, Any] = own_content()
CONTENT = parse_params(OWN).model_dump(mode="json")


def content(**changes: Any) -> dict[str, Any]:
    """Return the default params with dotted keys changed, as in content(train__epochs=3)."""
    changed = copy.deepcopy(CONTENT)
    task = changes.get("data__task")
    if isinstance(task, str) and task in KINDS:
        changed = of_kind(changed, task)
    for key, value in changes.items():
        *place, last = key.split("__")
        section = changed
        for part in place:
            section = section[part]
        section[last] = value
    return changed


def message(changed: dict[str, Any]) -> str:
    """Return the error about these params."""
    with pytest.raises(ParamsError) as raised:
        parse_params(changed)
    return str(raised.value)


def table_content() -> dict[str, Any]:
    """Return a params.yaml for a table, with the keys of images at their defaults."""
    table = of_kind(OWN, "table_classification")
    table["train"] |= {
        "network": "tabm",
        "network_arguments": TabmArguments().model_dump(),
    }
    return table
