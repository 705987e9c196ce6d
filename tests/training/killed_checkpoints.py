"""Runs a real training, and kills its third checkpoint at each file operation in turn."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.file_operations import killed_at

Write = Callable[..., None]


def sweep_third_checkpoint(report: Path, twin: Callable[[Write], Write] | None) -> None:
    """Write the state after each kill to `report`, then exit; runs inside a training."""
    from slipway.training.checkpoints.checkpoints import CheckpointStore

    write = CheckpointStore.write
    calls: list[int] = []

    def swept(store: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            write(store, *arguments)
            return
        third = twin(write) if twin else write
        report.write_text(json.dumps(_sweep(store, lambda: third(store, *arguments))))
        os._exit(0)

    CheckpointStore.write = swept  # type: ignore[assignment, method-assign]


def written_in_place(write: Write) -> Write:
    """Negative control: write the checkpoint in place, as torch and DeepSpeed do."""

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
    """Negative control: remove old checkpoints before the new one is complete."""

    def written(store: Any, *arguments: Any) -> None:
        for folder in store.root.glob("step-*"):
            shutil.rmtree(folder)
        write(store, *arguments)

    return written


def _sweep(store: Any, save: Callable[[], None]) -> list[dict[str, Any]]:
    before = store.root.with_name("before")
    shutil.copytree(store.root, before)
    found: list[dict[str, Any]] = []
    operation: str | None = "none yet"
    while operation is not None:
        operation = killed_at(len(found) + 1, save)
        newest, problems = store.newest()
        store.prepare()
        left = sorted(path.name for path in store.root.iterdir())
        found.append(
            {
                "operation": operation,
                "newest": newest.step if newest else None,
                "problems": problems,
                "left": left,
            }
        )
        shutil.rmtree(store.root)
        shutil.copytree(before, store.root)
    return found
