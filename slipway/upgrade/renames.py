"""The table of renamed public names, `renames.yaml`, as `slipway upgrade` reads it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field
from ruamel.yaml import YAML

from slipway.system.contract import Contract

PATH = Path(__file__).with_name("renames.yaml")


class RenamesTable(Contract):
    """The content of `renames.yaml`; the comments there say what each part is for."""

    since: int = Field(alias="from")
    to: int
    params: dict[str, str]
    params_value: dict[str, dict[str | int | float, Any]]
    params_added: dict[str, Any]
    pipeline: dict[str, str]
    artifact: dict[str, str]
    file_format: dict[str, dict[str, str]]
    metric: dict[str, str]
    endpoint: dict[str, dict[str, str]]
    command: dict[str, str]
    env: dict[str, str]
    service_metric: dict[str, str]
    service_metric_label: dict[str, dict[str, str]]
    alert: dict[str, str]


@cache
def table() -> RenamesTable:
    """Read `renames.yaml`."""
    return RenamesTable.model_validate(YAML(typ="safe", pure=True).load(PATH.read_bytes()))


def renamed_text(text: str, table: RenamesTable) -> str:
    """Return an edited dvc.yaml with the new names of commands, params and files."""
    for old, new in (table.params | table.artifact).items():
        text = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w-]|\.\w)", new, text)
    for old, new in table.pipeline.items():
        text = text.replace(old, new)
    return text
