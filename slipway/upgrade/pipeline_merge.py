"""Three-way merge of the content of dvc.yaml: a former version, the user's file, this version.

Lists such as `outs` are merged entry by entry, identified by path; the order is the user's. Nothing
of the user's file is lost: if both sides changed an entry, the user's change stays and the conflict
is reported.
"""

import textwrap
from collections.abc import Mapping
from typing import Any, Final

from slipway.config.yaml_files import as_plain_yaml

_ABSENT: Final = object()
_LONGEST = 100  # characters shown of a value in a conflict


def merge_pipelines(
    base: Mapping[str, Any], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return (merged content, conflicts in words).

    Args:
        base: the content from which `theirs` was edited, or its part shared with a former version.
        theirs: the user's content.
        ours: the content of this version.
    """
    conflicts: list[str] = []
    return _mappings(base, theirs, ours, "", conflicts), conflicts


def shared_part(base: Any, theirs: Any) -> Any:
    """Return the part of `base` that the user's file also has.

    It replaces an unknown base of a merge: new parts are added, and only parts that this version no
    longer has are removed.
    """
    if isinstance(base, dict) and isinstance(theirs, dict):
        return {key: shared_part(base[key], theirs[key]) for key in base if key in theirs}
    if isinstance(base, list) and isinstance(theirs, list):
        return [entry for entry in base if entry in theirs]
    return base


def keyed(items: Any) -> dict[str, Any] | None:
    """Return the options of each entry of a list by its name; None for another list.

    An entry is a text, with no options, or a mapping of one name to its options.
    """
    entries: dict[str, Any] = {}
    for item in items:
        if isinstance(item, str):
            name, options = item, None
        elif isinstance(item, dict) and len(item) == 1:
            ((name, options),) = item.items()
        else:
            return None
        if name in entries or not isinstance(name, str):
            return None
        entries[name] = options
    return entries


def _merged(base: Any, theirs: Any, ours: Any, place: str, conflicts: list[str]) -> Any:
    if theirs == ours or ours == base:
        return theirs
    if theirs == base:
        return ours
    if (
        isinstance(theirs, dict)
        and isinstance(ours, dict)
        and ("cmd" in theirs) == ("cmd" in ours)  # else a stage has another form, such as `foreach`
    ):
        return _mappings(base if isinstance(base, dict) else {}, theirs, ours, place, conflicts)
    if isinstance(theirs, list) and isinstance(ours, list):
        mine, new = keyed(theirs), keyed(ours)
        former = keyed(base) if isinstance(base, list) else {}
        if mine is not None and new is not None and former is not None:
            found = _mappings(former, mine, new, place, conflicts)
            items = [
                name if options is None else {name: options} for name, options in found.items()
            ]
            return items or _ABSENT
    conflicts.append(
        f"{place}: your file has {_shown(theirs)}, this version has {_shown(ours)}"
        + (f" in place of {_shown(base)}" if base is not _ABSENT else "")
        + "; expected one of them. Yours stays: change it by hand unless you mean it"
    )
    return theirs


def _mappings(
    base: Mapping[str, Any],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    place: str,
    conflicts: list[str],
) -> dict[str, Any]:
    values = {
        key: _merged(
            base.get(key, _ABSENT),
            theirs.get(key, _ABSENT),
            ours.get(key, _ABSENT),
            f"{place}.{key}" if place else str(key),
            conflicts,
        )
        for key in [*theirs, *(key for key in ours if key not in theirs)]
    }
    order = [key for key in theirs if values[key] is not _ABSENT]
    behind = 0  # where the next key goes that only `ours` has
    for key in ours:
        if key not in theirs and values[key] is not _ABSENT:
            order.insert(behind, key)
        behind = order.index(key) + 1 if key in order else behind
    return {key: values[key] for key in order}


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "no such entry"
    return f"`{textwrap.shorten(as_plain_yaml(value), _LONGEST, placeholder=' ...')}`"
