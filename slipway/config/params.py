"""Reads and checks `params.yaml`, which determines how a model is made.

The file holds what its owner decides. A key that is left out has the default of its typed section,
which may depend on the kind of input or target and on the network. The stage `code` puts the values
of all keys into the digests that DVC sees, so a changed default re-runs what reads it. All mistakes
are reported at once; an unknown key is reported with the key that was probably meant.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from slipway.config.contradictions import misfits
from slipway.config.ensemble import EnsembleParams
from slipway.config.loop import LoopParams
from slipway.config.mistakes import describe_mistakes
from slipway.config.network_arguments import arguments_class
from slipway.config.search import SearchParams
from slipway.config.sections import (
    CleanParams,
    CompileParams,
    DataParams,
    EvaluateParams,
    ExportParams,
    ParamsSection,
    PrecomputeParams,
    PruneParams,
    ScriptParams,
    SplitParams,
    VerifyParams,
)
from slipway.config.training import AuditParams, AugmentParams, TrainParams
from slipway.config.yaml_files import read_yaml
from slipway.kinds.inputs import TIMM, network_family
from slipway.kinds.registry import KINDS
from slipway.system.errors import ParamsError


class Params(ParamsSection):
    """The content of `params.yaml`, checked: a typed section for each of its keys."""

    version: Literal[1] = 1  # version of this file's format
    # Of every random choice: splits, order and augmentation, initial weights, resamples.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 7
    data: DataParams
    clean: CleanParams = CleanParams()
    split: SplitParams = SplitParams()
    precompute: PrecomputeParams = PrecomputeParams()
    augment: AugmentParams = AugmentParams()
    audit: AuditParams = AuditParams()
    train: TrainParams = TrainParams()
    ensemble: EnsembleParams = EnsembleParams()
    evaluate: EvaluateParams = EvaluateParams()
    prune: PruneParams = PruneParams()
    export: ExportParams = ExportParams()
    compile: CompileParams = CompileParams()
    verify: VerifyParams = VerifyParams()
    search: SearchParams | None = None  # read by no stage, as are those below
    edge: ScriptParams | None = None
    openvino: ScriptParams | None = None
    loop: LoopParams | None = None

    def problems(self) -> list[str]:
        """Return a message for each contradiction between sections that are valid on their own."""
        return misfits(self)


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check `params.yaml`. Raises ParamsError that lists every mistake."""
    return parse_params(read_content(path), str(path))


def read_content(path: Path = Path("params.yaml")) -> dict[str, Any]:
    """Read `params.yaml` without checking its keys. Raises ParamsError if it is not a mapping."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise no_project(path) from None
    except ValueError as error:
        raise ParamsError(str(error)) from error
    if not isinstance(content, dict):
        raise ParamsError(f"{path} holds {type(content).__name__}, expected a mapping of sections.")
    return content


def no_project(path: Path) -> ParamsError:
    """Return the error for a working directory that has no `params.yaml`."""
    return ParamsError(
        f"{path} is missing in {Path.cwd()}, expected in the folder of a project. "
        "Change to that folder, or make a project: `slipway init --data PATH`."
    )


def value_at(content: Any, key: str) -> Any:
    """Return the value of a key such as "clean.rules.blurred"; None if it is missing."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def flat(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each value of nested mappings, such as ("train.epochs", 5)."""
    if isinstance(content, Mapping) and content:
        for key, inner in content.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, content


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or which one lacks: those of `new` first."""
    return [key for key in {**new, **old} if new.get(key, ...) != old.get(key, ...)]


def parse_params(content: dict[str, Any], name: str = "params.yaml") -> Params:
    """Check the content of `params.yaml`. Raises ParamsError that lists every mistake."""
    whole = filled(content)
    try:
        return Params.model_validate(whole)
    except ValidationError as error:
        lines = [f"  {line}" for line in _described(error, whole)]
        number = len(lines)
        lines += [text] if (text := recipe_remedy(content)) else []
        raise ParamsError(
            f"{name} has {number} mistake{'s' * (number > 1)}:\n" + "\n".join(lines)
        ) from None


def resolved(content: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every key, defaults included, without optional sections that are absent.

    Raises ParamsError that lists every mistake in `content`.
    """
    values = parse_params(content).model_dump(mode="json")
    return {name: value for name, value in values.items() if value is not None}


def mistakes_in(content: Mapping[str, Any]) -> list[str]:
    """Return a message for every mistake in the content of `params.yaml`, with its key."""
    whole = filled(content)
    try:
        Params.model_validate(whole)
    except ValidationError as error:
        return _described(error, whole)
    return []


def other_network(content: Mapping[str, Any]) -> str | None:
    """Return the network that fits the other settings of `content` better than its own, or None."""
    task, network = value_at(content, "data.task"), value_at(content, "train.network")
    if not isinstance(task, str) or task not in KINDS or not isinstance(network, str):
        return None
    found = len(mistakes_in(content))
    for family in KINDS[task].input.networks if found else ():
        other = "timm/resnet18" if family == TIMM else family
        train = content["train"] | {"network": other}
        if (
            family != network_family(network)
            and len(mistakes_in({**content, "train": train})) < found
        ):
            return other
    return None


def recipe_remedy(content: Mapping[str, Any]) -> str:
    """Return what brings the recipe of the network if `content` has that of another one, or ""."""
    if (other := other_network(content)) is None:
        return ""
    network = value_at(content, "train.network")
    return (
        f"These settings are those of {other}, but train.network is {network}: "
        f"`slipway run train.network={network}` puts its own in their place."
    )


def sound_part(content: dict[str, Any]) -> Params:
    """Return Params with the valid sections only.

    Reading a section that has a mistake raises AttributeError.
    """
    return _sound_sections(filled(content))


def _sound_sections(content: dict[str, Any]) -> Params:
    """Return Params with the valid sections of a filled content."""
    sound: dict[str, Any] = {}
    for name, section in _sections().items():
        with contextlib.suppress(ValidationError):
            if name in content:
                sound[name] = section.validate_python(content[name], strict=True)
            elif not Params.model_fields[name].is_required():
                sound[name] = Params.model_fields[name].default
    params = Params.model_construct(_fields_set=set(sound), **sound)
    for name in Params.model_fields.keys() - sound:  # which pydantic filled with defaults
        params.__dict__.pop(name, None)
    return params


@cache
def _sections() -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in Params.__annotations__.items()}


def filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `content` with the default of every key that it leaves out.

    Whatever is no valid section stays as it is. Optional sections are not added.
    """
    found = copy.deepcopy(dict(content))
    choices = choices_of(found)
    for name, field in Params.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, ParamsSection):
            defaults: dict[str, Any] = {}
            for choice in reversed(choices):
                defaults |= kind.DEFAULTS.get(choice, {})
            given = found.setdefault(name, {})
            if kind is TrainParams and isinstance(given, dict):
                defaults |= _of_training(given, choices[0], defaults)
            _fill(given, kind, defaults)
        elif field.default is not None and not field.is_required():
            found.setdefault(name, field.default)
    return found


def defaults_for(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that apply to the task and the network of `content`."""
    task, network = (value_at(content, key) for key in ("data.task", "train.network"))
    train = {} if network is None else {"network": network}
    return filled({"data": {} if task is None else {"task": task}, "train": train})


def _fill(given: Any, section: type[BaseModel], defaults: Mapping[str, Any]) -> None:
    """Add the keys that `given` lacks, in place; `defaults` come before those of the fields."""
    if not isinstance(given, dict):
        return
    for key, field in section.model_fields.items():
        default, kind = defaults.get(key, field.default), field.annotation
        if isinstance(default, BaseModel):
            default = default.model_dump()
        if key not in given and not field.is_required():
            given[key] = copy.deepcopy(default)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            _fill(given.get(key), kind, defaults.get(key, {}))
        elif key in defaults and isinstance(default, dict) and isinstance(given[key], dict):
            given[key] = {**default, **given[key]}  # such as the budgets of single variants


def _of_training(
    train: Mapping[str, Any], network: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the defaults that follow from other keys: network, its arguments, and warm-up."""
    arguments = arguments_class(network)
    found: dict[str, Any] = {"network": network}
    if arguments:
        found["network_arguments"] = arguments().model_dump()
    usual = defaults.get("epochs", TrainParams.model_fields["epochs"].default)
    epochs = train.get("epochs", usual)
    if type(epochs) is int and epochs > 0:
        found["warmup_epochs"] = min(2.0, round(epochs / 10, 2))
    return found


def choices_of(content: Mapping[str, Any]) -> list[str]:
    """Return what defaults depend on, most specific first: network, kind of target and of input."""
    task, network = value_at(content, "data.task"), value_at(content, "train.network")
    kind = KINDS.get(task) if isinstance(task, str) else None
    if not isinstance(network, str):
        own = next(iter(kind.input.networks)) if kind else None
        network = own or str(TrainParams.model_fields["network"].default)
    return [network_family(network), *([kind.target.name, kind.input.name] if kind else [])]


def _described(error: ValidationError, content: dict[str, Any]) -> list[str]:
    """Return messages for the mistakes within sections, then for those between valid sections.

    `content` is filled.
    """
    return describe_mistakes(error, Params, content) + [
        f"sections that do not fit together: {text}" for text in misfits(_sound_sections(content))
    ]
