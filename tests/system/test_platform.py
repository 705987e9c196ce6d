"""Importing Slipway on other systems than Linux gives a clear error."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def import_again(root: Path) -> ModuleType:
    """Run slipway/__init__.py again, as a module of another name."""
    spec = importlib.util.spec_from_file_location("again", root / "slipway/__init__.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("system", "answer"),
    [
        ("darwin", r"this is macOS\. Expected Linux .*\. Run it in a container"),
        ("win32", r"this is Windows\. Expected Linux .*\. Run it in WSL 2"),
        ("freebsd14", r"this is freebsd14\. Expected Linux .*\. Run it in a container"),
    ],
)
def test_import_outside_linux_fails_and_says_where_slipway_runs(
    root: Path, system: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "load" in dir(import_again(root))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ImportError, match=answer):
        import_again(root)


def test_command_outside_linux_prints_an_error_without_a_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/slipway", "init"])
    with pytest.raises(SystemExit, match="error: Slipway runs on Linux, and this is macOS"):
        import_again(root)
