"""Single-process trainings that kill or signal themselves, for example after a checkpoint.

`python -m tests.training.forked_runs PREPARATION` calls PREPARATION (a function and its arguments,
as JSON) and then trains.
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
    """Call `prepare(*arguments)` and train in a new process; return exit code and output."""
    command = ["tests.training.forked_runs", json.dumps([prepare, *arguments], default=_named)]
    done = warm_starts.run(command, project, environment(), _TIMEOUT_S, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def kill_after_checkpoint(number: int) -> None:
    """Kill this process right after checkpoint `number`, counted from 1."""
    _after_checkpoint(number, signal.SIGKILL)


def stop_after_checkpoint(number: int, name: str) -> None:
    """Send this process a signal after checkpoint `number`."""
    _after_checkpoint(number, signal.Signals[name])


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


def _after_checkpoint(number: int, sent: signal.Signals) -> None:
    from slipway.training.checkpoints.checkpoints import CheckpointStore

    write = CheckpointStore.write
    seen: list[int] = []

    def counted(self: CheckpointStore, *arguments: Any) -> None:
        write(self, *arguments)
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), sent)

    CheckpointStore.write = counted  # type: ignore[assignment, method-assign]


def _named(value: Any) -> dict[str, Any]:
    """Encode a path or a function as a value for JSON."""
    return (
        {"path": str(value)}
        if isinstance(value, Path)
        else {"function": [value.__module__, value.__qualname__]}
    )


def _of_name(value: dict[str, Any]) -> Any:
    """Decode a value that `_named` encoded."""
    if "path" in value:
        return Path(value["path"])
    module, name = value["function"]
    return getattr(importlib.import_module(module), name)


def _train(preparation: str) -> None:
    from slipway.config.stage_run import run_stage
    from slipway.stages.train import run

    prepare, *arguments = json.loads(preparation, object_hook=_of_name)
    if prepare:
        prepare(*arguments)
    run_stage(run)


if __name__ == "__main__":
    _train(sys.argv[1])
