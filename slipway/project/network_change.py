"""Writes the recipe of another network into params.yaml, as `slipway init` would propose it.

Keys whose right value depends on the network take the value of the new recipe, or their default.
Every other key stays as it is, unless it is what the former recipe proposed, or the new network
refuses it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipway.config.edit import ABSENT, Edit, assigned_text, changed_text, edited_text, read_text
from slipway.config.network_arguments import require_network
from slipway.config.params import (
    choices_of,
    filled,
    mistakes_in,
    other_network,
    parse_params,
    value_at,
)
from slipway.config.training import OF_NETWORK
from slipway.config.yaml_text import as_plain_yaml
from slipway.kinds.inputs import ENCODER, TIMM, network_family
from slipway.kinds.registry import KINDS
from slipway.project.inspection import inspect
from slipway.project.pretrained import FOLDER, Weights, local_weights
from slipway.project.proposal import CHOSEN, recipe_for
from slipway.project.recipe import Values, proposed_search
from slipway.system.errors import ParamsError, SlipwayError

NETWORK = "train.network"
_SECTIONS = ("precompute", "augment", "train", "audit", "export", "prune", "compile")
_NO_VALUE = (ABSENT, "")


class ChangedParams(NamedTuple):
    """The new text of params.yaml, and a report of it, line by line."""

    text: str
    lines: list[str]


def with_assignments(text: str, changes: Mapping[str, Any]) -> ChangedParams:
    """Return the text of a params.yaml with changed values, and with the recipe of a new network.

    `changes` maps keys such as "train.epochs" to values. A network that the file has already gets
    its recipe only if the file has the settings of another one. Raises ParamsError as
    `changed_text` does, and for a network that does not suit the task.
    """
    network, content = changes.get(NETWORK), read_text(text)
    task = value_at(content, "data.task")
    if isinstance(network, str) and isinstance(task, str) and task in KINDS:
        require_network(network, task, NETWORK)
        own = _network_of(content)
        former = own if network != own else other_network(content)
        if former is not None:
            return _with_recipe(text, former, network, changes)
    return ChangedParams(changed_text(text, changes), _assigned(changes))


def _network_of(content: Mapping[str, Any]) -> str:
    given = value_at(content, NETWORK)
    return given if isinstance(given, str) else choices_of(content)[0]


def _assigned(changes: Mapping[str, Any]) -> list[str]:
    return [f"params.yaml: {key}: {as_plain_yaml(value)}" for key, value in changes.items()]


def _with_recipe(text: str, former: str, network: str, given: Mapping[str, Any]) -> ChangedParams:
    """Write the recipe of a network, then the values that the user gave with it.

    `former` is the network of the present settings, even if the file names the new one already.
    """
    content = read_text(text)
    recipes = _recipes(content, former, network, given)
    content["train"] = {**_mapping(content.get("train")), "network": former}
    changes = list(_changes(content, recipes, given))
    text = edited_text(text, [change.edit for change in changes if change.edit])
    text = assigned_text(text, given)
    for refused in list(_refused(content, text, given)):
        assert refused.edit is not None
        text = edited_text(text, [refused.edit])
        changes.append(refused)
    searched = list(_of_search(content, read_text(text)))
    text = edited_text(text, searched)
    parse_params(read_text(text))
    others = {key: value for key, value in given.items() if key != NETWORK}
    lines_by_kind = {
        "its recipe": [one.new for one in changes if one.new and one.key not in given],
        f"removed with {former}": [one.old for one in changes if one.is_removed],
        "kept, because you chose them": [one.old for one in changes if one.edit is None],
        "search tries": [
            one.place[-1] for one in searched if len(one.place) > 2 and one.value is not ABSENT
        ],
    }
    return ChangedParams(
        text,
        [
            f"params.yaml: {NETWORK}: {network} (was {former})",
            *(f"  {what}: {', '.join(named)}" for what, named in lines_by_kind.items() if named),
            *([f"  {recipes.note}"] if recipes.note else []),
            *_assigned(others),
        ],
    )


class _Change(NamedTuple):
    """The fate of one key: an edit, or none if it stays against the new recipe."""

    key: str
    present: Any
    edit: Edit | None

    @property
    def is_removed(self) -> bool:
        """True if the key is left out from now on."""
        return self.edit is not None and self.edit.value is ABSENT

    @property
    def old(self) -> str:
        """The key with its present value."""
        return f"{self.key} {as_plain_yaml(self.present)}"

    @property
    def new(self) -> str:
        """The key with its new value, or "" if it has none, or had it already."""
        if self.edit is None or self.is_removed or self.edit.value == self.present:
            return ""
        was = "" if self.present is ABSENT else f" (was {as_plain_yaml(self.present)})"
        return f"{self.key} {as_plain_yaml(self.edit.value)}{was}"


class _Recipes(NamedTuple):
    """The recipes of the former and the new network, and the reasons that init gave for values."""

    old: Values
    new: Values
    free: Values  # what init proposes without a choice of the user
    note: str = ""


def _recipes(
    content: Mapping[str, Any], former: str, network: str, given: Mapping[str, Any]
) -> _Recipes:
    data = content["data"]
    held, weights = value_at(content, "train.pretrained"), _weights(content, network, given)
    before = Weights(former, held, "") if isinstance(held, str) else None
    note = ""
    if network_family(network) == TIMM and weights is None and "train.pretrained" not in given:
        note = (
            f"it starts from fresh weights; for pretrained ones add train.pretrained=hub, or put "
            f"them into {FOLDER}/{network.partition('/')[2]}.safetensors"
        )
    try:
        summary = inspect(Path(data["path"]), data.get("sheet"))
        return _Recipes(
            recipe_for(summary, data, former, weights=before),
            recipe_for(summary, data, network, weights=weights),
            recipe_for(summary, data, None, weights=before),
            note,
        )
    except (SlipwayError, KeyError) as error:
        note = f"the length of its training is the default: {error}"
        new: Values = {NETWORK: (network, "")}
        if weights is not None:
            new["train.pretrained"] = (weights.pretrained, weights.reason)
        return _Recipes({}, new, {}, note)


def _weights(content: Mapping[str, Any], network: str, given: Mapping[str, Any]) -> Weights | None:
    """Return the pretrained weights that the user named, or that are on this machine."""
    if network_family(network) not in (TIMM, ENCODER):
        return None
    held = value_at(content, "train.pretrained")
    if "train.pretrained" in given:
        named = given["train.pretrained"]
        return Weights(network, named, CHOSEN) if isinstance(named, str) else None
    is_hub = held == "hub" and network != ENCODER
    if isinstance(held, str) and (is_hub or network == _network_of(content)):
        return Weights(network, held, "")
    found = local_weights(Path(), network)
    if found is None and network == ENCODER:
        raise ParamsError(
            f"{NETWORK} is {ENCODER!r}, but the project names no folder of one; expected a folder "
            "with config.json, model.safetensors and tokenizer.json. Name it: "
            f"slipway run {NETWORK}={ENCODER} train.pretrained=FOLDER"
        )
    return found


def _changes(
    content: Mapping[str, Any], recipes: _Recipes, given: Mapping[str, Any]
) -> Iterator[_Change]:
    """Yield the fate of each key that the file or the new recipe has.

    A value that the user changed stays if its key does not depend on the network.
    """
    mine = {f"{section}.{name}": content[section][name] for section, name in _keys_in(content)}
    for key in dict.fromkeys([NETWORK, *mine, *recipes.new]):
        present, usual = mine.get(key, ABSENT), recipes.old.get(key, _NO_VALUE)[0]
        value, reason = recipes.new.get(key, _NO_VALUE)
        former = {one[key][1] for one in (recipes.old, recipes.free) if key in one}
        if key in given and key != NETWORK:
            value, reason = given[key], CHOSEN
        change = _Change(key, present, Edit(tuple(key.split(".")), value, reason, former))
        if present is value is ABSENT:
            continue
        if key in (NETWORK, *OF_NETWORK, *given) or (value != usual and present == usual):
            yield change
        elif value != usual and ABSENT is not present != value:
            yield change._replace(edit=None)


def _refused(before: dict[str, Any], text: str, given: Mapping[str, Any]) -> Iterator[_Change]:
    """Yield the removal of further keys that the new network refuses, and the former did not."""
    content, known = read_text(text), mistakes_in(before)
    for section, name in _keys_in(content) * 2:  # without one, another may have no effect
        key, fresh = f"{section}.{name}", [one for one in mistakes_in(content) if one not in known]
        about = {one for one in fresh if key in one or one.startswith(f"{section}: {name} ")}
        is_given = any(f"{one}.".startswith(f"{key}.") for one in (*given, NETWORK))
        if not about or is_given or name not in content[section]:
            continue
        rest = {one: value for one, value in content[section].items() if one != name}
        if about - set(mistakes_in(content | {section: rest})):
            yield _Change(key, content[section][name], Edit((section, name), ABSENT))
            content |= {section: rest}


def _keys_in(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(section, name) for section in _SECTIONS for name in _mapping(content.get(section))]


def _mapping(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, dict) else {}


def _of_search(before: Mapping[str, Any], content: dict[str, Any]) -> Iterator[Edit]:
    """Yield the edits of the section `search` for a new network, if the file has this section."""
    mine = content.get("search")
    if not isinstance(mine, dict) or not isinstance(mine.get("space"), dict):
        return
    usual, new = proposed_search(filled(before)), proposed_search(filled(content))
    for key, value in new["space"].items():
        yield Edit(("search", "space", key), value)
    for key in mine["space"]:
        if key not in new["space"] and any(f"{key}.".startswith(f"{one}.") for one in OF_NETWORK):
            yield Edit(("search", "space", key), ABSENT)
    halving, was_removed = new.get("halving", ABSENT), "halving" in usual and "halving" not in mine
    if not was_removed and mine.get("halving", ABSENT) != halving:
        yield Edit(("search", "halving"), halving)
