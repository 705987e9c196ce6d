"""`slipway upgrade`: moves a project of an older version to the installed one."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config import pipeline
from slipway.config.edit import difference
from slipway.config.params import differing, flat, value_at
from slipway.config.stage_graph import Pipeline, load_mapping, overlap, pipeline_of, resolved
from slipway.kinds.code_digest import CODE_DIGESTS, recall, stage_digest, stage_names
from slipway.system import files
from slipway.system.errors import ParamsError
from slipway.upgrade import renames
from slipway.upgrade.params import ParamsMigration, migrate
from slipway.upgrade.pipeline_merge import merge_pipelines, shared_part
from slipway.upgrade.yaml_edit import edited_text

_PARAMS, _PIPELINE = "params.yaml", "dvc.yaml"
_PIPELINE_0 = Path(__file__).with_name("pipeline_0.yaml")
# Files in which a project may name environment variables, commands, metrics and artifacts.
_ENDINGS = (
    ".env",
    ".gitignore",
    ".ipynb",
    ".json",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".yaml",
    ".yml",
    "Makefile",
)
_NOT_READ = ("artifacts", "data", "metrics", "reports", "node_modules", "__pycache__", "venv")
_MAX_BYTES = 1_000_000
_CODE = "code"  # the stage that writes the digests of the others
_MAX_NAMED = 3  # keys in one reason


@dataclass(frozen=True)
class Rerun:
    """A stage that will run again."""

    stage: str
    reasons: list[str]


@dataclass(frozen=True)
class ProjectUpgrade:
    """The changes of an upgrade, proposed or already written."""

    params: ParamsMigration
    patch: str  # unified diff; "" if nothing changes
    pipeline_note: str
    conflicts: list[str]  # of dvc.yaml
    mentions: list[str]  # old names in other files, as "FILE:LINE: OLD is now NEW"
    leftovers: list[str]  # files that no stage reads any longer
    reruns: list[Rerun]

    def text(self) -> str:
        """Return the upgrade in words, for a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.patch:
            yield self.patch
        yield f"params.yaml: {self._params_note()}"
        yield f"dvc.yaml: {self.pipeline_note}"
        titles = {
            "dvc.yaml has conflicts": self.conflicts,
            "other files with former names, which are left as they are": self.mentions,
            "files that stages no longer read": self.leftovers,
            "stages that the next run repeats": list(_grouped(self.reruns)),
        }
        for title, found in titles.items():
            if found:
                yield f"{title}:"
                yield from (f"  {line}" for line in found)
        if not self.reruns:
            yield "the next run repeats no stage"

    def _params_note(self) -> str:
        params, newest = self.params, renames.table().to
        counts = {
            "keys renamed": len(params.renamed),
            "values replaced": len(params.replaced),
            "keys added": len(params.added),
        }
        if not any(counts.values()):
            return f"already has version {newest}"
        changes = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
        return f"from version {params.version} to {newest}: {changes}"


def upgrade(folder: Path, *, apply: bool) -> ProjectUpgrade:
    """Compute the upgrade of a project's params.yaml and dvc.yaml; write it only with `apply`.

    Raises ParamsError or SchemaError for a file that is not understood; nothing is written then.
    """
    params = migrate(folder / _PARAMS)
    before = {_PARAMS: _read(folder / _PARAMS), _PIPELINE: _read(folder / _PIPELINE)}
    after = {_PARAMS: params.text, _PIPELINE: before[_PIPELINE]}
    note, conflicts = "comes with the code, by git", list[str]()
    table = renames.table()
    is_clone = (folder / "slipway/stages").is_dir()
    if not is_clone:
        after[_PIPELINE], note, conflicts = _merged(folder, before[_PIPELINE])
    result = ProjectUpgrade(
        params=params,
        patch="".join(difference(before[name], after[name], name) for name in after),
        pipeline_note=note,
        conflicts=conflicts,
        mentions=[] if is_clone else list(_mentions(folder)),
        leftovers=list(_leftovers(folder)),
        reruns=reruns(folder, pipeline.parsed(after[_PIPELINE]), params.content, table.params),
    )
    if apply:
        for name, text in after.items():
            if text != before[name]:
                files.write_text((folder / name).resolve(), text)
        if not is_clone:
            files.write_text(folder / pipeline.RECORD, pipeline.pipeline_text())
    return result


def _merged(folder: Path, text: str) -> tuple[str, str, list[str]]:
    """Return (new text of dvc.yaml, description of the change, conflicts)."""
    table, ours = renames.table(), pipeline.pipeline_text()
    theirs = text.replace("\r\n", "\n")
    if theirs == ours:
        return text, "is as this version writes it", []
    if pipeline.is_unedited(theirs) or theirs == _PIPELINE_0.read_text(encoding="utf-8"):
        return ours, "was not edited, so this version's takes its place", []
    renamed = renames.renamed_text(pipeline.with_new_head(theirs), table)
    mine = pipeline.without_our_code(pipeline.parsed(renamed))
    written = _written(folder, theirs)
    if written is not None:
        base = pipeline.parsed(renames.renamed_text(written, table))
    else:
        former = _PIPELINE_0.read_text(encoding="utf-8")
        base = shared_part(pipeline.parsed(renames.renamed_text(former, table)), mine)
    content, conflicts = merge_pipelines(base, mine, pipeline.parsed(ours))
    merged = edited_text(renamed, content)
    note = "was edited; the changes of this version are merged into it"
    if merged == theirs:
        note = "was edited; it has all of this version"
    elif written is None:
        note += ". Its original text is not recorded: lines that you had removed are back"
    return merged if theirs == text else merged.replace("\n", "\r\n"), note, conflicts


def _written(folder: Path, text: str) -> str | None:
    """Return the text from which a dvc.yaml was edited; None if it is unknown."""
    record, known = folder / pipeline.RECORD, [pipeline.pipeline_text()]
    if record.is_file() and pipeline.is_unedited(recorded := record.read_text(encoding="utf-8")):
        known.insert(0, recorded)
    if pipeline.has_head(text):
        return next((one for one in known if pipeline.is_edit_of(text, one)), None)
    return known[0] if len(known) > 1 else None


def _grouped(reruns: list[Rerun]) -> Iterator[str]:
    """Describe the reruns; neighbours with the same reasons share a line."""
    for reasons, group in itertools.groupby(reruns, key=lambda rerun: rerun.reasons):
        yield f"{', '.join(rerun.stage for rerun in group)}: {'; '.join(reasons)}"


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ParamsError(
            f"{path} is missing, expected a project. Run from the project's folder; "
            "slipway init makes a new one."
        ) from None
    except UnicodeDecodeError as error:
        raise ParamsError(f"{path} is not UTF-8: {error}. Restore it with git.") from error


def _mentions(folder: Path) -> Iterator[str]:
    """Find former names in the project's own scripts and settings."""
    table = renames.table()
    names = {
        **(table.metric | table.service_metric | table.alert),
        **(table.env | table.artifact | table.command),
    }
    longest_first = sorted(names, key=len, reverse=True)  # a command with an option first
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(old)}(?![\w-])" for old in longest_first))
    for path in _texts(folder):
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            for old in dict.fromkeys(pattern.findall(line)):
                yield f"{path.relative_to(folder)}:{number}: {old} is now {names[old]}"


def _texts(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _NOT_READ
        )
        for name in sorted(names):
            path = Path(place, name)
            is_text = name.endswith(_ENDINGS) and name not in (_PARAMS, _PIPELINE)
            if is_text and path.is_file() and path.stat().st_size <= _MAX_BYTES:
                yield path


def _leftovers(folder: Path) -> Iterator[str]:
    """List outputs of the former version; the user's reference model has to be released again."""
    for old, new in renames.table().artifact.items():
        if not (folder / old).exists():
            continue
        advice = "remove it after the next run"
        if new == "artifacts/reference_model":
            advice = "its format is a former one: run slipway release once a model is certified"
        yield f"{old}: {new} takes its place; {advice}"


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
