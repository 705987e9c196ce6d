"""The layout of the code: small folders, described rooms, unique names, mirrored tests."""

from pathlib import Path

from tests.structure.layout import (
    MOST_MODULES,
    defined_too_late,
    duplicate_class_names,
    gerunds,
    lazy_modules,
    misplaced_tests,
    modules,
    modules_by_folder,
    room_docstring_faults,
    statements,
)
from tests.structure.tracked import tracked_files


def test_slipway_holds_only_folders_and_its_init(root: Path) -> None:
    assert [path.name for path in (root / "slipway").glob("*.py")] == ["__init__.py"]


def test_no_folder_holds_more_modules_than_a_reader_can_survey(root: Path) -> None:
    counts = modules_by_folder(modules(root))
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_modules_are_counted_by_folder_without_inits() -> None:
    paths = ["slipway/a/__init__.py", "slipway/a/b.py", "slipway/a/c.py", "slipway/a/d/e.py"]
    assert modules_by_folder(paths) == {"slipway/a": 2, "slipway/a/d": 1}


def test_docstrings_and_nested_statements_are_counted() -> None:
    assert statements('"""A module."""\nif x:\n    y = 1\n') == 3


def test_class_names_are_unique(root: Path) -> None:
    found = duplicate_class_names((root / path).read_text() for path in modules(root))
    assert found == set(), "name each class after what it holds"


def test_a_class_name_that_two_modules_use_is_reported() -> None:
    assert duplicate_class_names(["class A: ...\nclass B: ...", "def f():\n  class A: ..."]) == {
        "A"
    }


def test_only_the_package_itself_computes_attributes_on_use(root: Path) -> None:
    sources = {path: (root / path).read_text() for path in modules(root)}
    assert list(lazy_modules(sources)) == ["slipway/__init__.py"]


def test_no_module_defines_a_name_after_it_has_run_as_a_command(root: Path) -> None:
    assert list(defined_too_late({path: (root / path).read_text() for path in modules(root)})) == []


def test_a_function_below_the_start_of_its_command_is_reported() -> None:
    start = 'if __name__ == "__main__":\n    main()\n'
    sources = {"a.py": f"def main(): f()\n{start}def f(): ...\n", "b.py": start, "c.py": ""}
    assert list(defined_too_late(sources)) == ["a.py"]


def test_a_module_that_computes_attributes_on_use_is_reported() -> None:
    hook = "def __getattr__(name): ...\n"
    sources = {
        "a.py": hook,
        "b.py": f"if x:\n    {hook}",
        "c.py": f"class C:\n    {hook}",
        "d.py": "",
    }
    assert list(lazy_modules(sources)) == ["a.py", "b.py"]


def test_each_room_says_in_three_lines_what_it_holds(root: Path) -> None:
    inits = [path for path in modules(root) if path.endswith("/__init__.py")]
    folders = {str(Path(path).parent) for path in inits}
    assert folders == {str(Path(path).parent) for path in modules(root)}
    faults = [room_docstring_faults(path, (root / path).read_text()) for path in inits]
    assert [fault for found in faults for fault in found] == []


def test_a_room_without_a_docstring_or_with_a_long_one_is_reported() -> None:
    assert list(room_docstring_faults("a/__init__.py", '"""Networks.\n\nNo loops.\n"""')) == []
    assert list(room_docstring_faults("a/__init__.py", ""))
    assert list(room_docstring_faults("a/__init__.py", '"""1\n2\n3\n4"""'))


def test_modules_are_named_after_things(root: Path) -> None:
    assert list(gerunds(modules(root))) == []


def test_a_module_named_after_an_activity_is_reported() -> None:
    paths = ["slipway/a/keeping.py", "slipway/a/batching.py", "slipway/a/request_log.py"]
    assert [found.path for found in gerunds(paths)] == ["slipway/a/keeping.py"]


def test_tests_lie_where_the_modules_that_they_test_lie(root: Path) -> None:
    tests = [path for path in tracked_files(root) if Path(path).name.startswith("test_")]
    assert [str(one) for one in misplaced_tests(tests, modules(root))] == []


def test_a_test_in_another_folder_than_its_module_is_reported() -> None:
    paths = ["slipway/a/b.py", "slipway/a/d/e.py", "slipway/serving/http/routes.py"]
    right = [
        *("tests/a/test_b.py", "tests/a/test_whole_room.py", "tests/a/d/test_e.py"),
        *("tests/serving/http/test_routes.py", "tests/structure/test_b.py", "tests/a/test_d.py"),
    ]
    wrong = ["tests/a/test_e.py", "tests/serving/test_routes.py", "tests/gone/test_b.py"]
    assert [found.path for found in misplaced_tests(right + wrong, paths)] == wrong
