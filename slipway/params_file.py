"""Changes single values of `params.yaml` and leaves everything else, comments too, as it is."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from slipway import files
from slipway.errors import ParamsError
from slipway.params import parse_params

_WIDTH = 200  # lines are not wrapped anew


def changed_text(text: str, changes: Mapping[str, Any]) -> str:
    """`text` with other values, each named "section.key"; ParamsError if a key is not there or the values do not fit together."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))
    content = yaml.load(text)
    for place, value in changes.items():
        section, _, key = place.partition(".")
        if key not in content.get(section, {}):
            raise ParamsError(f"params.yaml has no key {place}.")
        content[section][key] = value
    buffer = io.StringIO()
    yaml.dump(content, buffer)
    parse_params(YAML(typ="safe", pure=True).load(buffer.getvalue()))
    return buffer.getvalue()


def change(path: Path, changes: Mapping[str, Any]) -> None:
    """Write the changed file in one go."""
    files.write_text(path, changed_text(path.read_text(), changes))
