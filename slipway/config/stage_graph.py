"""Reads the stages of `dvc.yaml`, with their params, dependencies and outputs."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.params import read_content, value_at
from slipway.config.yaml_files import read_yaml
from slipway.system.errors import SchemaError

PIPELINE = Path("dvc.yaml")
RESTORE = "Restore it with git, or remove it and run `slipway run`."


@dataclass(frozen=True)
class Pipeline:
    """The stages of `dvc.yaml`, with the keys of params.yaml, the inputs and outputs of each."""

    params: dict[str, list[str]]
    deps: dict[str, list[str]]
    outs: dict[str, list[str]]  # outputs by stage, metrics included
    metrics: dict[str, list[str]]

    def before(self, stage: str) -> list[str]:
        """Return the stages whose outputs `stage` depends on, directly or not."""
        found: set[str] = set()
        waiting = [stage]
        while waiting:
            deps = self.deps.get(waiting.pop(), [])
            new = {name for name, outs in self.outs.items() if _overlap(outs, deps)} - found
            found |= new
            waiting += new
        return [name for name in self.outs if name in found]


def read_pipeline(content: dict[str, Any] | None = None) -> Pipeline:
    """Read the stages of `dvc.yaml`; without the file, every stage depends on every key.

    `content` is that of params.yaml; the file is read if it is None.
    """
    stages = load_mapping(PIPELINE).get("stages") or {}
    if content is None:
        content = read_content()

    def resolved(path: str) -> str:  # like DVC, which takes ${a.b}, ${ a.b } and ${a[b]}
        path = re.sub(r"(?<!\\)\$\{(.*?)\}", lambda found: value(found[1].strip()), path)
        return path.replace("\\${", "${")

    def value(key: str) -> str:
        return str(value_at(content, key.replace("[", ".").replace("]", "")))

    def paths(stage: dict[str, Any], *kinds: str) -> list[str]:
        entries = [entry for kind in kinds for entry in stage.get(kind, [])]
        return [
            resolved(entry if isinstance(entry, str) else next(iter(entry))) for entry in entries
        ]

    return Pipeline(
        params={
            name: [key for key in stage.get("params", []) if isinstance(key, str)]
            for name, stage in stages.items()
        },
        deps={name: paths(stage, "deps") for name, stage in stages.items()},
        outs={name: paths(stage, "outs", "metrics") for name, stage in stages.items()},
        metrics={name: paths(stage, "metrics") for name, stage in stages.items()},
    )


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file of DVC or of the stage `code`; empty if it is missing."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SchemaError(f"{error}. {RESTORE}") from error
    if not isinstance(content, dict):
        raise SchemaError(
            f"{path} holds {type(content).__name__}, expected a mapping. Restore it with git."
        )
    return content


def _overlap(outs: list[str], deps: list[str]) -> bool:
    """Return True if a path of `deps` equals one of `outs`, or is below or above one."""
    made, used = ([Path(os.path.normpath(path)) for path in paths] for paths in (outs, deps))
    return any(out.is_relative_to(dep) or dep.is_relative_to(out) for out in made for dep in used)
