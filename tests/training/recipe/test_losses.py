"""What a row's error costs, and what classes count."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from slipway.data.store.packed import TargetScale
from slipway.system.errors import ParamsError
from slipway.training.networks.networks import build_network
from slipway.training.recipe.losses import RowLosses, class_weights, l1_penalty
from tests.project_params import PROJECT
from tests.training.conftest import spec

TARGETS = np.array([0.0] * 6 + [1.0] * 2)


def _of_a_number(**changes: Any) -> RowLosses:
    scale = TargetScale(mean=10.0, std=2.0)
    network = build_network(spec(task="image_regression", classes=[], target_scale=scale))
    return RowLosses(network, PROJECT.train.model_copy(update=changes))


def _weights(asked: Literal["balanced"] | dict[str, float]) -> Tensor:
    found = class_weights(asked, ["a", "b"], TARGETS)
    assert found is not None
    return found


def test_errors_of_a_number_count_in_its_standard_deviations() -> None:
    assert _of_a_number()(torch.tensor([[11.0], [14.0]]), torch.tensor([10.0, 10.0])).tolist() == [
        0.25,
        4.0,
    ]


def test_huber_is_half_of_the_square_up_to_delta_and_linear_beyond() -> None:
    losses = _of_a_number(loss="huber", huber_delta=0.5)(
        torch.tensor([[10.5], [11.0], [14.0], [18.0]]), torch.full((4,), 10.0)
    )
    assert losses.tolist() == pytest.approx(
        [0.5 * 0.25**2, 0.5 * 0.5**2, 0.5 * (2 - 0.25), 0.5 * (4 - 0.25)]
    )


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=TARGETS)
    assert _weights("balanced").tolist() == pytest.approx(expected.tolist())


def test_weights_by_class_keep_their_ratio_and_have_a_mean_of_one_over_the_rows() -> None:
    weights = _weights({"b": 3.0, "a": 1.0}).numpy()
    assert weights[1] / weights[0] == pytest.approx(3.0)
    assert weights[TARGETS.astype(int)].mean() == pytest.approx(1.0)


def test_no_weights_are_none() -> None:
    assert class_weights(None, ["a", "b"], TARGETS) is None


def test_a_mapping_that_is_not_of_the_classes_is_refused_with_every_name() -> None:
    with pytest.raises(ParamsError) as error:
        class_weights({"above": 1.0, "belwo": 2.0}, ["above", "below"], TARGETS)
    assert "'below' has none" in str(error.value)
    assert "'belwo' is no class; did you mean 'below'?" in str(error.value)


def test_a_row_of_a_class_costs_what_its_class_counts() -> None:
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


def test_the_penalty_leaves_norms_and_biases_and_what_is_frozen_alone() -> None:
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
