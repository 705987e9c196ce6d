"""What one step of training does: augment, answer, loss, optimizer and schedule, as a Lightning module.

Losses are taken in float32 whatever the network computes in. A loss that is not finite stops the run
before it changes a weight. Metrics of an epoch are sums over rows, so they do not depend on how
the rows were cut over processes.
"""

import hashlib
import math
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from slipway.contract import is_classification
from slipway.errors import TrainingError
from slipway.params import TrainParams
from slipway.training.augmentation import augment_batch
from slipway.training.batches import Batch
from slipway.training.networks import Network


class TrainingModule(pl.LightningModule):
    """Trains `network`; `ids` are those of the training rows, to name the guilty ones, `mean_weight` is over all of them."""

    def __init__(
        self, network: Network, params: TrainParams, seed: int, steps_per_epoch: int, ids: Sequence[str], mean_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.network = network
        self.epoch_metrics: dict[str, float] = {}  # of the epoch that ended last, equal on every rank
        self._params, self._seed, self._steps_per_epoch, self._ids = params, seed, steps_per_epoch, ids
        self._mean_weight = mean_weight
        self._classes = is_classification(network.spec.task)
        self._sums = _Sums()

    def on_train_epoch_start(self) -> None:
        self._sums = _Sums()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The mean loss of a batch, () float32, each row as its weight says."""
        # Dropout and the like: a function of (seed, epoch, batch, rank), so that a resumed run draws the same.
        torch.manual_seed(_derived_seed(self._seed, self.current_epoch, batch_index, self.global_rank))
        inputs = batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)
        # By the mean over all training rows, not over the batch: so a step does not depend on how it is cut over processes.
        losses = self._mixed_losses(self.network(inputs), batch) * (batch.weights / self._mean_weight)
        loss = losses.mean()
        if not torch.isfinite(loss):
            raise TrainingError(self._describe_bad(losses, batch.rows))
        self._sums.add(loss=losses.detach(), counted=batch.counted)
        return loss

    def on_validation_epoch_start(self) -> None:
        # Without this each rank would validate, and rank 0 keep, the statistics of its own share of the rows.
        average_running_statistics(self.network)
        self.epoch_metrics = {"train/loss": self._sums.means()["loss"]}
        self._sums = _Sums()

    def validation_step(self, batch: Batch) -> None:
        """Adds up loss and correct answers (classes) or squared errors (a numeric target)."""
        answers = self.network(batch.inputs)
        if self._classes:
            score = (answers.argmax(dim=1) == batch.targets).double()
        else:
            score = (answers[:, 0].double() - batch.targets.double()) ** 2
        self._sums.add(loss=self._losses(answers, batch.targets), score=score, counted=batch.counted)

    def on_validation_epoch_end(self) -> None:
        means = self._sums.means()
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
        """AdamW, whose decay leaves norms, scales and biases alone, under a linear warm-up and a cosine."""
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for name, parameter in named if decays(name, parameter)], "weight_decay": self._params.weight_decay},
            {"params": [parameter for name, parameter in named if not decays(name, parameter)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self._params.learning_rate)
        warmup, total = round(self._params.warmup_epochs * self._steps_per_epoch), self._params.epochs * self._steps_per_epoch
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, warmup, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _mixed_losses(self, answers: Tensor, batch: Batch) -> Tensor:
        """(B,) float32: of a mixed image, the losses for its two targets by their shares."""
        own = self._losses(answers, batch.targets)
        if batch.mixing is None:
            return own
        shares = batch.mixing.own_shares
        return shares * own + (1 - shares) * self._losses(answers, batch.mixing.targets)

    def _losses(self, answers: Tensor, targets: Tensor) -> Tensor:
        """(B,) float32: cross-entropy, or the squared error in standard deviations of the target.

        From answers (B, K); from (B, submodels, K) the mean of the submodels' losses, so that each learns by itself.
        """
        if answers.ndim == 3:
            num_submodels = answers.shape[1]
            alone = self._losses(answers.flatten(0, 1), targets.repeat_interleave(num_submodels))
            return alone.view(-1, num_submodels).mean(dim=1)
        if self._classes:
            return F.cross_entropy(answers.float(), targets, label_smoothing=self._params.label_smoothing, reduction="none")
        return ((answers[:, 0].float() - targets) / self.network.target_std) ** 2

    def _describe_bad(self, losses: Tensor, rows: Tensor) -> str:
        bad = [self._ids[row] for row in rows[~torch.isfinite(losses)].tolist()]
        named = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        return (
            f"the loss is not finite in step {self.global_step + 1} (epoch {self.current_epoch + 1}) for {len(bad)} of {len(rows)} rows, "
            f"with the ids {named}. No weight was changed by this step. Lower train.learning_rate, raise train.warmup_epochs, "
            "or use train.precision 32-true."
        )


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls a parameter towards 0. Of an ensemble, scales (`r`, `s`) and biases are matrices, too."""
    return parameter.ndim > 1 and name.rpartition(".")[2] not in ("bias", "r", "s")


def learning_rate_share(step: int, num_warmup_steps: int, num_steps: int) -> float:
    """The share of the peak in (0, 1] for optimizer step `step`, counted from 0: linear up, then half a cosine down.

    It has no hard end: past `num_steps` it stays at its smallest.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = min(step - num_warmup_steps, num_steps - num_warmup_steps - 1) / max(1, num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def average_running_statistics(network: nn.Module) -> None:
    """Give the running means and variances of BatchNorm the same value on every rank: their mean."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            for statistics in (module.running_mean, module.running_var):
                assert statistics is not None
                distributed.all_reduce(statistics)
                statistics.div_(distributed.get_world_size())


class _Sums:
    """Sums over rows on the device, reduced over ranks when their means are asked for."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, *, counted: Tensor, **values: Tensor) -> None:
        """Add (B,) values where (B,) `counted` is true."""
        for name, value in {**values, "rows": torch.ones_like(counted)}.items():
            total = torch.where(counted, value.double(), 0.0).sum()
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def means(self) -> dict[str, float]:
        """The mean over all rows of all ranks, by name."""
        totals = torch.stack(list(self._totals.values()))
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(totals)
        sums = dict(zip(self._totals, totals.tolist(), strict=True))
        rows = sums.pop("rows")
        return {name: total / rows for name, total in sums.items()}


def _derived_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{batch}/{rank}/dropout".encode()).digest()[:8], "little") >> 1
