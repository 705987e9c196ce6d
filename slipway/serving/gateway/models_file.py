"""Reads the TOML file that lists the models behind one address.

```toml
[models.digits]
folder = "../digits"      # a project, or a folder with artifacts/; relative to this file
max_memory_mib = 1500     # of all its processes; above it, this model is started again
niceness = 10             # its processes run after those of a lower niceness: 0 to 19
```
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.serving.auth.extension import AuthSettings
from slipway.serving.extensions import SECTIONS
from slipway.serving.metrics.gauges import memory_limit_bytes
from slipway.serving.process.launch import ENVIRONMENT, read_environment
from slipway.serving.settings import (
    PREFIX,
    Settings,
    SettingsError,
    checked_model_name,
    read_settings,
)

_MAX_BYTES = 1 << 20
_EXAMPLE = '[models.NAME] with folder = "PROJECT"'


class _Entry(BaseModel):
    """The table of one model: its folder and memory limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    folder: Annotated[str, Field(min_length=1)]
    max_memory_mib: Annotated[int, Field(ge=64)] | None = None
    niceness: Annotated[int, Field(ge=0, le=19)] = 0


class _File(BaseModel):
    """The content of the file: a table for each model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    models: Annotated[dict[str, _Entry], Field(min_length=1, max_length=64)]


@dataclass(frozen=True)
class HostedModel:
    """One model: its name in URLs, its folder, and the settings in the folder's serving.env."""

    name: str
    folder: Path
    max_memory_bytes: int | None
    settings: Settings
    niceness: int = 0  # above that of the gateway

    @property
    def allows_remote(self) -> bool:
        """True if the model's settings admit callers from other machines. Reads no key file."""
        own = self.settings.section(AuthSettings)
        return own.keys is not None or own.disable_auth


def read_models(path: Path, environment: Mapping[str, str] | None = None) -> list[HostedModel]:
    """Read the models of a file, in its order.

    Raises SettingsError if the file, a name, a folder or a serving.env is wrong, if two models
    share a folder, if the limits of memory add up to more than the machine or the container has,
    or if SLIPWAY_ variables of the environment would reach every model.
    """
    given = os.environ if environment is None else environment
    if names := sorted(name for name in given if name.startswith(PREFIX)):
        raise SettingsError(
            f"the environment sets {', '.join(names)}, which would apply to every model. Unset "
            f"them, and write them into the {ENVIRONMENT} of each model's folder."
        )
    try:
        with path.open("rb") as file:
            content = tomllib.loads(file.read(_MAX_BYTES).decode())
        entries = _File.model_validate(content).models
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}. Expected {_EXAMPLE}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}. Expected {_EXAMPLE}.") from None
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise SettingsError(f"{path}: {place}: {wrong['msg']}. Expected {_EXAMPLE}.") from None
    models = [_hosted(path, name, entry) for name, entry in entries.items()]
    seen: dict[Path, str] = {}
    for model in models:
        if model.folder in seen:
            raise SettingsError(
                f"{path}: {seen[model.folder]} and {model.name} are the same folder, "
                f"{model.folder}, and would share its state. Name each folder once."
            )
        seen[model.folder] = model.name
    limits = {
        model.name: model.max_memory_bytes >> 20 for model in models if model.max_memory_bytes
    }
    if (total := sum(limits.values())) > (available := memory_limit_bytes() >> 20):
        parts = ", ".join(f"{name} {limit}" for name, limit in limits.items())
        raise SettingsError(
            f"{path}: max_memory_mib of all models is {total} ({parts}), and this machine or "
            f"container has {available} MiB. Lower the limits, or serve fewer models."
        )
    return models


def _hosted(path: Path, name: str, entry: _Entry) -> HostedModel:
    try:
        checked_model_name(name)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}.") from None
    folder = (path.parent / entry.folder).resolve()
    if not folder.is_dir():
        raise SettingsError(
            f"{path}: models.{name}.folder {entry.folder!r} is no folder, expected a project, "
            "relative to this file."
        )
    own = folder / ENVIRONMENT
    variables = read_environment(own) if own.is_file() else {}
    memory = entry.max_memory_mib
    return HostedModel(
        name,
        folder,
        memory * 2**20 if memory else None,
        read_settings(SECTIONS, variables),
        entry.niceness,
    )
