"""A real training whose third save is killed at every one of its file operations, one after the other."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.file_operations import killed_at

Write = Callable[..., None]


def sweep_third_save(report: Path, twin: Callable[[Write], Write] | None) -> None:
    """In the process of a training: write what is found after each kill to `report`, and end."""
    from slipway.training.checkpoints.checkpoints import Saves

    write = Saves.write
    calls: list[int] = []

    def swept(saves: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            write(saves, *arguments)
            return
        third = twin(write) if twin else write
        report.write_text(json.dumps(_sweep(saves, lambda: third(saves, *arguments))))
        os._exit(0)

    Saves.write = swept  # type: ignore[assignment, method-assign]


def written_in_place(write: Write) -> Write:
    """A twin: as torch and DeepSpeed write, into the place itself."""

    @contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        path.mkdir()
        yield path

    def written(*arguments: Any) -> None:
        from slipway.system import files

        files.new_directory = in_place  # type: ignore[assignment]
        write(*arguments)

    return written


def older_ones_removed_first(write: Write) -> Write:
    """A twin: room is made before the new save is there."""

    def written(saves: Any, *arguments: Any) -> None:
        for folder in saves.root.glob("step-*"):
            shutil.rmtree(folder)
        write(saves, *arguments)

    return written


def _sweep(saves: Any, save: Callable[[], None]) -> list[dict[str, Any]]:
    before = saves.root.with_name("before")
    shutil.copytree(saves.root, before)
    found: list[dict[str, Any]] = []
    operation: str | None = "none yet"
    while operation is not None:
        operation = killed_at(len(found) + 1, save)
        newest, problems = saves.newest()
        saves.open()
        left = sorted(path.name for path in saves.root.iterdir())
        found.append(
            {
                "operation": operation,
                "newest": newest.step if newest else None,
                "problems": problems,
                "left": left,
            }
        )
        shutil.rmtree(saves.root)
        shutil.copytree(before, saves.root)
    return found
