"""What a training really took, for `slipway.planning.plan` to compare with what it predicted: `.work/plan/costs.json`.

Measured in the process that runs the first rank. It is no result of the pipeline: equal trainings differ in it.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pydantic import ValidationError

from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.distributed.process_memory import peak_bytes


class Costs(Contract):
    """The file's content."""

    format_version: Literal[1]
    run: str  # name of the training's fingerprint
    num_parameters: int
    step_seconds: float  # median over epochs, waiting for data included
    validation_seconds: float  # of one epoch, median
    peak_bytes: int  # see `process_memory`
    on_gpu: bool
    save_bytes: int  # of the largest save
    checkpoint_bytes: int
    board_bytes: int  # of this training's TensorBoard files, those of killed attempts included


class CostMeter(pl.Callback):
    """Takes the time of each epoch, the memory, and the size of what is saved below `saves`."""

    def __init__(self, saves: Path) -> None:
        self._saves, self.save_bytes = saves, 0
        self._began, self._step = 0.0, 0
        self._step_seconds: list[float] = []
        self._validation_seconds: list[float] = []
        self.peak_bytes, self.on_gpu = 0, False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._began, self._step = time.perf_counter(), trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step > self._step:
            self._step_seconds.append(
                (time.perf_counter() - self._began) / (trainer.global_step - self._step)
            )
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._validation_seconds.append(time.perf_counter() - self._began)
        self.on_gpu = trainer.strategy.root_device.type == "cuda"
        self.peak_bytes = peak_bytes(on_gpu=self.on_gpu)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """The saves are gone after success."""
        self.save_bytes = max(
            (folder_bytes(folder) for folder in self._saves.iterdir() if folder.is_dir()), default=0
        )

    @property
    def step_seconds(self) -> float:
        """The first epoch warms up, and counts only where it is the only one."""
        return statistics.median(self._step_seconds[1:] or self._step_seconds or [0.0])

    @property
    def validation_seconds(self) -> float:
        """Of one epoch."""
        return statistics.median(self._validation_seconds[1:] or self._validation_seconds or [0.0])


def write_costs(
    path: Path, run: str, num_parameters: int, meter: CostMeter, checkpoint: Path, board: Path
) -> None:
    """Write the file."""
    costs = Costs(
        format_version=1,
        run=run,
        num_parameters=num_parameters,
        step_seconds=meter.step_seconds,
        validation_seconds=meter.validation_seconds,
        peak_bytes=meter.peak_bytes,
        on_gpu=meter.on_gpu,
        save_bytes=meter.save_bytes,
        checkpoint_bytes=folder_bytes(checkpoint),
        board_bytes=folder_bytes(board),
    )
    files.write_json(path, costs.model_dump(mode="json"))


def read_costs(path: Path) -> Costs | None:
    """None where there are none, or of another version."""
    try:
        return Costs.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValidationError, ValueError):
        return None


def folder_bytes(folder: Path) -> int:
    """Of all files in it; 0 where there is no such folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
