"""What one step of training does: augment, answer, loss, as a Lightning module.

A loss that is not finite stops the run before it changes a weight.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from slipway.contract import is_classification
from slipway.errors import TrainingError
from slipway.params import TrainParams
from slipway.training.augmentation import augment_batch
from slipway.training.batches import Batch
from slipway.training.epoch_sums import EpochSums
from slipway.training.losses import RowLosses
from slipway.training.networks import Network
from slipway.training.optimizers import optimizer_and_schedule, optimizer_names
from slipway.training.running_statistics import average_running_statistics


class TrainingModule(pl.LightningModule):
    """Trains `network`; `ids` are those of the training rows, to name the guilty ones, `mean_weight` is over all of them."""

    def __init__(
        self, network: Network, params: TrainParams, seed: int, steps_per_epoch: int, ids: Sequence[str], mean_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.network = network
        self.epoch_metrics: dict[str, float] = {}  # of the epoch that ended last, equal on every rank
        self.optimizer_names: list[str] = []  # of the weights, in the order in which the optimizer counts them
        self._params, self._seed, self._steps_per_epoch, self._ids = params, seed, steps_per_epoch, ids
        self._mean_weight = mean_weight
        self._classes = is_classification(network.spec.task)
        self._losses = RowLosses(network, params)
        self.train_sums, self._val_sums = EpochSums(), EpochSums()

    def on_train_epoch_start(self) -> None:
        self.train_sums = EpochSums()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The mean loss of a batch, () float32, each row as its weight says."""
        # Dropout and the like: a function of (seed, epoch, batch, rank), so that a resumed run draws the same.
        torch.manual_seed(_derived_seed(self._seed, self.current_epoch, batch_index, self.global_rank))
        inputs = batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)
        # By the mean over all training rows, not over the batch: so a step does not depend on how it is cut over processes.
        losses = self._losses(self.network(inputs), batch.targets, batch.mixing) * (batch.weights / self._mean_weight)
        loss = losses.mean()
        if not torch.isfinite(loss):
            raise TrainingError(self._describe_bad(losses, batch.rows))
        self.train_sums.add(loss=losses.detach(), counted=batch.counted)
        return loss

    def on_validation_epoch_start(self) -> None:
        # Without this each rank would validate, and rank 0 keep, the statistics of its own share of the rows.
        average_running_statistics(self.network)
        self.epoch_metrics = {"train/loss": self.train_sums.means()["loss"]}
        self._val_sums = EpochSums()

    def validation_step(self, batch: Batch) -> None:
        """Adds up loss and correct answers (classes) or squared errors (a numeric target)."""
        answers = self.network(batch.inputs)
        if self._classes:
            score = (answers.argmax(dim=1) == batch.targets).double()
        else:
            score = (answers[:, 0].double() - batch.targets.double()) ** 2
        self._val_sums.add(loss=self._losses(answers, batch.targets), score=score, counted=batch.counted)

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
        self.epoch_metrics["learning_rate"] = float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """See `optimizers`."""
        configured = optimizer_and_schedule(self, self._params, self._steps_per_epoch)
        self.optimizer_names = optimizer_names(configured["optimizer"], self)  # now, since DeepSpeed makes flat groups of the weights
        return configured

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the names behind the optimizer's numbers, for a resumption on other processes."""
        checkpoint["optimizer_names"] = self.optimizer_names

    def _describe_bad(self, losses: Tensor, rows: Tensor) -> str:
        bad = [self._ids[row] for row in rows[~torch.isfinite(losses)].tolist()]
        named = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        return (
            f"the loss is not finite in step {self.global_step + 1} (epoch {self.current_epoch + 1}) for {len(bad)} of {len(rows)} rows, "
            f"with the ids {named}. No weight was changed by this step. Lower train.learning_rate, raise train.warmup_epochs, "
            "or use train.precision 32-true."
        )


def _derived_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{batch}/{rank}/dropout".encode()).digest()[:8], "little") >> 1
