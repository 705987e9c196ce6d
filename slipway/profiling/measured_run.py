"""Starts trainings in separate processes, and times them in turns.

A noisy machine slows all of them alike, because they take turns. Between its rounds a training only
polls for the next request. `slipway.profiling.timed_run` is the code of the measured process.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from slipway.config.params import Params
from slipway.data.store.jpeg_inputs import JPEG, OFFSETS
from slipway.data.store.packed import PackedManifest, open_split, read_manifest
from slipway.profiling.loader_times import LoaderTimes
from slipway.profiling.step_times import Round, RoundRequest
from slipway.profiling.timed_run import POLL_S, RunRequest
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import TrainingError, UnavailableError
from slipway.training.distributed.placement import Placement, place, this_host

COMMAND = (sys.executable, "-m", "slipway.profiling.timed_run")
_MIN_STEPS, _MAX_STEPS, _ROUND_MS = 3, 50, 1000
_SHOWN_LINES = 15  # last lines shown of a failed training's output
_DECODED_ROWS = 256  # rows decoded at a time
Found = TypeVar("Found", bound=Contract)


@dataclass(frozen=True)
class ProfiledProject:
    """The params and data of the profiled training; it starts the runs that are measured."""

    params: Params
    packed: Path
    augmented: Path
    root: Path
    scratch: Path
    command: Sequence[str] = COMMAND
    start: Callable[..., Any] = subprocess.Popen

    @cached_property
    def manifest(self) -> PackedManifest:
        return read_manifest(self.packed)

    @cached_property
    def placement(self) -> Placement:
        return place(self.params.train, this_host())

    @property
    def runs_as(self) -> str:
        """The strategy, precision and devices as text, as a training prints them at its start."""
        placement = self.placement
        devices = f"{placement.world_size} on {placement.accelerator}"
        return f"{placement.strategy}, {placement.precision}, {devices}"

    @property
    def is_jpeg(self) -> bool:
        """True if training images are stored as JPEGs and decoded for each batch."""
        return (self.packed / "train" / JPEG).exists()

    def with_raw_pixels(self) -> Self:
        """Copy the packed store, with pixels instead of JPEGs, into the scratch folder.

        Raises UnavailableError if the disk is too small.
        """
        folder = self.scratch / "raw store"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.packed, folder, ignore=shutil.ignore_patterns(JPEG, OFFSETS, "test"))
        inputs = open_split(self.packed, self.manifest, "train").inputs
        needed, free = int(np.prod(inputs.shape)), shutil.disk_usage(folder).free
        if needed > free:
            raise UnavailableError(
                f"pixels would take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free. "
                "Free space, or keep JPEGs."
            )
        pixels = np.lib.format.open_memmap(
            folder / "train" / "inputs.npy", mode="w+", dtype=np.uint8, shape=inputs.shape
        )
        for begin in range(0, len(inputs), _DECODED_ROWS):
            pixels[begin : begin + _DECODED_ROWS] = inputs[begin : begin + _DECODED_ROWS]
        pixels.flush()
        return replace(self, packed=folder)


class MeasuredRun:
    """A training that is timed in rounds; use it as a context manager.

    `changes` override settings of the section train.
    """

    def __init__(
        self,
        project: ProfiledProject,
        name: str,
        *,
        fixed_batch: bool = False,
        loader: bool = False,
        **changes: Any,
    ) -> None:
        self._project = project
        self._name = name
        self._folder = project.scratch / name
        self._num_rounds = 0
        self._num_steps = _MIN_STEPS
        self._request = RunRequest(
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
        files.write_json(self._folder / "run.json", self._request.model_dump(mode="json"))
        with (self._folder / "output.log").open("w") as log:
            self._process = self._project.start(
                [*self._project.command, str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the training's process group; a measured training has nothing to save."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def time_steps(self, *, synchronised: bool = False, communicates: bool = True) -> Round:
        """Run one round of training steps, and return the mean times of a step.

        The first round is short; later ones take about a second. Raises TrainingError with the
        training's output if its process has ended.
        """
        request = RoundRequest(
            num_steps=self._num_steps, synchronised=synchronised, communicates=communicates
        )
        found = self._ask(request, Round)
        self._num_steps = min(max(_MIN_STEPS, round(_ROUND_MS / found.step_ms)), _MAX_STEPS)
        return found

    def time_loader(self) -> LoaderTimes:
        """Time the loader for one round, without training steps."""
        return self._ask(RoundRequest(num_steps=1), LoaderTimes)

    def _ask(self, request: RoundRequest, kind: type[Found]) -> Found:
        number = self._num_rounds
        files.write_json(self._folder / f"request-{number}.json", request.model_dump())
        answer = self._folder / f"round-{number}.json"
        while not answer.exists():
            if self._process.poll() is not None:
                lines = (self._folder / "output.log").read_text(errors="replace").splitlines()
                output = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])
                raise TrainingError(f"the measured training '{self._name}' ended:\n{output}")
            time.sleep(POLL_S)
        self._num_rounds += 1
        return kind.model_validate(json.loads(answer.read_bytes()))
