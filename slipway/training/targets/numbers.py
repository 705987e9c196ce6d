"""Training for a numeric target: squared error or Huber loss, and RMSE."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.training import TrainParams
from slipway.data.store.packed import TargetScale


class NumberLoss(nn.Module):
    """Maps (B, 1) values and (B,) targets to (B,) float32 losses.

    Errors are in standard deviations of the target. Huber's loss (Huber 1964, "Robust estimation of
    a location parameter") is half of the squared error up to `huber_delta`, and linear beyond.
    """

    def __init__(
        self, params: TrainParams, target_std: float, class_weights: Tensor | None
    ) -> None:
        super().__init__()
        self._target_std, self._huber_delta = target_std, params.huber_delta

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        errors = (values[:, 0].float() - targets) / self._target_std
        if self._huber_delta is None:
            return errors**2
        return F.huber_loss(
            errors, torch.zeros_like(errors), delta=self._huber_delta, reduction="none"
        )

    def distilled(self, values: Tensor, soft: Tensor, temperature: float) -> Tensor:
        """Return the losses (B,) of values against a teacher's values `soft` (B, 1).

        The temperature is ignored.
        """
        return self.forward(values, soft[:, 0])

    def scores(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return the squared errors, (B,) float64."""
        return (values[:, 0].double() - targets.double()) ** 2

    def metric(self, mean_score: float) -> float:
        """Return the RMSE, the root of the mean of `scores`."""
        return math.sqrt(mean_score)


class NumberHead:
    """Returns predicted numbers unchanged; they need no temperature."""

    @staticmethod
    def activate(values: Tensor, temperature: float) -> Tensor:
        return values

    @staticmethod
    def mean_of_submodels(values: Tensor) -> Tensor:
        """Average the values of the submodels, (B, submodels, 1); return (B, 1)."""
        return values.mean(dim=1)

    @staticmethod
    def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
        """Average values (B, members, 1) of members by `weights` (members,); return (B, 1)."""
        return (values * weights[:, None]).sum(dim=1)


class NumberTrees:
    """Boosted trees for a numeric target, scaled to standard deviations from its mean."""

    @staticmethod
    def objective(params: TrainParams, num_classes: int) -> dict[str, Any]:
        """Return LightGBM's settings of the objective, the squared error or Huber's loss."""
        if params.huber_delta is None:
            return {"objective": "regression"}
        return {"objective": "huber", "alpha": params.huber_delta}

    @staticmethod
    def num_sums(num_classes: int) -> int:
        """Return the number of raw scores per row: 1."""
        return 1

    @staticmethod
    def labels(targets: NDArray[np.float64], scale: TargetScale | None) -> NDArray[np.float64]:
        """Return the targets in standard deviations from their mean, as LightGBM learns them."""
        assert scale is not None
        return (targets - scale.mean) / scale.std

    @staticmethod
    def sums(predictions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Reshape LightGBM's predictions (N,) to raw scores (N, 1)."""
        return predictions[:, np.newaxis]

    @staticmethod
    def answers(sums: Tensor) -> Tensor:
        """Return raw scores (B, 1) unchanged, because they are the network's values already."""
        return sums
