"""The user's code is imported from the project's folder, and errors name its file and line."""

import sys
from pathlib import Path

import pytest

from slipway.system.errors import UnavailableError
from slipway.system.user_code import (
    definition_place,
    failure,
    fault_place,
    import_named,
    is_well_formed,
)


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder in which each test has a new module `tried`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "tried", raising=False)


def write(source: str) -> None:
    Path("tried.py").write_text(source)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("nets:Net", True), ("a.b:C", True), ("größe:Netz", True)),
        *(("nets", False), ("nets:", False), (":Net", False), ("a..b:C", False), ("1a:B", False)),
        *(("nets:Net()", False), ("a/b:C", False), ("nets:Net\n", False)),
    ],
)
def test_user_code_is_named_by_a_module_a_colon_and_an_identifier(
    name: str, expected: bool
) -> None:
    assert is_well_formed(name) is expected


def test_script_imports_modules_of_the_working_directory() -> None:
    write("def f():\n    return 3\n")
    assert import_named("tried:f")() == 3


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1\n", "tried has no function 'f', which tried:f names. Write it"),
        (
            "x = 1\ny = 1 / 0\n",
            "ZeroDivisionError: division by zero (tried.py, line 2: `y = 1 / 0`)",
        ),
        ("x = (\n", "SyntaxError: '(' was never closed"),
        ("x = (\n", "(tried.py, line 1: `x = (`)"),
        ("import os\nos.nothing\n", "AttributeError: module 'os' has no attribute 'nothing'"),
        ("import no_such_module\n", "(tried.py, line 1: `import no_such_module`)"),
        ("import sys\nsys.exit(4)\n", "calls sys.exit(4) (tried.py, line 2: `sys.exit(4)`)"),
    ],
)
def test_error_of_a_failing_import_names_the_line_and_the_fix(source: str, text: str) -> None:
    write(source)
    with pytest.raises(UnavailableError) as raised:
        import_named("tried:f")
    assert text in str(raised.value)


def test_error_names_the_last_executed_line_of_user_code() -> None:
    write("import json\n\n\ndef f():\n    return json.loads('{')\n")
    function = import_named("tried:f")
    with pytest.raises(ValueError, match="Expecting property name") as raised:
        function()
    assert fault_place(raised.value) == "tried.py, line 5: `return json.loads('{')`"


def test_error_outside_user_code_names_the_line_of_the_definition() -> None:
    write("\n\ndef f():\n    pass\n")
    function = import_named("tried:f")
    assert failure(MemoryError(), function) == "MemoryError (tried.py, line 3)"
    assert definition_place(len) == ""
