"""Predicts which stages DVC will run again: compares dvc.lock with params, pipeline and code."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.params import differing, flat, value_at
from slipway.config.stage_graph import Pipeline, load_mapping, overlap, pipeline_of, resolved
from slipway.kinds.code_digest import CODE_DIGESTS, recall, stage_digest, stage_names

_CODE = "code"  # the stage that writes the digests of the others
_PARAMS = "params.yaml"
_MAX_NAMED = 3  # keys in one reason


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
    locked: Mapping[str, Any] = load_mapping(folder / "dvc.lock").get("stages") or {}
    graph = pipeline_of(stages, content)
    recall(folder)
    with_digest = stage_names(folder)
    found: dict[str, Rerun] = {}
    for stage, entry in stages.items():
        if stage == _CODE:
            continue
        reasons = list(_reasons(stage, entry, graph, locked.get(stage), content, names))
        digests = locked.get(stage, {}).get("params", {}).get(CODE_DIGESTS.name, {})
        old = digests.get(stage)
        if old is not None and stage in with_digest and old != stage_digest(folder, stage):
            reasons.append("its code changed")
        if reasons:
            found[stage] = Rerun(stage, reasons)
            continue
        before = [other for other in found if overlap(graph.outs[other], graph.deps[stage])]
        if before:
            reason = f"if {' or '.join(before)} writes other results"
            found[stage] = Rerun(stage, [reason])
    return list(found.values())


def _reasons(
    stage: str,
    entry: Mapping[str, Any],
    graph: Pipeline,
    locked: Mapping[str, Any] | None,
    content: Mapping[str, Any],
    names: Mapping[str, str],
) -> Iterator[str]:
    if locked is None:
        yield "never run, says dvc.lock"
        return
    command = resolved(entry["cmd"], content)
    if locked.get("cmd") != command:
        yield f"its command is now `{command}`"
    new = dict(flat({key: value_at(content, key) for key in graph.params[stage]}))
    old = dict(flat(locked.get("params", {}).get(_PARAMS, {})))
    renamed = [names[key] for key in old if key in names]
    expected = {*names, *renamed}
    yield from _listed("params renamed", renamed)
    yield from _listed(
        "params changed", [key for key in differing(old, new) if key not in expected]
    )
    for label, group, paths in (
        ("dependencies changed", "deps", graph.deps[stage]),
        ("outputs changed", "outs", graph.outs[stage]),
    ):
        before = {entry["path"] for entry in locked.get(group, [])}
        yield from _listed(label, sorted(before ^ set(paths)))


def _listed(label: str, names: list[str]) -> Iterator[str]:
    """Yield the label and the first of the names; nothing if there are none."""
    if names:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        yield f"{label}: {', '.join(names[:_MAX_NAMED])}{more}"
