"""Code outside `slipway/kinds` asks a kind's record: it compares with no name of a task or kind."""

import ast
from pathlib import Path

import pytest

from slipway.kinds.registry import KINDS
from slipway.system.source_code import PACKAGES
from tests.structure.syntax import nodes
from tests.structure.tracked import tracked_files

# A script that runs where Slipway is not installed.
_WITHOUT_REGISTRY = ("slipway/export/targets/edge/run.py",)
RECORDS = {"IMAGES", "COLUMNS", "TEXTS", "CLASS", "LABELS", "NUMBER"}
# By the attribute, variable or key that holds them. Columns of a table have kinds as well, with
# other names.
NAMES = {
    "kind": {kind.input.name for kind in KINDS.values()},
    "name": {kind.target.name for kind in KINDS.values()},
    "task": set(KINDS),
}


def branches(source: str) -> list[str]:
    """The expressions that decide by the name of a task or kind, or by the identity of a record."""
    return [ast.unparse(node) for node in nodes(source) if _decides(node)]


def _decides(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return text in KINDS
        case ast.Compare(left=left, comparators=others):
            return _compares([left, *others])
        case ast.Match(subject=subject, cases=cases):
            return _compares([subject, *(case.pattern for case in cases)])
        case ast.Call(func=ast.Attribute(value=asked, attr="startswith" | "endswith")):
            return _holder(asked) == "task"
    return False


def _compares(sides: list[ast.AST]) -> bool:
    inside = [part for side in sides for part in ast.walk(side)]
    texts = {part.value for part in inside if isinstance(part, ast.Constant)}
    names_a_record = any(isinstance(part, ast.Name) and part.id in RECORDS for part in inside)
    if names_a_record and None not in texts:
        return True
    return any(texts & NAMES.get(_holder(side), set()) for side in sides)


def _holder(side: ast.AST) -> str:
    """The name of what holds a value: `kind` for `kind`, `contract.kind` and `contract["kind"]`."""
    match side:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return ""


def test_no_code_outside_the_kinds_decides_by_the_name_of_a_task_or_kind(root: Path) -> None:
    found = {
        path: decisions
        for path in tracked_files(root)
        if path.startswith(tuple(f"{package}/" for package in PACKAGES))
        and not path.startswith(("slipway/kinds/", *_WITHOUT_REGISTRY))
        and (decisions := branches((root / path).read_text()))
    }
    assert found == {}, "ask the kind's record (slipway/kinds) for a fact or a part"


@pytest.mark.parametrize(
    "source",
    [
        'if data.task == "image_regression": pass',
        'TASKS = ("table_classification", "table_regression")',
        'is_table = manifest.input.kind == "columns"',
        'if contract.kind in ("images", "videos"): pass',
        'if kind_of(task).target.name != "class": pass',
        "if kind_of(task).target is CLASS: pass",
        "if kind.input in (COLUMNS, IMAGES): pass",
        'if kind == "images": pass',
        'if contract["kind"] == "images": pass',
        'if task.startswith("table"): pass',
        'if params.data.task.endswith("classification"): pass',
        'match contract.kind:\n    case "images" | "videos": pass',
    ],
)
def test_an_if_on_the_name_or_record_of_a_kind_is_reported(source: str) -> None:
    assert branches(source)


@pytest.mark.parametrize(
    "source",
    [
        'if column.kind == "number": pass',
        "if kind_of(task).target.has_classes: pass",
        'if contract.output.kind == "probabilities": pass',
        "if COLUMNS is None: pass",
    ],
)
def test_an_if_on_a_fact_of_a_kind_or_on_the_kind_of_a_column_is_allowed(source: str) -> None:
    assert branches(source) == []
