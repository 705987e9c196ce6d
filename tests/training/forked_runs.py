"""Trainings of one process each that do something to themselves, such as end after their second save.

`python -m tests.training.forked_runs PREPARATION` trains after it: a function and its arguments, as JSON.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm_starts
from tests.training.real_runs import environment

_TIMEOUT_S = 300.0  # on a machine that others use, too


def run_forked(
    project: Path, prepare: Callable[..., None] | None = None, *arguments: Any
) -> tuple[int, str]:
    """Train in `project` in a process of its own, after `prepare(*arguments)` there; its exit code, or minus the signal, and its output."""
    command = ["tests.training.forked_runs", json.dumps([prepare, *arguments], default=_named)]
    done = warm_starts.run(command, project, environment(), _TIMEOUT_S, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def kill_after_save(number: int) -> None:
    """Kill this process right after its save of that number, counted from 1."""
    _after_save(number, signal.SIGKILL)


def stop_after_save(number: int, name: str) -> None:
    """Send the signal of that name instead."""
    _after_save(number, signal.Signals[name])


def stop_in_validation(number: int) -> None:
    """Send SIGTERM in the first step of validation `number`, counted from 1."""
    from slipway.training.module import TrainingModule

    begin = TrainingModule.on_validation_epoch_start
    seen: list[int] = []

    def counted(self: TrainingModule) -> None:
        seen.append(1)
        begin(self)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    TrainingModule.on_validation_epoch_start = counted  # type: ignore[method-assign]


def _after_save(number: int, sent: signal.Signals) -> None:
    from slipway.training.checkpoints.checkpoints import Saves

    write = Saves.write
    seen: list[int] = []

    def counted(self: Saves, *arguments: Any) -> None:
        write(self, *arguments)
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), sent)

    Saves.write = counted  # type: ignore[assignment, method-assign]


def _named(value: Any) -> dict[str, Any]:
    """A path or a function, for JSON."""
    return (
        {"path": str(value)}
        if isinstance(value, Path)
        else {"function": [value.__module__, value.__qualname__]}
    )


def _of_name(value: dict[str, Any]) -> Any:
    """What `_named` gave that name."""
    if "path" in value:
        return Path(value["path"])
    module, name = value["function"]
    return getattr(importlib.import_module(module), name)


def _train(preparation: str) -> None:
    from slipway.config.command import run_stage
    from stages.train import run

    prepare, *arguments = json.loads(preparation, object_hook=_of_name)
    if prepare:
        prepare(*arguments)
    run_stage(run)


if __name__ == "__main__":
    _train(sys.argv[1])
