"""An ensemble returns the combination of its members' outputs, and is stored as one file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipway.kinds.registry import kind_of
from slipway.training.networks.ensemble import EnsembleNetwork, ensemble_spec
from slipway.training.networks.networks import Network, build_network
from tests.training.trees.fitted import fitted, packed

TABM = {
    "num_submodels": 2,
    "num_blocks": 1,
    "width": 16,
    "dropout": 0.0,
    "embedding_size": 4,
    "num_bins": 8,
}


def ensemble(
    root: Path, task: str = "table_regression", method: str = "average"
) -> tuple[EnsembleNetwork, list[Network], Tensor]:
    """Return an ensemble of trees and an untrained TabM, and input rows for it."""
    trees = fitted(packed(root, task))
    spec = trees.network.spec
    torch.manual_seed(0)
    tabm = build_network(spec.model_copy(update={"name": "tabm", "arguments": TABM})).eval()
    members: list[Network] = [trees.network, tabm]
    specs = [member.spec for member in members]
    spec = ensemble_spec(specs, ["trees", "tabm"], method, [0.25, 0.75], [0.2, 0.1])
    network = EnsembleNetwork(spec)
    network.adopt(members)
    return network.eval(), members, torch.from_numpy(np.array(trees.data.val.inputs))


def test_predicted_values_of_an_ensemble_are_the_weighted_mean_of_its_members(
    tmp_path: Path,
) -> None:
    network, (trees, tabm), rows = ensemble(tmp_path)
    with torch.inference_mode():
        expected = 0.25 * trees(rows) + 0.75 * tabm(rows)
        assert torch.allclose(network(rows), expected, rtol=1e-6)


def test_class_probabilities_of_an_ensemble_are_the_weighted_mean_of_its_members(
    tmp_path: Path,
) -> None:
    network, (trees, tabm), rows = ensemble(tmp_path, "table_classification")
    with torch.inference_mode():
        expected = 0.25 * trees(rows).softmax(1) + 0.75 * tabm(rows).softmax(1)
        assert torch.allclose(network(rows).softmax(1), expected, atol=1e-6)


def test_label_probabilities_of_an_ensemble_are_the_weighted_mean_of_its_members() -> None:
    head = kind_of("table_multilabel").target.load_part("head")
    logits, weights = torch.randn(5, 3, 4) * 4, torch.tensor([0.2, 0.3, 0.5])
    expected = (logits.sigmoid() * weights[:, None]).sum(dim=1)
    assert torch.allclose(head.weighted_mean(logits, weights).sigmoid(), expected, atol=1e-6)


@pytest.mark.parametrize("task", ["table_classification", "table_multilabel"])
def test_a_vote_goes_to_the_majority_and_a_tie_to_the_mean_probability(task: str) -> None:
    head = kind_of(task).target.load_part("head")
    sure, unsure = [8.0, -8.0], [-0.1, 0.1]
    votes = head.vote(torch.tensor([[sure, unsure, unsure], [sure, unsure, sure]]))
    assert votes.argmax(dim=1).tolist() == [1, 0]
    tied = head.vote(torch.tensor([[sure, unsure]]))
    assert tied.argmax(dim=1).tolist() == [0]
    assert torch.isfinite(head.vote(torch.tensor([[[500.0, -500.0]] * 2]))).all()


def test_a_stack_outputs_the_weighted_sum_of_its_members_plus_a_bias(tmp_path: Path) -> None:
    _, members, rows = ensemble(tmp_path)
    specs = [member.spec for member in members]
    network = EnsembleNetwork(
        ensemble_spec(specs, ["trees", "tabm"], "stack", [1.5, -0.25], [0.1, 0.2], [7.0])
    )
    network.adopt(members)
    with torch.inference_mode():
        expected = 1.5 * members[0](rows) - 0.25 * members[1](rows) + 7
        assert torch.allclose(network.eval()(rows), expected, rtol=1e-6)


def test_a_loaded_ensemble_gives_the_same_outputs_as_the_saved_one(tmp_path: Path) -> None:
    network, _, rows = ensemble(tmp_path)
    again = build_network(network.spec).eval()
    again.load_payload(network.payload())
    with torch.inference_mode():
        assert torch.equal(again(rows), network(rows))


def test_an_ensembles_weights_file_without_the_trees_of_a_member_is_refused(tmp_path: Path) -> None:
    network, members, _ = ensemble(tmp_path)
    spec = members[1].spec
    both = ensemble_spec([spec, spec], ["a", "b"], "average", [0.5, 0.5], [0.1, 0.2])
    with pytest.raises(ValueError, match=r"tensor 'trees.0' .* is missing"):
        build_network(network.spec).load_payload(EnsembleNetwork(both).payload())


def test_the_parameters_of_an_ensemble_are_the_sum_over_its_members(tmp_path: Path) -> None:
    network, (trees, tabm), _ = ensemble(tmp_path)
    weights = sum(parameter.numel() for parameter in tabm.parameters())
    assert network.num_parameters == trees.num_parameters + weights
