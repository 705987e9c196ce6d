"""Describes each mistake in params.yaml: the value, the expected values and a correction.

The expected values come from the types of the keys. pydantic's own messages are not used, because
they name Python's types, have no example, and describe each type of a key separately.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from slipway.config.yaml_text import as_yaml
from slipway.system.errors import nearest

_NAMES = {int: "a whole number", float: "a number", str: "text"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off", "none")
_OTHER_NAMES = {"fp16": "16-mixed", "fp32": "32-true", "cuda": "gpu"}


def describe_mistakes(error: ValidationError, model: type[BaseModel], content: Any) -> list[str]:
    """Return a message for each mistake in `content`, which begins with its key in the file."""
    details = _merged(error.errors(include_url=False), content)
    return [line for detail in details if detail["loc"] for line in _describe(detail, model)]


def hint(name: str, known: Sequence[str], otherwise: str) -> str:
    """Return a hint with the known name that is most similar to `name`.

    If no name is similar, the hint is `otherwise` with all known names.
    """
    close = nearest(name, known)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise}: {', '.join(known)}"


def expected_values(kind: Any) -> str:
    """Describe a type's values: "a whole number of at least 1, such as 1, or null"."""
    core, field = _parts(kind)
    arguments = get_args(core)
    if get_origin(core) in (Union, UnionType):
        return ", or ".join(map(expected_values, arguments))
    if get_origin(core) is Literal:
        *others, last = map(as_yaml, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if _is_section(core):
        return f"a mapping of {', '.join(core.model_fields)}"
    if core in (bool, NoneType):
        return "true or false" if core is bool else "null"
    name = {list: "a list", dict: "a mapping"}.get(get_origin(core)) or _NAMES[core]
    bounds = "" if core is str else _range(field)
    return f"{name}{bounds}, such as {as_yaml(_example(kind))}"


def _range(field: FieldInfo) -> str:
    """Describe in words the bounds of a number, or of the length of a list."""
    bounds = _bounds(field)
    least, most = bounds.get("min_length"), bounds.get("max_length")
    if least:
        return f" of {'' if least == most else 'at least '}{least} value{'s' * (least > 1)}"
    named = [f"{words} {bounds[name]}" for name, words in _BOUNDS.items() if name in bounds]
    if "multiple_of" in bounds:
        named.append(f"a multiple of {bounds['multiple_of']}")
    return f" {' and '.join(named)}" * bool(named)


def _example(kind: Any) -> Any:
    """Return a value that the type accepts: the example of its field, or one within its bounds."""
    core, field = _parts(kind)
    arguments, bounds = get_args(core), _bounds(field)
    if field.examples:
        return field.examples[0]
    if get_origin(core) in (Union, UnionType, Literal):
        first = arguments[0]
        return first if get_origin(core) is Literal else _example(first)
    if get_origin(core) is list:
        return [_example(arguments[0])] * bounds.get("min_length", 1)
    if get_origin(core) is dict:
        return {_example(arguments[0]): _example(arguments[1])}
    if core is str:
        return "name"
    least = bounds.get("ge", bounds.get("gt", 0))
    usual = 0.1 if core is float else 1
    return usual if least < usual else least


def _describe(detail: Any, model: type[BaseModel]) -> Iterator[str]:
    # The wrong key of a mapping stands before "[key]".
    *outer, last = place = [part for part in detail["loc"] if part != "[key]"]
    key, found = ".".join(map(str, place)), detail["input"]
    if detail["type"] == "extra_forbidden":
        fields = fields_of(_kind_at(model, outer))
        known = list(fields)
        homes = [
            f"{name}.{last}"
            for name, field in fields.items()
            if last in fields_of(field.annotation)
        ]
        if homes:  # pasted without its section, or with the wrong indentation
            yield f"{key}: is not in a section; did you mean {' or '.join(homes)}?"
            return
        yield f"{key}: unknown key; {hint(str(last), known, 'known here')}"
        return
    if detail["type"] == "value_error":
        yield from (f"{key}: {text}" for text in detail["ctx"]["error"].args)
        return
    kind = _kind_at(model, place)
    if detail["loc"][-1] == "[key]":
        kind = get_args(_parts(_kind_at(model, outer))[0])[0]
    expected = f"expected {expected_values(kind)}"
    if detail["type"] == "missing":
        yield f"{key}: missing; it has no default, because each project has its own; {expected}"
        return
    meant = _meant(found, kind)
    correction = f"; did you mean {as_yaml(meant[0])}?" if meant else ""
    yield f"{key}: found {as_yaml(found)}, {expected}{correction}"


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the keys of a section's type, which may be optional; {} for any other type."""
    section = section_of(kind)
    return section.model_fields if section else {}


def section_of(kind: Any) -> type[BaseModel] | None:
    """Return the section that a type is, or may be beside null; None for any other type."""
    return next((core for core in _alternatives(kind) if _is_section(core)), None)


def _meant(found: object, kind: Any) -> list[object]:
    """Return the first correction of `found` that is valid for the type, in a list, or []."""
    for candidate in _corrections(found, _choices(kind)):
        with contextlib.suppress(ValidationError):
            return [TypeAdapter(kind).validate_python(candidate, strict=True)]
    return []


def _corrections(found: object, choices: list[Any]) -> Iterator[object]:
    """Yield possible corrections of `found`: conversions to other types, and similar choices."""
    if found is None or isinstance(found, list | dict):
        return
    text = as_yaml(found).strip("'")
    if isinstance(found, str):
        for number in (int, float):
            with contextlib.suppress(ValueError):
                yield number(found)
        yield from [True] * (text.lower() in _TRUE)
    elif isinstance(found, float) and found.is_integer():
        yield int(found)
    yield from [False, None] * (text.lower() in _FALSE)
    names = [choice for choice in choices if isinstance(choice, str)]
    yield from (name for name in names if text in name.split("-"))  # 32 for 32-true
    yield from nearest(text, names)
    yield from (_OTHER_NAMES.get(text.lower(), text), [found], [text])


def _choices(kind: Any) -> list[Any]:
    core, _ = _parts(kind)
    if get_origin(core) is Literal:
        return list(get_args(core))
    return [choice for part in get_args(core) for choice in _choices(part)]


def _kind_at(model: type[BaseModel], place: Sequence[str | int]) -> Any:
    """Return the type of the value at `place`, a path of keys and list positions in the file."""
    kind: Any = model
    for part in place:
        for core in _alternatives(kind):
            if _is_section(core):
                kind = get_type_hints(core, include_extras=True).get(str(part), str)
            elif get_origin(core) in (list, dict):
                kind = get_args(core)[-1]
    return kind


def _alternatives(kind: Any) -> list[Any]:
    core, _ = _parts(kind)
    is_union = get_origin(core) in (Union, UnionType)
    return [_parts(part)[0] for part in get_args(core)] if is_union else [core]


def _parts(kind: Any) -> tuple[Any, FieldInfo]:
    """Divide `Annotated[T, Field(...)]` into T and its FieldInfo, empty for other types."""
    if get_origin(kind) is not Annotated:
        return kind, FieldInfo()
    core, *metadata = get_args(kind)
    fields = [entry for entry in metadata if isinstance(entry, FieldInfo)]
    return core, (fields or [FieldInfo()])[-1]


def _bounds(field: FieldInfo) -> dict[str, Any]:
    return {
        name: getattr(bound, name)
        for bound in field.metadata
        for name in (*_BOUNDS, "multiple_of", "min_length", "max_length")
        if hasattr(bound, name)
    }


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _merged(details: list[Any], content: Any) -> list[Any]:
    """Merge pydantic's error details, so that each mistake has one, located by keys of the file.

    If a value may be of several types, pydantic reports a detail for each type.
    """
    found: dict[tuple[Any, ...], Any] = {}
    for detail in details:
        place = _place(detail, content)
        if len(place) == len(detail["loc"]):
            found[(*place, len(found))] = detail
        elif place not in found:
            for outer in [outer for outer in found if outer == place[: len(outer)]]:
                del found[outer]  # this kind fits better: the mistake is inside the value
            found[place] = detail | {"loc": place}
    return list(found.values())


def _place(detail: Any, content: Any) -> tuple[Any, ...]:
    """Return the path of keys to a mistake, without the type names that pydantic adds to it."""
    place: list[Any] = []
    for part, following in itertools.zip_longest(detail["loc"], detail["loc"][1:]):
        if part == "[key]" or following == "[key]":  # a key that may not be text
            place.append(part)
        elif (isinstance(content, dict) and part in content) or (
            isinstance(content, list) and isinstance(part, int)
        ):
            place.append(part)
            content = content[part]
    return (*place, detail["loc"][-1]) if detail["type"] == "missing" else tuple(place)
