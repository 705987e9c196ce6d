"""Trainings of one process each, forked from one that has imported everything: a start costs a tenth of a second."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

_TIMEOUT_S = 300.0  # on a machine that others use, too
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["stages.train", "tests.training.forked_runs", "safetensors.torch", "dvclive.lightning"])


def run_forked(project: Path, prepare: Callable[..., None] | None = None, *arguments: Any) -> tuple[int, str]:
    """Train in `project` in a process of its own, after `prepare(*arguments)` there; its exit code, or minus the signal, and its output."""
    output = project / "output"
    process = _CONTEXT.Process(target=_train, args=(project, output, prepare, arguments))
    process.start()
    process.join(_TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"it hangs:\n{output.read_text()}")
    return process.exitcode, output.read_text()


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
    from slipway.training.saves import Saves

    write = Saves.write
    seen: list[int] = []

    def counted(self: Saves, *arguments: Any) -> None:
        write(self, *arguments)
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), sent)

    Saves.write = counted  # type: ignore[assignment, method-assign]


def _train(project: Path, output: Path, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    from slipway.command import run_stage
    from stages.train import run

    os.chdir(project)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's processes, as in a trainer that a shell starts
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        if prepare:
            prepare(*arguments)
        try:
            run_stage(run)
        finally:
            sys.stdout.flush()
