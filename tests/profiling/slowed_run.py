"""`slipway.profiling.timed_run` with slow loading: `-m tests.profiling.slowed_run KIND FOLDER`.

KIND `transform` computes 20 ms for each sample; `disk` waits 20 ms for each stored row.
"""

import sys
import time
from dataclasses import replace
from typing import Any

from slipway.data.store.packed import Inputs, PackedSplit
from slipway.profiling.timed_run import main
from slipway.training.batches.batches import Batch, TrainingBatches

SECONDS = 0.020  # for each sample


class SlowTransform:
    """Batches that cost 20 ms of processor time for each sample."""

    def __init__(self, batches: TrainingBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        batch = self._batches[place]
        end = time.perf_counter() + SECONDS * len(batch.rows)
        while time.perf_counter() < end:
            pass
        return batch


class ThrottledRows:
    """Stored rows on a simulated disk that delivers one row every 20 ms."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.shape, self.dtype = inputs.shape, inputs.dtype

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, rows: Any) -> Any:
        found = self._inputs[rows]
        time.sleep(SECONDS * (1 if found.ndim == len(self.shape) - 1 else len(found)))
        return found


def _throttled(split: PackedSplit) -> PackedSplit:
    return replace(split, inputs=ThrottledRows(split.inputs))


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "transform":
        main(wrap_batches=SlowTransform)
    elif kind == "disk":
        main(wrap_split=_throttled)
    else:
        raise SystemExit(f"unknown kind {kind!r}")
