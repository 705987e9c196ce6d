"""How long the training loop waits for batches, from the trainer's own profiling points."""

import time

import torch
from pytorch_lightning.profilers import Profiler

FETCH = (
    "[_TrainingEpochLoop].train_dataloader_next"  # Lightning 2.6; a test notices when it is renamed
)


class StepClock(Profiler):
    """Adds up the seconds between the asking for a batch and its coming. Work of loader processes meanwhile is no wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0
        self._asked = 0.0

    def start(self, action_name: str) -> None:
        if action_name == FETCH:
            self._asked = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == FETCH:
            self.waited_s += time.perf_counter() - self._asked


class Lap:
    """Rows per second and the share of waiting since the last lap."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._began, self._waited_s = time.perf_counter(), self._clock.waited_s

    def finish(self, rows: int) -> dict[str, float]:
        """For `rows` rows over all processes; on a GPU once its queue is empty. The next lap begins."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        found = {
            "rows_per_second": rows / seconds,
            "data_wait_share": (self._clock.waited_s - self._waited_s) / seconds,
        }
        self.begin()
        return found
