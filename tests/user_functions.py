"""Functions of a user's, in packages that are written for one test."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from slipway.inputs import user_function


class WriteFunctions(Protocol):
    """Writes files of a package named `package`, {name: source}, and makes it importable."""

    def __call__(self, package: str, sources: dict[str, str]) -> Path: ...


@pytest.fixture(name="write_functions")
def _write_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteFunctions]:
    written = set()
    monkeypatch.syspath_prepend(tmp_path / "code")

    def write(package: str, sources: dict[str, str]) -> Path:
        folder = tmp_path / "code" / package
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(source)
        written.add(package)
        importlib.invalidate_caches()
        return folder

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in written]:
        del sys.modules[name]
    for package in written:
        user_function._loaded.pop(package, None)
    user_function.load.cache_clear()
