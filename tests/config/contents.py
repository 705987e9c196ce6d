"""Contents of params.yaml that tests change, and the message that a mistake in one gets."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.network_arguments import TabmArguments
from slipway.config.params import parse_params
from slipway.system.errors import ParamsError
from tests.project_params import of_kind

OWN: dict[str, Any] = yaml.safe_load(Path("params.yaml").read_text())
CONTENT = parse_params(OWN).model_dump(mode="json")  # with the keys of every kind


def content(**changes: Any) -> dict[str, Any]:
    """Return the default params with dotted keys changed, as in content(train__epochs=3)."""
    changed = copy.deepcopy(CONTENT)
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
    """Return a params.yaml for a table, without the keys of images."""
    table = of_kind(OWN, "table_classification")
    table["train"] |= {
        "network": "tabm",
        "network_arguments": yaml.safe_load(TabmArguments.EXAMPLE),
    }
    return table
