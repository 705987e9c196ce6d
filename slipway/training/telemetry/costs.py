"""Measures the costs of a training for `.work/plan/costs.json`, to compare them with the plan.

Rank 0 measures them. The file is not an output of the pipeline, because equal trainings may take
different times.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl

from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.telemetry.telemetry import is_on_gpu, peak_bytes


class Costs(Contract):
    """The content of `costs.json`: times, memory and bytes of one training."""

    format_version: Literal[2]
    run: str  # name of the training's fingerprint
    num_parameters: int
    step_seconds: float  # median over epochs, with waiting for data
    validation_seconds: float  # median over epochs
    peak_bytes: int  # see `telemetry.peak_bytes`
    on_gpu: bool
    checkpoint_bytes: int  # size of the largest checkpoint
    model_bytes: int
    board_bytes: int  # TensorBoard files of this training and of its killed attempts


class CostMeter(pl.Callback):
    """Measures the epochs, the memory, and the checkpoints in the folder `checkpoints`."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints, self.checkpoint_bytes = checkpoints, 0
        self._began, self._first_step = 0.0, 0
        self._step_seconds: list[float] = []
        self._validation_seconds: list[float] = []
        self.peak_bytes, self.on_gpu = 0, False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._began, self._first_step = time.perf_counter(), trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        now = time.perf_counter()
        if num_steps := trainer.global_step - self._first_step:
            self._step_seconds.append((now - self._began) / num_steps)
        self._began = now

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._validation_seconds.append(time.perf_counter() - self._began)
        self.on_gpu = is_on_gpu(trainer)
        self.peak_bytes = peak_bytes(on_gpu=self.on_gpu)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Now, because success removes the checkpoints.
        folders = (folder for folder in self._checkpoints.iterdir() if folder.is_dir())
        self.checkpoint_bytes = max(map(folder_bytes, folders), default=0)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        # Lightning's; they would keep the trainer and its weights while the model is written.
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    @property
    def step_seconds(self) -> float:
        return _median_after_warmup(self._step_seconds)

    @property
    def validation_seconds(self) -> float:
        return _median_after_warmup(self._validation_seconds)


def _median_after_warmup(seconds: list[float]) -> float:
    """Return the median over all epochs but the first (or of the only one); 0 without epochs."""
    return statistics.median(seconds[1:] or seconds or [0.0])


def write_costs(
    path: Path, run: str, num_parameters: int, meter: CostMeter, model: Path, board: Path
) -> None:
    """Write the costs; `model` and `board` are the folders of the model and of TensorBoard."""
    costs = Costs(
        format_version=2,
        run=run,
        num_parameters=num_parameters,
        step_seconds=meter.step_seconds,
        validation_seconds=meter.validation_seconds,
        peak_bytes=meter.peak_bytes,
        on_gpu=meter.on_gpu,
        checkpoint_bytes=meter.checkpoint_bytes,
        model_bytes=folder_bytes(model),
        board_bytes=folder_bytes(board),
    )
    files.write_json(path, costs.model_dump(mode="json"))


def read_costs(path: Path) -> Costs | None:
    """Read the costs; return None if the file is missing or has another version."""
    try:
        return Costs.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):  # pydantic's and json's are both ValueErrors
        return None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is no folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
