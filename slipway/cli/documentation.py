"""Describes every key of `params.yaml`: its values, its default and the comment beside it.

The comments are read from the source of the sections, so a key is described in one place only.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipway.config.mistakes import expected_values, section_of
from slipway.config.params import Params
from slipway.config.stage_graph import Pipeline, read_pipeline
from slipway.config.yaml_text import as_plain_yaml

_EXAMPLE = re.compile(r", such as .*?(?=, or |$)")
_TABLE = "| key | values | default | meaning |\n|---|---|---|---|"
_HEAD = """\
# params.yaml

```yaml
data:
  path: data/raw.csv
  task: table_classification
  target_column: bought
train:
  epochs: 20
```

This is a whole params.yaml: what it leaves out has the default in these tables. Some defaults
depend on the kind of input or target or on the network, as in `40; timm/NAME: 12`. `slipway params`
prints the values that apply to your project, with those that differ from their defaults marked, and
`slipway set train.epochs=20` changes one. A key at its default and a key left out are the same.

An unknown key is refused, with a suggestion, and so is a value other than the default for a key
that does nothing for your task or network. When a value changes, `slipway run` runs the stages that
read it, and everything after them. `dvc exp run -S train.epochs=20` changes a key that the file
has; for one that it leaves out, DVC needs a plus: `-S +train.epochs=20`. The settings of the
running service are in [serving.md](serving.md).
"""


@dataclass(frozen=True)
class KeyDescription:
    """A key of params.yaml, such as "clean.max_bad_fraction"."""

    name: str
    values: str  # "a number of at least 0 and at most 1, or null"
    default: str  # as YAML; with the other defaults of single tasks and networks; "" if required
    meaning: str  # "" if the name says all


def described(
    section: Any = Params, place: str = "", others: Mapping[str, Any] | None = None
) -> Iterator[KeyDescription]:
    """Yield the keys of a section in the order of its fields, those of inner sections in place.

    `others` are the defaults by choice of the section around it (`ParamsSection.DEFAULTS`).
    """
    kind = section_of(section)
    assert kind is not None
    by_choice = {**getattr(kind, "DEFAULTS", {}), **(others or {})}
    comments = _comments(kind)
    for name, field in kind.model_fields.items():
        own = {choice: keys[name] for choice, keys in by_choice.items() if name in keys}
        inner = section_of(field.annotation)
        if inner is not None:
            yield from described(inner, f"{place}{name}.", own)
            continue
        named = section_of(get_args(field.annotation)[-1]) if _is_mapping(field) else None
        values = _EXAMPLE.sub("", expected_values(_hint(kind, name)))
        default = "" if field.is_required() else as_plain_yaml(_default(field))
        unlike = {choice: as_plain_yaml(value) for choice, value in own.items()}
        default += "".join(f"; {one}: {text}" for one, text in unlike.items() if text != default)
        yield KeyDescription(f"{place}{name}", values, default, comments.get(name, ""))
        if named is not None:  # sections with names of the user, such as gates
            yield from described(named, f"{place}{name}.NAME.")


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def page(pipeline: Pipeline) -> str:
    """Return docs/reference/params.md; `pipeline` says which stages read a section."""
    lines = [_HEAD]
    readers = {stage: keys for stage, keys in pipeline.params.items() if keys}
    for name, field in Params.model_fields.items():
        stages = [f"`{one}`" for one, keys in readers.items() if _reads(keys, name)]
        kind = section_of(field.annotation)
        keys = [key for key in described() if key.name.partition(".")[0] == name]
        about = inspect.cleandoc(kind.__doc__ or "") if kind else ""
        by = f"Read by {', '.join(stages)}." if stages else "Read by no stage."
        lines += [f"## {name}", "", *([about, ""] if about else []), by, "", _TABLE]
        lines += [_row(key, name) for key in keys]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _reads(keys: list[str], section: str) -> bool:
    return any(key == section or key.startswith(f"{section}.") for key in keys)


def _row(key: KeyDescription, section: str) -> str:
    cells = [f"`{key.name.removeprefix(f'{section}.')}`", key.values]
    cells += [f"`{key.default}`" if key.default else "required", key.meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump() if isinstance(value, BaseModel) else value


def _hint(kind: type[BaseModel], name: str) -> Any:
    owner = next(one for one in kind.__mro__ if name in inspect.get_annotations(one))
    return inspect.get_annotations(owner)[name]


def _comments(kind: Any) -> dict[str, str]:
    """Return the comment of each field: above its line, and at the end of its line."""
    found: dict[str, str] = {}
    for one in reversed(
        [one for one in kind.__mro__ if issubclass(one, BaseModel) and one is not BaseModel]
    ):
        source = textwrap.dedent(inspect.getsource(one))
        lines = source.splitlines()
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno - 1
                while lines[first - 1].lstrip().startswith("# "):
                    first -= 1
                above = [line.strip().removeprefix("# ") for line in lines[first : node.lineno - 1]]
                beside = lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
                found[node.target.id] = " ".join([*above, beside]).strip()
    return found


if __name__ == "__main__":
    print(page(read_pipeline({"data": {"path": "${data.path}"}})), end="")
