"""Trains as `slipway.stages.train` does; FAIL=RANK:HOW makes a rank fail in step 3.

Usage: python -m tests.training.failing_training
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import slipway.training.assembly
import slipway.training.run
from slipway.config.stage_run import run_stage
from slipway.training.module import TrainingModule
from stages import train


def _raise(error: Exception) -> None:
    raise error


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "error": lambda: _raise(ZeroDivisionError("a fault of its own")),
    "memory": lambda: _raise(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    ),
    "host memory": lambda: torch.empty(1 << 50, dtype=torch.uint8),
    "disk": lambda: _raise(OSError(28, os.strerror(28), "somewhere")),
    "hang": lambda: signal.pause(),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
RANK, HOW = os.environ["FAIL"].split(":")
STALL_S = 3.0


class FailingModule(TrainingModule):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if (self.global_step, self.global_rank) == (2, int(RANK)):
            print("failing", flush=True)
            FAULTS[HOW]()
        return super().training_step(batch, batch_index)


if __name__ == "__main__":
    setattr(slipway.training.assembly, "TrainingModule", FailingModule)  # noqa: B010
    if HOW in ("hang", "stop"):
        setattr(slipway.training.run, "STALL_S", STALL_S)  # noqa: B010
    sys.argv[0] = __file__
    run_stage(train.run)
