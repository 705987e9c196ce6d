"""The dvc.yaml of a project: written by `slipway init`, renewed by `slipway upgrade`.

Its first lines hold a digest of the others. An edit, such as a further dependency, shows thereby,
and the file is not replaced.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import SchemaError

_HEAD = "# Written by Slipway. `slipway upgrade` renews this file unless somebody edited it.\n"
_DIGEST = "# SHA-256 of the other lines: {}\n"
_WRITTEN = re.compile(re.escape(_HEAD) + _DIGEST.format("([0-9a-f]{64})"))
_LISTS = ("params", "deps", "outs", "metrics")
_OUR_CODE = ("slipway", "stages", "serving")


def pipeline_text() -> str:
    """Return the dvc.yaml of a project: the embedded one, without the code as dependencies."""
    text = asset("dvc.yaml").read_text(encoding="utf-8")
    body = text.replace(
        "    deps: [params.yaml, slipway, transforms]\n", "    always_changed: true\n"
    )
    return f"{_HEAD}{_DIGEST.format(files.sha256_bytes(body.encode()))}{body}"


def is_unedited(text: str, former: list[str]) -> bool:
    """Return True if Slipway wrote this dvc.yaml, or if it is one of the `former` ones."""
    text = text.replace("\r\n", "\n")
    head = _WRITTEN.match(text)
    if head is None:
        return files.sha256_bytes(text.encode()) in former
    return files.sha256_bytes(text[head.end() :].encode()) == head[1]


def parsed(text: str) -> dict[str, Any]:
    """Parse a dvc.yaml; SchemaError if it is no mapping."""
    try:
        content = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise SchemaError(
            f"dvc.yaml is not YAML: {error}. Restore it with git, then run `slipway upgrade` again."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), dict):
        raise SchemaError(
            "dvc.yaml has no stages, expected a mapping `stages`. Restore it with git, then run "
            "`slipway upgrade` again."
        )
    return content


def missing_parts(text: str) -> list[str]:
    """List what an edited dvc.yaml lacks of this version's, and the code that it still names."""
    found, expected = parsed(text)["stages"], parsed(pipeline_text())["stages"]
    return [line for stage, entry in expected.items() for line in _missing(stage, entry, found)]


def _missing(stage: str, entry: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    if stage not in found:
        yield f"{stage}: the stage is missing"
        return
    theirs = found[stage]
    if theirs.get("cmd") != entry["cmd"]:
        yield f"{stage}: cmd is {theirs.get('cmd')!r}, in this version {entry['cmd']!r}"
    for group in _LISTS:
        known = [_plain(one) for one in theirs.get(group, [])]
        if lacks := [one for one in map(_plain, entry.get(group, [])) if one not in known]:
            yield f"{stage}: {group} lacks {', '.join(lacks)}"
    deps = [_plain(one) for one in theirs.get("deps", [])]
    if code := [one for one in deps if Path(one).parts[0] in _OUR_CODE]:
        more = f" and {len(code) - 1} more" if len(code) > 1 else ""
        yield f"{stage}: deps names code that code.yaml stands for now: {code[0]}{more}"


def _plain(entry: Any) -> str:
    """Return an entry of a list in a comparable form; one with options is a mapping."""
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, options),) = entry.items()
        return f"{name}: {options}" if isinstance(options, list) else str(name)
    return str(entry)
