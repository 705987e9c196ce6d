"""Reads the stages of `dvc.yaml`, with their params, dependencies and outputs.

The keys that a stage reads are below `meta`: DVC would refuse those that params.yaml leaves out.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.params import read_content, value_at
from slipway.config.yaml_files import read_yaml
from slipway.system.errors import SchemaError

PIPELINE = Path("dvc.yaml")
_WITHOUT_BRACES = str.maketrans("{}", "()")
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
            new = {name for name, outs in self.outs.items() if overlap(outs, deps)} - found
            found |= new
            waiting += new
        return [name for name in self.outs if name in found]


def read_pipeline(content: dict[str, Any] | None = None) -> Pipeline:
    """Read the stages of `dvc.yaml`; without the file, every stage depends on every key.

    `content` is that of params.yaml; the file is read if it is None.
    """
    stages = load_mapping(PIPELINE).get("stages") or {}
    return pipeline_of(stages, read_content() if content is None else content)


def pipeline_of(stages: Mapping[str, Any], content: Mapping[str, Any]) -> Pipeline:
    """Return the Pipeline of the `stages` of a `dvc.yaml`, given the content of params.yaml."""

    def paths(stage: dict[str, Any], *kinds: str) -> list[str]:
        entries = [entry for kind in kinds for entry in stage.get(kind, [])]
        names = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
        return [resolved(name, content) for name in names]

    return Pipeline(
        params={
            name: [
                *stage.get("meta", {}).get("params", []),
                *[key for key in stage.get("params", []) if isinstance(key, str)],
            ]
            for name, stage in stages.items()
        },
        deps={name: paths(stage, "deps") for name, stage in stages.items()},
        outs={name: paths(stage, "outs", "metrics") for name, stage in stages.items()},
        metrics={name: paths(stage, "metrics") for name, stage in stages.items()},
    )


def resolved(text: str, content: Mapping[str, Any]) -> str:
    """Insert the values of params.yaml as DVC does, which takes ${a.b}, ${ a.b } and ${a[b]}."""

    def value(found: re.Match[str]) -> str:
        key = found[1].strip().replace("[", ".").replace("]", "")
        return str(value_at(content, key))

    return re.sub(r"(?<!\\)\$\{(.*?)\}", value, text).replace("\\${", "${")


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file of DVC or of the stage `code`; empty if it is missing."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SchemaError(f"{str(error).removesuffix('.')}. {RESTORE}") from error
    if not isinstance(content, dict):
        raise SchemaError(
            f"{path} holds {type(content).__name__}, expected a mapping. Restore it with git."
        )
    return content


def overlap(outs: list[str], deps: list[str]) -> bool:
    """Return True if a path of `deps` equals one of `outs`, or is below or above one."""
    made, used = ([Path(os.path.normpath(path)) for path in paths] for paths in (outs, deps))
    return any(out.is_relative_to(dep) or dep.is_relative_to(out) for out in made for dep in used)


def path_mistakes(project: Path) -> list[str]:
    """Return the reason why DVC cannot run in the folder `project`, or nothing.

    DVC formats its lines of progress with the path in them, so braces make it fail after a stage.
    """
    braced = [part for part in (project.absolute(), *project.absolute().parents) if _braces(part)]
    if not braced:
        return []
    moves = [
        shlex.join(["mv", str(part), str(part.with_name(part.name.translate(_WITHOUT_BRACES)))])
        for part in braced
    ]
    return [
        f"the path of the project, {str(project.absolute())!r}, has braces, which DVC cannot "
        f"handle: it expects a path without {{ and }}. Name another folder, or rename this one: "
        f"{' && '.join(moves)}"
    ]


def _braces(part: Path) -> set[str]:
    return {*part.name} & {*"{}"}
