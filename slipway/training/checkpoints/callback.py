"""Saves checkpoints at the end of epochs, at time intervals and on signals, and stops early."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from slipway.artifacts.training_setup import RunSegment
from slipway.config.training import TrainParams
from slipway.training.checkpoints.checkpoints import (
    Checkpoint,
    CheckpointStore,
    TrainingPosition,
    write_trainer_state,
)
from slipway.training.checkpoints.rank_state import write_rank_state
from slipway.training.distributed.collectives import MaxReducer
from slipway.training.distributed.stop_signals import SAVE, Paused, Stopped, StopSignals
from slipway.training.distributed.strategies import actual_setup
from slipway.training.module import TrainingModule
from slipway.training.recipe.weight_average import WeightAverage


class CheckpointCallback(pl.callbacks.Checkpoint):
    """Records the metrics of each epoch, stops early, and saves checkpoints.

    Args:
        averages: moving average of the weights; if there is one, it is validated instead of them.
        patience: epochs without a lower validation loss that end the training; None: never.
        steps_per_epoch: optimizer steps per epoch.
        num_accumulated: batches per optimizer step.
        pause_after: the epoch after which an unfinished training saves and raises Paused.
    """

    def __init__(
        self,
        store: CheckpointStore,
        resumed: Checkpoint | None,
        segment: RunSegment,
        params: TrainParams,
        signals: StopSignals,
        averages: Sequence[WeightAverage] = (),
        *,
        patience: int | None,
        steps_per_epoch: int,
        num_accumulated: int,
        pause_after: int | None = None,
    ) -> None:
        self._pause_after, self._patience = pause_after, patience
        self._store, self._params, self._signals = store, params, signals
        self._reducer = MaxReducer()
        self._averages = averages
        self._steps_per_epoch, self._num_accumulated = steps_per_epoch, num_accumulated
        self.history: list[dict[str, float]] = list(resumed.history) if resumed else []
        self.kept_epoch = resumed.kept_epoch if resumed else 0
        self._segments = _extend_segments(resumed, segment, steps_per_epoch)
        self.saved = resumed.position if resumed else TrainingPosition(0, 0)
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps, unfinished = divmod(batch_idx + 1, self._num_accumulated)
        if not unfinished:
            position = TrainingPosition(len(self.history), steps)
            self._save_on_request(trainer, pl_module, position, is_due=self._is_due(trainer))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        position = TrainingPosition(len(self.history), self._steps_per_epoch)
        self._save_on_request(trainer, pl_module, position)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.history.append(dict(pl_module.epoch_metrics))
        epoch = len(self.history)
        is_better = (
            self.kept_epoch == 0
            or self.history[-1]["val/loss"] < self.history[self.kept_epoch - 1]["val/loss"]
        )
        becomes_kept = trainer.strategy.broadcast(is_better) and self._params.keep == "best"
        if becomes_kept:
            self.kept_epoch = epoch
        position = TrainingPosition(epoch, 0)
        ended = has_ended(self.history, self._params.epochs, self._patience)
        if becomes_kept or epoch % self._params.checkpoint_every_epochs == 0 or ended:
            self._save(trainer, pl_module, position)
        trainer.should_stop = ended
        self._save_on_request(trainer, pl_module, position)
        if epoch == self._pause_after and not ended:
            self._save(trainer, pl_module, position)
            raise Paused(epoch)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        """Return True on rank 0 if a timed checkpoint is due; always False on other ranks."""
        minutes = self._params.checkpoint_every_minutes
        if minutes is None or not trainer.is_global_zero:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def _save_on_request(
        self,
        trainer: pl.Trainer,
        module: TrainingModule,
        position: TrainingPosition,
        *,
        is_due: bool = False,
    ) -> None:
        """Save a checkpoint if one is due or any process received a signal.

        Raises Stopped after saving because of a signal.
        """
        request = self._reducer.highest(max(SAVE if is_due else 0, self._signals.received))
        if request:
            self._save(trainer, module, position)
        if request > SAVE:
            raise Stopped(request)

    def _save(
        self, trainer: pl.Trainer, module: TrainingModule, position: TrainingPosition
    ) -> None:
        if position == self.saved:
            return
        with ExitStack() as stack:
            for average in self._averages:
                stack.enter_context(average.training_weights())
            self._store.write(
                trainer,
                partial(_write_state, trainer, module, self._averages),
                partial(self._describe, trainer, position),
            )
        self.saved, self._saved_at = position, time.monotonic()

    def _describe(
        self, trainer: pl.Trainer, position: TrainingPosition, checksums: dict[str, str]
    ) -> Checkpoint:
        kept_epoch = self.kept_epoch
        if self._params.keep != "best":
            kept_epoch = position.epoch if position.step == 0 else 0
        return Checkpoint(
            format_version=3,
            epoch=position.epoch,
            step=position.step,
            kept_epoch=kept_epoch,
            history=self.history,
            segments=self._segments,
            actual=actual_setup(trainer),
            files=checksums,
        )


def has_ended(history: Sequence[Mapping[str, float]], epochs: int, patience: int | None) -> bool:
    """Return True if the training is complete; `history` holds the metrics of each epoch so far.

    Early stopping needs no other state, so a resumed training makes the same decision.
    """
    return len(history) >= epochs or stops_early(history, patience)


def stops_early(history: Sequence[Mapping[str, float]], patience: int | None) -> bool:
    """Return True if the validation loss has not reached a new minimum for `patience` epochs."""
    if patience is None or not history:
        return False
    losses = [metrics["val/loss"] for metrics in history]
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def _write_state(
    trainer: pl.Trainer, module: TrainingModule, averages: Sequence[WeightAverage], folder: Path
) -> None:
    write_trainer_state(trainer, folder)
    write_rank_state(module, averages, trainer.global_rank, folder)


def _extend_segments(
    resumed: Checkpoint | None, segment: RunSegment, steps_per_epoch: int
) -> list[RunSegment]:
    """Append a segment if the process layout differs from that of the resumed checkpoint."""
    if resumed is None:
        return [segment]
    if resumed.segments[-1].has_same_layout(segment):
        return resumed.segments
    first_step = resumed.position.total_steps(steps_per_epoch)
    return [*resumed.segments, segment.model_copy(update={"first_step": first_step})]
