"""Trainings that are measured, each in processes of its own, and taking turns: a noisy machine then slows all of them alike.

The other side of `slipway.doctor.timed_run`. While it is not its turn a training only looks for its next order.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from slipway.config.params import Params
from slipway.doctor.loader_times import LoaderTimes
from slipway.doctor.step_times import Order, Round
from slipway.doctor.timed_run import Request
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import TrainingError

COMMAND = (sys.executable, "-m", "slipway.doctor.timed_run")
_SECONDS_BETWEEN_LOOKS = 0.01
_FEWEST_STEPS, _MOST_STEPS, _ROUND_MS = 3, 50, 1000
_SHOWN_LINES = 15  # of what a failed training said
Found = TypeVar("Found", bound=Contract)


@dataclass(frozen=True)
class Project:
    """What trainings are measured on: the params, where their data is, and the command that measures one and how it is started."""

    params: Params
    packed: Path
    augmented: Path
    root: Path
    scratch: Path
    command: Sequence[str] = field(default=COMMAND)
    start: Callable[..., Any] = field(default=subprocess.Popen)


class Measured:
    """A training that is timed in rounds, started by `with`."""

    def __init__(
        self,
        project: Project,
        name: str,
        *,
        fixed_batch: bool = False,
        loader: bool = False,
        **changes: Any,
    ) -> None:
        self.name = name
        self._project, self._rounds, self._num_steps = project, 0, _FEWEST_STEPS
        self._folder = project.scratch / name
        self._request = Request(
            seed=project.params.seed,
            train=project.params.train.model_dump(mode="json") | changes,
            packed=str(project.packed),
            augmented=str(project.augmented),
            root=str(project.root),
            fixed_batch=fixed_batch,
            loader=loader,
        )

    def __enter__(self) -> Self:
        for old in self._folder.glob("*.json"):
            old.unlink()
        files.write_json(self._folder / "request.json", self._request.model_dump(mode="json"))
        with (self._folder / "output.log").open("w") as log:
            self._process = self._project.start(
                [*self._project.command, str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The process, and those that it started, keep nothing: they may end at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def time_steps(self, *, synchronised: bool = False, communicates: bool = True) -> Round:
        """One round of steps, of about a second after the first. TrainingError, with what it said, if the training has ended."""
        found = self._ask(
            Order(num_steps=self._num_steps, synchronised=synchronised, communicates=communicates),
            Round,
        )
        self._num_steps = min(max(_FEWEST_STEPS, round(_ROUND_MS / found.step_ms)), _MOST_STEPS)
        return found

    def time_loader(self) -> LoaderTimes:
        """One round of the loader by itself."""
        return self._ask(Order(num_steps=1, synchronised=False, communicates=True), LoaderTimes)

    def _ask(self, order: Order, kind: type[Found]) -> Found:
        files.write_json(self._folder / f"order-{self._rounds}.json", order.model_dump())
        answer = self._folder / f"round-{self._rounds}.json"
        while not answer.exists():
            if self._process.poll() is not None:
                raise TrainingError(
                    f"the measured training '{self.name}' ended:\n{self._last_words()}"
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._rounds += 1
        return kind.model_validate(json.loads(answer.read_bytes()))

    def _last_words(self) -> str:
        lines = (self._folder / "output.log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])
