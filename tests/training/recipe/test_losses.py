"""Tests of the losses of rows, and of class weights."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from slipway.data.store.packed import TargetScale
from slipway.system.errors import ParamsError, TrainingError
from slipway.training.batches.batches import Mixing
from slipway.training.batches.soft_answers import Distillation
from slipway.training.networks.networks import build_network
from slipway.training.recipe.losses import RowLosses, class_weights, l1_penalty
from tests.project_params import PROJECT
from tests.training.conftest import spec
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

TARGETS = np.array([0.0] * 6 + [1.0] * 2)


def _of_a_number(**changes: Any) -> RowLosses:
    scale = TargetScale(mean=10.0, std=2.0)
    network = build_network(spec(task="image_regression", classes=[], target_scale=scale))
    return RowLosses(network, PROJECT.train.model_copy(update=changes))


def _weights(asked: Literal["balanced"] | dict[str, float]) -> Tensor:
    found = class_weights(asked, ["a", "b"], TARGETS)
    assert found is not None
    return found


def test_the_loss_of_a_numeric_target_measures_errors_in_standard_deviations() -> None:
    assert _of_a_number()(torch.tensor([[11.0], [14.0]]), torch.tensor([10.0, 10.0])).tolist() == [
        0.25,
        4.0,
    ]


def test_the_huber_loss_is_half_the_squared_error_up_to_delta_and_linear_beyond() -> None:
    losses = _of_a_number(loss="huber", huber_delta=0.5)(
        torch.tensor([[10.5], [11.0], [14.0], [18.0]]), torch.full((4,), 10.0)
    )
    assert losses.tolist() == pytest.approx(
        [0.5 * 0.25**2, 0.5 * 0.5**2, 0.5 * (2 - 0.25), 0.5 * (4 - 0.25)]
    )


def test_balanced_class_weights_equal_those_of_scikit_learn() -> None:
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=TARGETS)
    assert _weights("balanced").tolist() == pytest.approx(expected.tolist())


def test_class_weights_keep_their_ratio_and_have_mean_one_over_rows() -> None:
    weights = _weights({"b": 3.0, "a": 1.0}).numpy()
    assert weights[1] / weights[0] == pytest.approx(3.0)
    assert weights[TARGETS.astype(int)].mean() == pytest.approx(1.0)


def test_class_weights_returns_none_if_none_are_requested() -> None:
    assert class_weights(None, ["a", "b"], TARGETS) is None


def test_class_weights_for_other_classes_are_refused_with_every_name() -> None:
    with pytest.raises(ParamsError) as error:
        class_weights({"above": 1.0, "belwo": 2.0}, ["above", "below"], TARGETS)
    assert "'below' has none" in str(error.value)
    assert "'belwo' is not a class; did you mean 'below'?" in str(error.value)


def test_the_loss_of_a_row_is_multiplied_by_its_class_weight() -> None:
    answers, targets = torch.randn(8, 2), torch.from_numpy(TARGETS).long()
    network, params = (
        build_network(spec()),
        PROJECT.train.model_copy(update={"label_smoothing": 0.0}),
    )
    plain, weighted = (
        RowLosses(network, params),
        RowLosses(network, params, class_weights("balanced", ["a", "b"], TARGETS)),
    )
    assert torch.allclose(
        weighted(answers, targets) / plain(answers, targets), torch.tensor([8 / 12] * 6 + [2.0] * 2)
    )


def _size(network: nn.Module) -> float:
    return float(torch.as_tensor(l1_penalty(network, 0.5)).detach())


def test_the_l1_penalty_leaves_out_norms_biases_and_frozen_weights() -> None:
    network = build_network(spec())
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    assert _size(network) == pytest.approx(
        0.5 * sum(float(weight.detach().abs().sum()) for weight in weights), rel=1e-5
    )
    weights[0].requires_grad_(False)
    assert _size(network) == pytest.approx(
        0.5 * sum(float(weight.detach().abs().sum()) for weight in weights[1:]), rel=1e-5
    )
    assert l1_penalty(network, 0.0) == 0.0


def _own(source: str, write_functions: WriteFunctions, **changes: Any) -> RowLosses:
    write_functions("own", {"losses.py": f"import torch\ndef fn(outputs, targets):\n{source}\n"})
    params = PROJECT.train.model_copy(update={"loss": "own.losses:fn", "label_smoothing": 0.0})
    return RowLosses(build_network(spec(**changes)), params)


def test_user_loss_for_classes_receives_logits_and_is_mixed_like_built_in_losses(
    write_functions: WriteFunctions,
) -> None:
    body = "    return torch.nn.functional.cross_entropy(outputs, targets, reduction='none')"
    own = _own(body, write_functions)
    params = PROJECT.train.model_copy(update={"label_smoothing": 0.0})
    built_in = RowLosses(build_network(spec()), params)
    answers, targets = torch.randn(6, 2), torch.tensor([0, 1, 1, 0, 1, 0])
    mixing = Mixing(1 - targets, torch.linspace(0, 1, 6))
    assert torch.equal(own(answers, targets, mixing), built_in(answers, targets, mixing))
    submodels = torch.randn(6, 3, 2)
    assert torch.equal(own(submodels, targets), built_in(submodels, targets))


def test_user_loss_for_numbers_receives_values_in_the_targets_unit(
    write_functions: WriteFunctions,
) -> None:
    scale = TargetScale(mean=10.0, std=2.0)
    own = _own(
        "    return (outputs - targets).abs()",
        write_functions,
        task="image_regression",
        classes=[],
        target_scale=scale,
    )
    found = own(torch.tensor([[11.0], [14.0]], dtype=torch.bfloat16), torch.tensor([10.0, 10.0]))
    assert found.tolist() == [1.0, 4.0]
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("    return outputs.mean()", "returned shape () (code/own/losses.py, line 2)"),
        ("    return 0.5", "returned 0.5 (code/own/losses.py, line 2)"),
        ("    return outputs @ targets", "losses.py, line 3: `return outputs @ targets`). It gets"),
    ],
)
def test_a_user_loss_without_one_value_per_row_is_refused_with_its_line(
    write_functions: WriteFunctions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = _own(body, write_functions)
    with pytest.raises(TrainingError) as raised:
        own(torch.randn(3, 2), torch.tensor([0, 1, 1]))
    assert text in str(raised.value)
    assert "It gets outputs (3, 2) and targets (3,), and returns a loss for each row" in str(
        raised.value
    )


TEACHER = torch.tensor([[2.0, -1.0], [0.5, 0.0]])


def _distilled(task: str, fraction: float, temperature: float = 2.0, **changes: Any) -> RowLosses:
    classes = {} if "classification" in task else changes
    of = spec(task=task, **classes)
    params = PROJECT.train.model_copy(update={"label_smoothing": 0.0})
    return RowLosses(build_network(of), params, None, Distillation(temperature, fraction))


def test_the_distillation_loss_of_classes_is_the_divergence_from_softened_probabilities() -> None:
    losses, targets = _distilled("image_classification", 1.0), torch.tensor([0, 1])
    same = TEACHER + torch.tensor([[3.0], [-1.0]])  # another constant, equal probabilities
    assert losses(same, targets, soft=TEACHER).tolist() == pytest.approx([0, 0], abs=1e-6)
    given = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    shares = torch.softmax(TEACHER / 2, dim=1)
    expected = (shares * (shares.log() - torch.log_softmax(given / 2, dim=1))).sum(dim=1) * 4
    assert torch.allclose(losses(given, targets, soft=TEACHER), expected, atol=1e-6)
    # Without soft answers, as on validation rows, it is the loss of the targets.
    hard = losses(given, targets)
    assert torch.allclose(hard, torch.nn.functional.cross_entropy(given, targets, reduction="none"))
    mixed = _distilled("image_classification", 0.25)(given, targets, soft=TEACHER)
    assert torch.allclose(mixed, 0.25 * expected + 0.75 * hard, atol=1e-6)


def test_distillation_of_submodels_and_mixed_rows_uses_the_soft_targets_of_their_rows() -> None:
    losses, targets = _distilled("image_classification", 0.5), torch.tensor([0, 1])
    given = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1))
    whole = losses(given, targets, soft=TEACHER)
    parts = [losses(given[:, place], targets, soft=TEACHER) for place in range(3)]
    assert torch.allclose(whole, torch.stack(parts).mean(dim=0), atol=1e-6)
    shares = torch.tensor([0.3, 0.9])
    mixing = Mixing(targets.flip(0), shares, TEACHER.flip(0))
    partner = losses(given, targets.flip(0), soft=TEACHER.flip(0))
    found = losses(given, targets, mixing, TEACHER)
    assert torch.allclose(found, shares * whole + (1 - shares) * partner, atol=1e-6)


def test_the_distillation_loss_of_a_numeric_target_is_in_standard_deviations() -> None:
    scale = TargetScale(mean=10.0, std=2.0)
    losses = _distilled("image_regression", 1.0, 1.0, classes=[], target_scale=scale)
    found = losses(torch.tensor([[11.0], [14.0]]), torch.zeros(2), soft=torch.tensor([[11], [10]]))
    assert found.tolist() == [0.0, 4.0]


def test_the_distillation_loss_of_labels_compares_the_probability_of_each_label() -> None:
    losses = _distilled("image_multilabel", 1.0, classes=["one", "two"])
    found = losses(torch.zeros(2, 2), torch.zeros(2, 2), soft=TEACHER)
    shares = torch.sigmoid(TEACHER / 2)
    half = torch.full_like(shares, 0.5)
    expected = torch.nn.functional.binary_cross_entropy(half, shares, reduction="none")
    assert torch.allclose(found, expected.mean(dim=1) * 4, atol=1e-6)
