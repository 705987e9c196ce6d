"""Writes and merges the dvc.yaml of a project, for `slipway init` and `slipway upgrade`.

Its first lines hold a digest of the others. The digest reveals if the user edited the file, for
example to add a dependency; an edited file is merged, not replaced. RECORD stores the text as it
was written, for this merge.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import SchemaError

RECORD = ".slipway/pipeline.yaml"  # in the project; DVC would read a file that is named dvc.yaml
_HEAD = "# Written by Slipway. `slipway upgrade` renews this file unless somebody edited it.\n"
_OUR_CODE = ("slipway/", "stages/", "serving/")
_DIGEST = "# SHA-256 of the other lines: {}\n"
_WRITTEN = re.compile(re.escape(_HEAD) + _DIGEST.format("([0-9a-f]{64})"))
_WITHOUT_BRACES = str.maketrans("{}", "()")


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


def pipeline_text() -> str:
    """Return the text of a project's dvc.yaml: the default one without code dependencies."""
    text = asset("dvc.yaml").read_text(encoding="utf-8")
    body = text.replace(
        "    deps: [params.yaml, slipway, transforms]\n", "    always_changed: true\n"
    )
    return f"{_HEAD}{_DIGEST.format(files.sha256_bytes(body.encode()))}{body}"


def is_unedited(text: str) -> bool:
    """Return True if the digest in the first lines of a dvc.yaml fits its other lines."""
    head = _WRITTEN.match(text)
    return head is not None and files.sha256_bytes(text[head.end() :].encode()) == head[1]


def is_edit_of(text: str, written: str) -> bool:
    """Return True if `text` is an edited version of `written`: both have the same first lines."""
    head = _WRITTEN.match(text)
    return head is not None and written.startswith(head[0])


def has_head(text: str) -> bool:
    """Return True if a dvc.yaml begins with the lines, with a digest, that Slipway writes."""
    return _WRITTEN.match(text) is not None


def with_new_head(text: str) -> str:
    """Return the text with this version's first lines in place of its own.

    A text without such lines is returned unchanged.
    """
    head, new = _WRITTEN.match(text), _WRITTEN.match(pipeline_text())
    return new[0] + text[head.end() :] if head and new else text


def parsed(text: str) -> dict[str, Any]:
    """Parse a dvc.yaml. Raises SchemaError if it is not a mapping."""
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


def without_our_code(content: dict[str, Any]) -> dict[str, Any]:
    """Remove Slipway's own files, which version 0 of dvc.yaml listed, from all dependencies."""
    for entry in content["stages"].values():
        if isinstance(entry, dict) and isinstance(deps := entry.get("deps"), list):
            entry["deps"] = [one for one in deps if not str(one).startswith(_OUR_CODE)]
    return content
