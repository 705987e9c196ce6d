"""Where in a training one is, and how the trainer's loops are put there.

Lightning 2.6 restores its counters differently for each place that a checkpoint may be taken in, and then skips or repeats
batches or a validation. Here order and augmentation are functions of the position, so the counters are a function of it, too.
"""

from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl


@dataclass(frozen=True, order=True)
class Position:
    """After `epoch` whole epochs, validation included, and `step` optimizer steps of the next: at most all, before its validation."""

    epoch: int
    step: int

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps since the beginning."""
        return self.epoch * steps_per_epoch + self.step


def move_to(
    trainer: pl.Trainer, position: Position, steps_per_epoch: int, num_accumulated: int
) -> None:
    """Let `trainer` go on at `position`, before its loops run."""
    trainer.fit_loop.load_state_dict(
        loop_state(trainer, position, steps_per_epoch, num_accumulated)
    )


def loop_state(
    trainer: pl.Trainer, position: Position, steps_per_epoch: int, num_accumulated: int
) -> dict[str, Any]:
    """The state of `trainer.fit_loop` at `position`, in Lightning's own form."""
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    steps = position.total_steps(steps_per_epoch)
    begun = position.epoch + (position.step > 0)
    validating = position.step == steps_per_epoch
    batches = {"total": steps * num_accumulated, "current": position.step * num_accumulated}
    state["epoch_progress"] = _both(
        ready=begun, started=begun, processed=position.epoch, completed=position.epoch
    )
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": steps}
    state["epoch_loop.batch_progress"] = {
        **{name: _all(number) for name, number in batches.items()},
        "is_last_batch": validating,
    }
    state["epoch_loop.scheduler_progress"] = _both(ready=steps, completed=steps)
    state["epoch_loop.automatic_optimization.optim_progress"] = {
        "optimizer": {
            "step": _both(ready=steps, completed=steps),
            "zero_grad": _both(ready=steps, started=steps, completed=steps),
        }
    }
    # A validation that was begun and not ended is what makes the trainer validate before it goes on.
    begun = int(validating)
    state["epoch_loop.val_loop.batch_progress"] = {
        **_both(ready=begun, started=begun, processed=0, completed=0),
        "is_last_batch": False,
    }
    return state


def _both(**counts: int) -> dict[str, dict[str, int]]:
    return {"total": dict(counts), "current": dict(counts)}


def _all(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), number)
