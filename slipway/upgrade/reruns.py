"""Predicts which stages DVC will run again: compares dvc.lock with params, pipeline and code."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.params import value_at
from slipway.config.yaml_files import read_yaml
from slipway.kinds.code_digest import CODE_DIGESTS, recall, stage_digest, stage_names
from slipway.system.errors import SchemaError

_CODE = "code"  # the stage that writes the digests of the others
_PARAMS = "params.yaml"
_MAX_NAMED = 3  # keys in one reason
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*([\w.]+)\s*\}")


@dataclass(frozen=True)
class Rerun:
    """A stage that will run again."""

    stage: str
    reasons: list[str]


def reruns(
    folder: Path, pipeline: Mapping[str, Any], content: Mapping[str, Any], names: Mapping[str, str]
) -> list[Rerun]:
    """List the stages of the project `folder` that will run again, in the order of dvc.yaml.

    Args:
        pipeline: the content that dvc.yaml will have.
        content: the content that params.yaml will have.
        names: new params keys by old key; these are described as renamed.
    """
    stages: Mapping[str, Any] = pipeline.get("stages") or {}
    locked: Mapping[str, Any] = _loaded(folder / "dvc.lock").get("stages") or {}
    recall(folder)
    with_digest = stage_names(folder)
    found: dict[str, Rerun] = {}
    for stage, entry in stages.items():
        if stage == _CODE:
            continue
        reasons = list(_reasons(stage, entry, locked.get(stage), content, names))
        digests = locked.get(stage, {}).get("params", {}).get(CODE_DIGESTS.name, {})
        old = digests.get(stage)
        if old is not None and stage in with_digest and old != stage_digest(folder, stage):
            reasons.append("its code changed")
        if reasons:
            found[stage] = Rerun(stage, reasons)
            continue
        needed = _paths(entry, ("deps",), content)
        before = [
            other
            for other in found
            if _overlap(_paths(stages[other], ("outs", "metrics"), content), needed)
        ]
        if before:
            reason = f"if {' or '.join(before)} writes other results"
            found[stage] = Rerun(stage, [reason])
    return list(found.values())


def _reasons(
    stage: str,
    entry: Mapping[str, Any],
    locked: Mapping[str, Any] | None,
    content: Mapping[str, Any],
    names: Mapping[str, str],
) -> Iterator[str]:
    if locked is None:
        yield "never run, says dvc.lock"
        return
    if locked.get("cmd") != (command := _resolved(entry["cmd"], content)):
        yield f"its command is now `{command}`"
    keys = [key for key in entry.get("params", []) if isinstance(key, str)]
    new = dict(_flat({key: value_at(content, key) for key in keys}))
    old = dict(_flat(locked.get("params", {}).get(_PARAMS, {})))
    renamed = [names[key] for key in old if key in names]
    changed = [
        key
        for key in (*new, *old)
        if new.get(key, ...) != old.get(key, ...) and key not in names and key not in renamed
    ]
    for label, found in (("renamed", renamed), ("changed", list(dict.fromkeys(changed)))):
        if found:
            yield f"params {label}: {_listed(found)}"
    for label, groups in (("dependencies", ("deps",)), ("outputs", ("outs", "metrics"))):
        before = {entry["path"] for group in groups[:1] for entry in locked.get(group, [])}
        if other := sorted(before ^ set(_paths(entry, groups, content))):
            yield f"{label} changed: {_listed(other)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _paths(
    entry: Mapping[str, Any], groups: tuple[str, ...], content: Mapping[str, Any]
) -> list[str]:
    """Return the paths of a stage; an entry with options is a mapping of one path."""
    entries = [one for group in groups for one in entry.get(group, [])]
    names = [one if isinstance(one, str) else next(iter(one)) for one in entries]
    return [_resolved(name, content) for name in names]


def _resolved(text: str, content: Mapping[str, Any]) -> str:
    return _VARIABLE.sub(lambda found: str(value_at(content, found[1])), text)


def _overlap(outs: list[str], deps: list[str]) -> bool:
    return any(
        Path(dep).is_relative_to(out) or Path(out).is_relative_to(dep)
        for out in outs
        for dep in deps
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _loaded(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SchemaError(f"{error}. Restore {path} with git, or remove it.") from error
    return content if isinstance(content, dict) else {}
