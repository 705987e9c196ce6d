"""When a running training saves: at ends of epochs, as often as the clock says, and when a signal asks it to stop."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from slipway.config.sections import TrainParams
from slipway.training.checkpoints.checkpoints import Save, Saves, write_trainer_state
from slipway.training.checkpoints.positions import Position
from slipway.training.checkpoints.rank_state import write_rank_state
from slipway.training.distributed.collectives import MaxReducer
from slipway.training.distributed.stopping import SAVE, Stopped, StopSignals
from slipway.training.distributed.strategies import actual_setup
from slipway.training.module import TrainingModule
from slipway.training.networks.networks import Stretch
from slipway.training.recipe.early_stopping import has_ended
from slipway.training.recipe.weight_average import WeightAverage


class Saver(pl.callbacks.Checkpoint):
    """Keeps the history, ends a training early, and saves as `params` ask and signals do.

    An epoch has `steps_per_epoch` optimizer steps of `num_accumulated` batches. `averages` take the place of the weights in a
    validation, in which a save needs those of training.
    """

    def __init__(
        self,
        saves: Saves,
        resumed: Save | None,
        stretch: Stretch,
        params: TrainParams,
        signals: StopSignals,
        averages: Sequence[WeightAverage] = (),
        *,
        steps_per_epoch: int,
        num_accumulated: int,
    ) -> None:
        self._saves, self._params, self._signals, self._agreement = (
            saves,
            params,
            signals,
            MaxReducer(),
        )
        self._averages = averages
        self._steps_per_epoch, self._num_accumulated = steps_per_epoch, num_accumulated
        self.history: list[dict[str, float]] = list(resumed.history) if resumed else []
        self.kept_epoch = resumed.kept_epoch if resumed else 0
        self._stretches = _continued(resumed, stretch, steps_per_epoch)
        self.saved = resumed.position if resumed else Position(0, 0)
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self._num_accumulated == 0:
            position = Position(len(self.history), (batch_idx + 1) // self._num_accumulated)
            self._save_if_asked(trainer, pl_module, position, SAVE if self._is_due(trainer) else 0)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._save_if_asked(trainer, pl_module, Position(len(self.history), self._steps_per_epoch))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.history.append(dict(pl_module.epoch_metrics))
        epoch, best = len(self.history), self._params.keep == "best"
        better = (
            self.kept_epoch == 0
            or self.history[-1]["val/loss"] < self.history[self.kept_epoch - 1]["val/loss"]
        )
        better = trainer.strategy.broadcast(better)
        if better and best:
            self.kept_epoch = epoch
        position, ended = Position(epoch, 0), has_ended(self.history, self._params)
        if (better and best) or epoch % self._params.checkpoint_every_epochs == 0 or ended:
            self._save(trainer, pl_module, position)
        trainer.should_stop = ended
        self._save_if_asked(trainer, pl_module, position)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        """By the clock of rank 0, since every process has another."""
        minutes = self._params.checkpoint_every_minutes
        return (
            trainer.is_global_zero
            and minutes is not None
            and time.monotonic() - self._saved_at >= 60 * minutes
        )

    def _save_if_asked(
        self, trainer: pl.Trainer, module: TrainingModule, position: Position, request: int = 0
    ) -> None:
        """Stopped after the save, where a signal asked any process for it."""
        asked = self._agreement.highest(max(request, self._signals.received))
        if asked:
            self._save(trainer, module, position)
        if asked > SAVE:
            raise Stopped(asked)

    def _save(self, trainer: pl.Trainer, module: TrainingModule, position: Position) -> None:
        if position == self.saved:
            return
        with ExitStack() as stack:
            for average in self._averages:
                stack.enter_context(average.put_aside())
            self._saves.write(
                trainer,
                partial(_write_parts, trainer, module, self._averages),
                partial(self._describe, trainer, position),
            )
        self.saved, self._saved_at = position, time.monotonic()

    def _describe(self, trainer: pl.Trainer, position: Position, digests: dict[str, str]) -> Save:
        last = position.epoch if position.step == 0 else 0  # an epoch's end keeps itself
        return Save(
            format_version=2,
            epoch=position.epoch,
            step=position.step,
            kept_epoch=self.kept_epoch if self._params.keep == "best" else last,
            history=self.history,
            stretches=self._stretches,
            actual=actual_setup(trainer),
            files=digests,
        )


def _write_parts(
    trainer: pl.Trainer, module: TrainingModule, averages: Sequence[WeightAverage], folder: Path
) -> None:
    write_trainer_state(trainer, folder)
    write_rank_state(module, averages, trainer.global_rank, folder)


def _continued(resumed: Save | None, stretch: Stretch, steps_per_epoch: int) -> list[Stretch]:
    if resumed is None:
        return [stretch]
    if resumed.stretches[-1].is_cut_as(stretch):
        return resumed.stretches
    return [
        *resumed.stretches,
        stretch.model_copy(update={"first_step": resumed.position.total_steps(steps_per_epoch)}),
    ]
