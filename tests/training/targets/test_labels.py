"""Tests of multi-label losses, scores and output functions."""

import pytest
import torch
from torch.nn import functional as F

from slipway.training.recipe.losses import class_weights
from slipway.training.targets.labels import LabelHead, LabelLoss
from tests.project_params import PROJECT

pytestmark = pytest.mark.unit

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-0.3, 3.0, -2.0]])
TARGETS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


def loss(name: str, weights: torch.Tensor | None = None, smoothing: float = 0.0) -> LabelLoss:
    changes = {"loss": name, "label_smoothing": smoothing}
    return LabelLoss(PROJECT.train.model_copy(update=changes), 1.0, weights)


def test_bce_is_the_mean_over_labels_of_the_binary_cross_entropy() -> None:
    expected = F.binary_cross_entropy(LOGITS.sigmoid(), TARGETS, reduction="none").mean(dim=1)
    assert torch.allclose(loss("bce")(LOGITS, TARGETS), expected)
    weights = torch.tensor([1.0, 1.0, 4.0])
    heavier = loss("bce", weights)(LOGITS, TARGETS) - expected
    assert torch.allclose(heavier, -F.logsigmoid(LOGITS[:, 2]))  # three more of one label in three


def test_asymmetric_loss_equals_the_formula_of_its_paper() -> None:
    shares = LOGITS.sigmoid()
    shifted = (shares - 0.05).clamp(min=0)
    absent = -((shifted**4) * (1 - shifted).log())
    expected = torch.where(TARGETS > 0, -shares.log(), absent).mean(dim=1)
    assert torch.allclose(loss("asymmetric")(LOGITS, TARGETS), expected, atol=1e-6)


def test_label_smoothing_moves_zeros_and_ones_towards_a_half() -> None:
    smooth = TARGETS * 0.8 + 0.1
    expected = F.binary_cross_entropy(LOGITS.sigmoid(), smooth, reduction="none").mean(dim=1)
    assert torch.allclose(loss("bce", smoothing=0.2)(LOGITS, TARGETS), expected)


def test_a_row_counts_as_correct_only_if_all_of_its_labels_are_right() -> None:
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert loss("bce").scores(LOGITS, targets).tolist() == [1.0, 0.0]


def test_the_mean_of_submodels_averages_probabilities_even_near_zero_and_one() -> None:
    logits = torch.tensor([[[60.0, -60.0, 1.0], [50.0, -50.0, -3.0]]])
    mean = LabelHead.mean_of_submodels(logits)
    assert torch.isfinite(mean).all()
    assert torch.allclose(mean.sigmoid(), logits.sigmoid().mean(dim=1))


def test_the_logits_of_each_label_are_divided_by_its_own_temperature() -> None:
    temperatures = torch.tensor([1.0, 2.0, 0.5])
    found = LabelHead.activate(LOGITS, temperatures)
    assert torch.allclose(found, torch.sigmoid(LOGITS / temperatures))


def test_balanced_weights_give_rows_with_and_without_a_label_equal_total_weight() -> None:
    targets = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 0]]).numpy()
    found = class_weights("balanced", ["a", "b"], targets)
    assert found is not None
    assert found.tolist() == pytest.approx([1 / 3, 3.0])
    named = class_weights({"b": 2.0, "a": 1.0}, ["a", "b"], targets)
    assert named is not None
    assert named.tolist() == [1.0, 2.0]
