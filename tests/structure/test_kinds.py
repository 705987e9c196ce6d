"""Code outside `slipway/kinds` asks a kind's record: it compares with no name of a task or kind."""

import ast
from pathlib import Path

import pytest

from slipway.kinds.registry import KINDS
from slipway.system.source_code import PACKAGES
from tests.structure.syntax import nodes
from tests.structure.tracked import tracked_files

RECORDS = {"IMAGES", "COLUMNS", "TEXTS", "CLASS", "LABELS", "NUMBER"}
# By the attribute that holds them. Columns of a table have kinds as well, with other names.
NAMES = {
    "kind": {kind.input.name for kind in KINDS.values()},
    "name": {kind.target.name for kind in KINDS.values()},
    "task": set(KINDS),
}


def branches(source: str) -> list[str]:
    """The expressions that decide by the name of a task or kind, or by the identity of a record."""
    return [ast.unparse(node) for node in nodes(source) if _decides(node)]


def _decides(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in KINDS
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    inside = [part for side in sides for part in ast.walk(side)]
    texts = {part.value for part in inside if isinstance(part, ast.Constant)}
    names_a_record = any(isinstance(part, ast.Name) and part.id in RECORDS for part in inside)
    if names_a_record and None not in texts:
        return True
    attributes = {side.attr for side in sides if isinstance(side, ast.Attribute)}
    return any(texts & names for attribute, names in NAMES.items() if attribute in attributes)


def test_no_code_outside_the_kinds_decides_by_the_name_of_a_task_or_kind(root: Path) -> None:
    found = {
        path: decisions
        for path in tracked_files(root)
        if path.startswith(tuple(f"{package}/" for package in PACKAGES))
        and not path.startswith("slipway/kinds/")
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
