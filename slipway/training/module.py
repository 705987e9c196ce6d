"""A training step as a Lightning module: augmentation, forward pass, loss, metrics per epoch."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, distributed

from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.system.errors import TrainingError
from slipway.training.augmentation.batch import augment_batch
from slipway.training.batches.batches import Batch, Mixing
from slipway.training.batches.soft_answers import Distillation
from slipway.training.distributed.collectives import num_ranks
from slipway.training.distributed.pipeline import PipelineStrategy
from slipway.training.networks.frozen_parts import answer_to_features
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses, l1_penalty
from slipway.training.recipe.nonfinite import NonFiniteGuard
from slipway.training.recipe.optimizers import optimizer_and_schedule, optimizer_names
from slipway.training.recipe.repeated_step import check_equal_bits, check_equal_weights
from slipway.training.recipe.weight_average import average_running_statistics


class TrainingModule(pl.LightningModule):
    """Trains `network`.

    Args:
        ids: ids of the training rows, which the error of a non-finite loss lists.
        mean_weight: mean weight of all training rows.
        class_weights: (classes,) float32, or None if all classes count the same.
        distillation: settings of the loss for a teacher's outputs; None without a teacher.
        model_parallel: number of ranks that share a copy of the network and compute the same rows.
        head: layer of the network that is trained alone, on the features of the rows; None if the
            rows themselves pass through the whole network.
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
        distillation: Distillation | None = None,
        *,
        model_parallel: int = 1,
        fused_optimizer: bool = False,
        head: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self._head = None if head is None else answer_to_features(network, head)
        self.epoch_metrics: dict[str, float] = {}  # metrics of the last epoch, equal on every rank
        self.nonfinite_guard = NonFiniteGuard(network, params, ids)
        self.optimizer_names: list[str] = []  # names of the weights, in the optimizer's order
        self._params, self._seed, self._steps_per_epoch = params, seed, steps_per_epoch
        self._mean_weight = mean_weight
        self._model_parallel, self._fused_optimizer = model_parallel, fused_optimizer
        self._headline = kind_of(network.spec.task).target.headline
        self._losses = RowLosses(network, params, class_weights, distillation)
        self.train_sums, self._val_sums = EpochSums(), EpochSums()

    def on_train_epoch_start(self) -> None:
        self.train_sums = EpochSums()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Return the weighted mean loss of a batch, a float32 scalar."""
        self._start_batch(batch, batch_index)
        # Spikes are judged over all batches of a step.
        accumulated = self.trainer.accumulate_grad_batches if self._params.on_loss_spike else 1
        losses = self._row_losses(self._answers_to(batch), batch)
        mean = self.nonfinite_guard.checked_mean(losses, batch, accumulated)
        return mean + l1_penalty(self.network, self._params.l1)

    def _start_batch(self, batch: Batch, batch_index: int) -> None:
        # Dropout depends only on (seed, epoch, batch, rank), so a resumed run draws the same.
        seed = _derived_seed(self._seed, self.current_epoch, batch_index, self._drawing_rank)
        self._repeat_if_due(batch, seed)
        torch.manual_seed(seed)
        self.nonfinite_guard.start_batch()

    @property
    def _drawing_rank(self) -> int:
        """The rank that seeds dropout. Ranks that compute the same values have the same one."""
        return self.global_rank // self._model_parallel

    def _answers_to(self, batch: Batch) -> Tensor:
        """Run the forward pass of a training batch; return outputs (B, K)."""
        return self.answers(_final_inputs(batch))

    def _row_losses(self, answers: Tensor, batch: Batch) -> Tensor:
        """Return the weighted loss of each row, (B,), for the outputs of a batch."""
        # Weights are relative to the mean of all training rows, not of the batch: a step then does
        # not depend on how its rows are divided over processes.
        losses: Tensor = self._losses(answers, batch.targets, batch.mixing, batch.soft)
        return losses * (batch.weights / self._mean_weight)

    def _repeat_if_due(self, batch: Batch, seed: int) -> None:
        """Check every `train.repeat_every_steps` steps that a repeated pass gives equal bits."""
        every = self._params.repeat_every_steps
        if every is None or (self.trainer.global_step + 1) % every:
            return
        step = f"step {self.trainer.global_step + 1} (epoch {self.current_epoch + 1})"

        def mean_loss() -> Tensor:
            torch.manual_seed(seed)
            return self._row_losses(self._answers_to(batch), batch).mean()

        if num_ranks() > 1:
            check_equal_weights(self.network, step)
        check_equal_bits(self.network, mean_loss, step)

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        self.nonfinite_guard.before_step(self.trainer)
        super().optimizer_step(*arguments, **named)
        for batch in self.nonfinite_guard.after_step(self.trainer):
            self.train_sums.add(loss=batch.losses, counted=self._counted(batch.counted))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.nonfinite_guard.clip(self.trainer, optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the names of the weights, with which another process layout can resume."""
        checkpoint["optimizer_names"] = self.optimizer_names
        checkpoint["guard"] = self.nonfinite_guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.nonfinite_guard.load_state_dict(checkpoint["guard"])

    def on_validation_epoch_start(self) -> None:
        # Otherwise each rank would validate, and rank 0 keep, the statistics of its own rows.
        average_running_statistics(self.network)
        if not self.train_sums.totals:
            raise TrainingError(
                f"every step of epoch {self.current_epoch + 1} was skipped, so nothing was "
                "learned. Correct the rows in the lines above, or lower train.learning_rate."
            )
        self.epoch_metrics = {
            "train/loss": self.train_sums.means()["loss"],
            "skipped_steps": float(self.nonfinite_guard.num_skipped),
        }
        self._val_sums = EpochSums()

    def validation_step(self, batch: Batch) -> None:
        """Add the losses and scores of a batch to the sums of the epoch."""
        answers = self.answers(batch.inputs)
        self._val_sums.add(
            loss=self._losses(answers, batch.targets),
            score=self._losses.of_target.scores(answers, batch.targets),
            counted=self._counted(batch.counted),
        )

    def answers(self, rows: Tensor) -> Tensor:
        """Return the outputs (B, K) for rows (B, ...), or for features (B, D) of a frozen body."""
        answers: Tensor = (self._head or self.network)(rows)
        return answers

    def on_validation_epoch_end(self) -> None:
        means = self._val_sums.means()
        self.epoch_metrics["val/loss"] = means["loss"]
        headline = self._losses.of_target.metric(means["score"])
        self.epoch_metrics[f"val/{self._headline}"] = headline
        if not all(map(math.isfinite, self.epoch_metrics.values())):
            raise TrainingError(
                f"{self.epoch_metrics} after epoch {self.current_epoch + 1} is not finite. "
                "Lower train.learning_rate, or use train.precision 32-true."
            )
        self.epoch_metrics["learning_rate"] = max(
            float(group["lr"]) for group in self.trainer.optimizers[0].param_groups
        )

    def _counted(self, counted: Tensor) -> Tensor:
        """Return the mask `counted` (B,) without the rows that another rank counts, too."""
        return counted if self._counts_rows else torch.zeros_like(counted)

    @property
    def _counts_rows(self) -> bool:
        """True if this rank, of all that compute the same rows, is the one that counts them."""
        return self.global_rank % self._model_parallel == 0

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        configured = optimizer_and_schedule(
            self.network, self._params, self._steps_per_epoch, fused=self._fused_optimizer
        )
        # Now, because DeepSpeed will flatten the weights of each group.
        self.optimizer_names = optimizer_names(configured["optimizer"], self)
        return configured


class PipelinedModule(TrainingModule):
    """Trains a network whose blocks are divided over processes: strategy `pipeline`."""

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Add the gradients of all micro-batches; return the weighted mean loss, () float32."""
        self._start_batch(batch, batch_index)
        self.network.zero_grad()
        means: list[Tensor] = []
        batch = batch._replace(inputs=_final_inputs(batch), changes=None)

        def loss(answers: Tensor, places: Tensor) -> Tensor:
            part = _rows_of(batch, places)
            losses = self._row_losses(answers, part)
            means.append(self.nonfinite_guard.checked_mean(losses, part))
            return means[-1]

        self._pipeline.train_batch(batch.inputs, loss)
        if not means:  # the guard counts batches in each process
            self.nonfinite_guard.checked_mean(torch.zeros_like(batch.weights), batch)
        mean = torch.stack(means).mean() if means else batch.weights.new_zeros(())
        # Lightning's own backward pass adds the gradient of the penalty alone.
        return self._pipeline.from_last(mean).requires_grad_() + l1_penalty(
            self.network, self._params.l1
        )

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing. Lightning calls this after the step has computed its gradients."""

    def answers(self, rows: Tensor) -> Tensor:
        """Return the outputs (B, K) for rows (B, ...), on every process of the pipeline."""
        return self._pipeline.answers(rows)

    @property
    def _counts_rows(self) -> bool:
        return self._pipeline.is_last

    @property
    def _drawing_rank(self) -> int:
        # Stages of a copy compute different blocks, so their masks must differ as well.
        return self.global_rank

    @property
    def _pipeline(self) -> PipelineStrategy:
        strategy = self.trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        return strategy


def _final_inputs(batch: Batch) -> Tensor:
    """Return the network's inputs (B, ...), after augmentation if the device is to do it."""
    return batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)


def _rows_of(batch: Batch, places: Tensor) -> Batch:
    """Return the rows of a batch with final inputs at positions `places` (B,) int64."""
    mixing = batch.mixing
    if mixing is not None:
        soft = None if mixing.soft is None else mixing.soft[places]
        mixing = Mixing(mixing.targets[places], mixing.own_fractions[places], soft)
    return batch._replace(
        mixing=mixing,
        inputs=batch.inputs[places],
        targets=batch.targets[places],
        weights=batch.weights[places],
        counted=batch.counted[places],
        rows=batch.rows[places],
        soft=None if batch.soft is None else batch.soft[places],
    )


class EpochSums:
    """Sums and means over an epoch that do not depend on the division of rows over ranks."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}  # () float64 by name, of this rank; empty at first

    def add(self, *, counted: Tensor, **values: Tensor) -> None:
        """Add the values (B,) of those rows for which `counted` (B,) is True."""
        for name, value in {**values, "rows": torch.ones_like(counted)}.items():
            total = torch.where(counted, value.double(), 0.0).sum()
            self.totals[name] = self.totals[name] + total if name in self.totals else total

    def means(self) -> dict[str, float]:
        """Return the mean of each value over the rows of all ranks, by name."""
        names = sorted(self.totals)  # restored totals may have another order on each rank
        totals = torch.stack([self.totals[name] for name in names])
        if num_ranks() > 1:
            distributed.all_reduce(totals)
        sums = dict(zip(names, totals.tolist(), strict=True))
        rows = sums.pop("rows")
        return {name: total / rows for name, total in sums.items()}


def _derived_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}/{epoch}/{batch}/{rank}/dropout".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
