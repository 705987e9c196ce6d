"""What one step of training does: augment, answer, loss, as a Lightning module; `guard` judges it before it changes a weight."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from slipway.config.sections import TrainParams
from slipway.kinds.registry import is_classification
from slipway.system.errors import TrainingError
from slipway.training.augmentation.batch import augment_batch
from slipway.training.batches.batches import Batch
from slipway.training.epoch_sums import EpochSums
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses, l1_penalty
from slipway.training.recipe.nonfinite import StepGuard
from slipway.training.recipe.optimizers import optimizer_and_schedule, optimizer_names
from slipway.training.running_statistics import average_running_statistics


class TrainingModule(pl.LightningModule):
    """Trains `network`; `ids` are those of the training rows, to name the guilty ones, `mean_weight` is over all of them.

    `class_weights` is (classes,) float32, or None where all count the same.
    """

    def __init__(
        self,
        network: Network,
        params: TrainParams,
        seed: int,
        steps_per_epoch: int,
        ids: Sequence[str],
        mean_weight: float = 1.0,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.epoch_metrics: dict[
            str, float
        ] = {}  # of the epoch that ended last, equal on every rank
        self.guard = StepGuard(network, params, ids)
        self.optimizer_names: list[
            str
        ] = []  # of the weights, in the order in which the optimizer counts them
        self._params, self._seed, self._steps_per_epoch = params, seed, steps_per_epoch
        self._mean_weight = mean_weight
        self._classes = is_classification(network.spec.task)
        self._losses = RowLosses(network, params, class_weights)
        self.train_sums, self._val_sums = EpochSums(), EpochSums()

    def on_train_epoch_start(self) -> None:
        self.train_sums = EpochSums()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The mean loss of a batch, () float32, each row as its weight says."""
        # Dropout and the like: a function of (seed, epoch, batch, rank), so that a resumed run draws the same.
        torch.manual_seed(
            _derived_seed(self._seed, self.current_epoch, batch_index, self.global_rank)
        )
        self.guard.start_batch()
        inputs = (
            batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)
        )
        # By the mean over all training rows, not over the batch: so a step does not depend on how it is cut over processes.
        losses = self._losses(self.network(inputs), batch.targets, batch.mixing) * (
            batch.weights / self._mean_weight
        )
        return self.guard.watched_mean(losses, batch) + l1_penalty(self.network, self._params.l1)

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        self.guard.before_step(self.trainer)
        super().optimizer_step(*arguments, **named)
        for seen in self.guard.after_step(self.trainer):
            self.train_sums.add(loss=seen.losses, counted=seen.counted)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.guard.clip(self.trainer, optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the names behind the optimizer's numbers, for a resumption on other processes."""
        checkpoint["optimizer_names"] = self.optimizer_names
        checkpoint["guard"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.guard.load_state_dict(checkpoint["guard"])

    def on_validation_epoch_start(self) -> None:
        # Without this each rank would validate, and rank 0 keep, the statistics of its own share of the rows.
        average_running_statistics(self.network)
        if self.train_sums.is_empty:
            raise TrainingError(
                f"every step of epoch {self.current_epoch + 1} was skipped, so nothing was learned. See the lines above."
            )
        self.epoch_metrics = {
            "train/loss": self.train_sums.means()["loss"],
            "skipped_steps": float(self.guard.num_skipped),
        }
        self._val_sums = EpochSums()

    def validation_step(self, batch: Batch) -> None:
        """Adds up loss and correct answers (classes) or squared errors (a numeric target)."""
        answers = self.network(batch.inputs)
        if self._classes:
            score = (answers.argmax(dim=1) == batch.targets).double()
        else:
            score = (answers[:, 0].double() - batch.targets.double()) ** 2
        self._val_sums.add(
            loss=self._losses(answers, batch.targets), score=score, counted=batch.counted
        )

    def on_validation_epoch_end(self) -> None:
        means = self._val_sums.means()
        self.epoch_metrics["val/loss"] = means["loss"]
        if self._classes:
            self.epoch_metrics["val/accuracy"] = means["score"]
        else:
            self.epoch_metrics["val/rmse"] = math.sqrt(means["score"])
        if not all(map(math.isfinite, self.epoch_metrics.values())):
            raise TrainingError(
                f"{self.epoch_metrics} after epoch {self.current_epoch + 1} is not finite. "
                "Lower train.learning_rate, or use train.precision 32-true."
            )
        self.epoch_metrics["learning_rate"] = max(
            float(group["lr"]) for group in self.trainer.optimizers[0].param_groups
        )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """See `optimizers`."""
        configured = optimizer_and_schedule(self.network, self._params, self._steps_per_epoch)
        self.optimizer_names = optimizer_names(
            configured["optimizer"], self
        )  # now, since DeepSpeed makes flat groups of the weights
        return configured


def _derived_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    return (
        int.from_bytes(
            hashlib.sha256(f"{seed}/{epoch}/{batch}/{rank}/dropout".encode()).digest()[:8], "little"
        )
        >> 1
    )
