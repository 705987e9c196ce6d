"""Reads and checks `params.yaml`, which fully determines how a model is made.

The file must have every key and has no defaults, because DVC cannot see a value that is not in the
file. Only keys for other kinds of input may be left out. All mistakes are reported at once; an
unknown key is reported with the key that was probably meant.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from slipway.config.contradictions import misfits
from slipway.config.ensemble import EnsembleParams
from slipway.config.loop import LoopParams
from slipway.config.mistakes import describe_mistakes
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
from slipway.kinds.registry import KINDS, kind_of, settings_of_kinds
from slipway.system.errors import ParamsError


class Params(ParamsSection):
    """The content of `params.yaml`, checked: a typed section for each of its keys."""

    version: Literal[1]  # version of this file's format
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    data: DataParams
    clean: CleanParams
    split: SplitParams
    precompute: PrecomputeParams
    augment: AugmentParams
    audit: AuditParams
    train: TrainParams
    ensemble: EnsembleParams
    evaluate: EvaluateParams
    prune: PruneParams
    export: ExportParams
    compile: CompileParams
    verify: VerifyParams
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
    content = _with_keys_of_other_kinds(content)
    try:
        return Params.model_validate(content)
    except ValidationError as error:
        lines = [f"  {line}" for line in _described(error, content)]
        raise ParamsError(
            f"{name} has {len(lines)} mistake{'s' * (len(lines) > 1)}:\n" + "\n".join(lines)
        ) from None


def mistakes_in(content: dict[str, Any]) -> list[str]:
    """Return a message for every mistake in the content of `params.yaml`, with its key."""
    content = _with_keys_of_other_kinds(content)
    try:
        Params.model_validate(content)
    except ValidationError as error:
        return _described(error, content)
    return []


def sound_part(content: dict[str, Any]) -> Params:
    """Return Params with the valid sections only.

    Reading a section that has a mistake raises AttributeError.
    """
    return _sound_sections(_with_keys_of_other_kinds(content))


def _sound_sections(content: dict[str, Any]) -> Params:
    """Return Params with the valid sections of a content that has the keys of every kind."""
    sound: dict[str, Any] = {}
    for name, section in _sections().items():
        with contextlib.suppress(ValidationError, KeyError):
            sound[name] = section.validate_python(content[name], strict=True)
    return Params.model_construct(_fields_set=set(sound), **sound)


@cache
def _sections() -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in Params.__annotations__.items()}


def _with_keys_of_other_kinds(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the keys added that tasks of its kind may leave out.

    An unknown task may leave out the keys of every kind: only the task is reported as a mistake.
    """
    filled = copy.deepcopy(content)
    task = value_at(content, "data.task")
    own = kind_of(task).settings if isinstance(task, str) and task in KINDS else {}
    for key, value in settings_of_kinds().items():
        place, _, name = key.rpartition(".")
        section = value_at(filled, place)
        if isinstance(section, dict) and key not in own:
            section.setdefault(name, copy.deepcopy(value))
    return filled


def _described(error: ValidationError, content: dict[str, Any]) -> list[str]:
    """Return messages for the mistakes within sections, then for those between valid sections.

    `content` has the keys of every kind.
    """
    return describe_mistakes(error, Params, content) + [
        f"sections that do not fit together: {text}" for text in misfits(_sound_sections(content))
    ]
