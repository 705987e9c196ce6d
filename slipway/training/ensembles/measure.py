"""Computes loss and headline metric of outputs for the validation rows, as a training does."""

import torch
from torch import Tensor

from slipway.config.training import TrainParams
from slipway.data.store.packed import PackedSplit
from slipway.kinds.registry import kind_of
from slipway.training.networks.networks import NetworkSpec


class ValidationMeasure:
    """Evaluates outputs by the loss of the task, without class weights and label smoothing."""

    def __init__(self, train: TrainParams, spec: NetworkSpec, rows: PackedSplit) -> None:
        target, scale = kind_of(spec.task).target, spec.target_scale
        usual = {"loss": "auto", "huber_delta": None, "label_smoothing": 0.0}
        make = target.load_part("loss")
        self._loss = make(train.model_copy(update=usual), scale.std if scale else 1.0, None)
        self._targets = torch.from_numpy(rows.targets.astype(target.dtype))
        self.headline = target.headline

    def losses(self, answers: Tensor) -> Tensor:
        """Return the loss of each row, (N,), given outputs (N, K)."""
        found: Tensor = self._loss(answers, self._targets)
        return found

    def loss(self, answers: Tensor, mask: Tensor | None = None) -> float:
        """Return the mean loss of outputs (B, K) over the rows in `mask` (N,), or over all."""
        targets = self._targets if mask is None else self._targets[mask]
        return float(self._loss(answers, targets).double().mean())

    def metrics(self, answers: Tensor) -> dict[str, float]:
        """Return the mean loss and the headline metric of outputs (N, K), keyed by metric name."""
        score = float(self._loss.scores(answers, self._targets).mean())
        return {
            "val/loss": self.loss(answers),
            f"val/{self.headline}": self._loss.metric(score),
        }
