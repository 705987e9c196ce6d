"""Tests of TabM on the rows of a column contract: inputs, submodels and refusals."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rtdl_num_embeddings import PiecewiseLinearEmbeddings
from torch.nn import functional as F

from slipway.config.params import load_params
from slipway.data.store.packed import TargetScale
from slipway.inputs.columns import ColumnContract, encode
from slipway.system.errors import ParamsError
from slipway.training.module import TrainingModule
from slipway.training.networks.networks import (
    NetworkSpec,
    build_network,
    load_network,
    save_model,
)
from slipway.training.networks.tabm import RowEncoding, TableNetwork
from slipway.training.recipe.optimizers import decays
from slipway.training.recipe.precision import adapt_to_half
from tests.model_manifests import model_manifest
from tests.packed_tables import CLASSES, fit_contract, table
from tests.training.conftest import ROOT

ARGUMENTS = {
    "num_submodels": 4,
    "num_blocks": 2,
    "width": 16,
    "dropout": 0.0,
    "embedding_size": 5,
    "num_bins": 48,
}
COLUMNS, VALUES = table(300)
CONTRACT = fit_contract(COLUMNS)
ROWS = torch.from_numpy(encode(COLUMNS, CONTRACT))


def spec(**changes: Any) -> NetworkSpec:
    values = {
        "task": "table_classification",
        "name": "tabm",
        "arguments": ARGUMENTS,
        "classes": CLASSES,
        "input": CONTRACT,
        "mean": [],
        "std": [],
        "target_scale": None,
    }
    return NetworkSpec.model_validate(values | changes)


def regression(**changes: Any) -> NetworkSpec:
    return spec(
        task="table_regression",
        classes=[],
        target_scale=TargetScale(mean=100.0, std=5.0),
        **changes,
    )


def built(wanted: NetworkSpec, seed: int = 0) -> TableNetwork:
    torch.manual_seed(seed)
    network = build_network(wanted)
    assert isinstance(network, TableNetwork)
    for (
        parameter
    ) in network.parameters():  # the pieces start at 0, and scales at 1: nothing may depend on that
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


def test_tabm_outputs_each_submodel_in_training_and_their_mean_otherwise() -> None:
    network = built(regression())
    alone = network.train()(ROWS)
    assert alone.shape == (300, 4, 1)
    assert torch.allclose(network.eval()(ROWS), alone.mean(dim=1))


def test_probabilities_are_the_mean_of_the_submodels_probabilities() -> None:
    network = built(spec())
    alone = network.train()(ROWS).softmax(dim=2).mean(dim=1)
    assert torch.allclose(network.eval()(ROWS).softmax(dim=1), alone, atol=1e-6)
    assert not torch.allclose(
        network.train()(ROWS).mean(dim=1).softmax(dim=1), alone, atol=1e-3
    )  # which is another thing


def test_tabm_predicts_a_numeric_target_in_its_unit() -> None:
    scaled = built(regression())
    plain = built(
        spec(task="table_regression", classes=[], target_scale=TargetScale(mean=0.0, std=1.0))
    )
    assert torch.allclose(scaled(ROWS), plain(ROWS) * 5 + 100, rtol=1e-5)


def test_every_column_of_the_contract_affects_the_output_of_tabm() -> None:
    network = built(spec())
    before = network(ROWS[:1])
    for position in range(ROWS.shape[1]):
        changed = ROWS[:1].clone()
        changed[0, position] = 2.0 if changed[0, position] != 2.0 else 1.0
        assert not torch.equal(network(changed), before), CONTRACT.columns


def test_tabm_reads_numbers_indicators_and_codes_from_the_columns_of_the_contract() -> None:
    encoding = RowEncoding(CONTRACT, 48)
    row = torch.tensor(
        [[0.1, 0.2, 0.3, 0.7, 1.0, 2.0]]
    )  # size, age, tail, garden; age is missing; the code of place
    values, _, others = encoding(row)
    assert torch.allclose(values, torch.tensor([[0.1, 0.2, 0.3]]))
    assert torch.allclose(
        others, torch.tensor([[0.7, 1.0, 0.0, 0.0, 1.0, 0.0]])
    )  # garden, the indicator, codes 0 to 3


def test_code_0_has_a_slot_only_if_training_rows_had_missing_values() -> None:
    whole = fit_contract({"place": ["a", "b", "c"]})
    with_gaps = fit_contract({"place": ["a", None, "c"]})
    assert RowEncoding(with_gaps, 1)(torch.tensor([[0.0]]))[2].tolist() == [[1.0, 0.0, 0.0]]
    assert RowEncoding(whole, 1)(torch.tensor([[0.0]]))[2].tolist() == [[0.0, 0.0, 0.0]]
    assert RowEncoding(whole, 1)(torch.tensor([[3.0]]))[2].tolist() == [[0.0, 0.0, 1.0]]


def test_tables_of_only_categories_or_only_numbers_can_be_learned() -> None:
    for columns in ({"place": ["a", "b"]}, {"b_flag": [0.0, 1.0]}, {"size": [1.0, 2.0, 4.0]}):
        contract = fit_contract(columns)
        assert built(spec(input=contract))(torch.zeros(3, *contract.shape)).shape == (3, 2)


def test_numbers_outside_the_range_of_the_training_rows_are_clipped_to_it() -> None:
    network = built(regression())
    far, edge = ROWS[:1].clone(), ROWS[:1].clone()
    far[0, 0], edge[0, 0] = 1e30, ROWS[:, 0].max()
    assert torch.allclose(network(far), network(edge), rtol=1e-5)


def test_the_piecewise_linear_embedding_equals_that_of_its_authors() -> None:
    with warnings.catch_warnings(action="ignore"):
        edges = [
            torch.tensor(np.unique(((np.array(c.quantiles) - c.mean) / c.std).astype(np.float32)))
            for c in CONTRACT.columns[:3]
        ]
        theirs = PiecewiseLinearEmbeddings(edges, 5, activation=False, version="B")
    network = built(spec())
    linear, pieces = network.backbone.linear, network.backbone.pieces
    assert isinstance(pieces, torch.Tensor)
    assert isinstance(linear, torch.nn.Module)
    theirs.linear0.load_state_dict(linear.state_dict())
    theirs.linear.weight.data = pieces.data.clone()
    values, places, _ = network.encoding(ROWS)
    ours = linear(values) + (places.transpose(0, 1) @ pieces).transpose(0, 1)
    assert torch.allclose(
        ours, theirs(values), atol=1e-3
    )  # theirs is weight * x + bias, which cancels in narrow bins


def test_fewer_bins_use_a_subset_of_the_quantiles_of_more_bins() -> None:
    few, all_of_them = RowEncoding(CONTRACT, 6), RowEncoding(CONTRACT, 48)
    assert (few.num_bins, all_of_them.num_bins) == (6, 48)
    assert set(few.edges[0].tolist()) < set(all_of_them.edges[0].tolist())
    assert (few.lowest[0], few.highest[0]) == (all_of_them.lowest[0], all_of_them.highest[0])


def test_initial_weights_of_tabm_depend_on_the_seed() -> None:
    first, again, other = (fresh.state_dict() for fresh in (_fresh(0), _fresh(0), _fresh(1)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def _fresh(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build_network(spec())


def test_saved_weights_hold_no_bin_edges_or_codes_of_the_column_contract(tmp_path: Path) -> None:
    network = built(spec())
    assert not [name for name in network.state_dict() if name.startswith("encoding")]
    save_model(tmp_path / "checkpoint", model_manifest(spec()), network.state_dict())
    assert torch.equal(load_network(tmp_path / "checkpoint")(ROWS), network(ROWS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_in_bins_stay_float32_in_half_precision(dtype: torch.dtype) -> None:
    network, expected = built(spec()), built(spec())(ROWS)
    adapt_to_half(network, dtype)
    network.backbone.to(dtype)
    seen: list[torch.Tensor] = []
    network.encoding.register_forward_hook(lambda _, __, outputs: seen.extend(outputs))
    answer = network(ROWS)
    assert {tensor.dtype for tensor in seen} == {torch.float32}
    assert torch.allclose(answer.float(), expected, atol=0.2)


def test_weight_decay_skips_scales_and_biases_of_tabms_submodels() -> None:
    kinds = {name: decays(name, parameter) for name, parameter in _fresh(0).named_parameters()}
    assert {name for name, found in kinds.items() if found} == {
        "backbone.pieces",
        "backbone.linear.weight",
        "backbone.blocks.blocks.0.0.weight",
        "backbone.blocks.blocks.1.0.weight",
        "backbone.head.weight",
    }


def test_the_loss_of_a_row_is_the_mean_of_the_losses_of_the_submodels() -> None:
    params = load_params(ROOT / "params.yaml").train.model_copy(update={"label_smoothing": 0.1})
    module = TrainingModule(build_network(spec()), params, seed=3, steps_per_epoch=5, ids=[])
    answers, targets = torch.randn(6, 4, 2), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = (
        sum(
            F.cross_entropy(answers[:, k], targets, label_smoothing=0.1, reduction="none")
            for k in range(4)
        )
        / 4
    )
    assert torch.allclose(module._losses(answers, targets), torch.as_tensor(expected))
    values = TrainingModule(build_network(regression()), params, seed=3, steps_per_epoch=5, ids=[])
    assert torch.allclose(
        values._losses(torch.tensor([[[110.0], [90.0]]]), torch.tensor([100.0])),
        torch.tensor([4.0]),
    )


def test_error_lists_every_wrong_network_argument() -> None:
    with pytest.raises(ParamsError, match=r"train\.network_arguments of tabm") as error:
        build_network(
            spec(
                arguments={
                    "num_submodel": 4,
                    "num_blocks": 0,
                    "width": 16,
                    "dropout": 0.0,
                    "embedding_size": 5,
                }
            )
        )
    for text in ("did you mean 'num_submodels'", "num_blocks: found 0"):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "timm/resnet18"}, "expected 'tabm' or 'lightgbm' for a table"),
        ({"input": ColumnContract(kind="columns", columns=[])}, "no column left"),
    ],
)
def test_a_table_spec_with_an_image_network_or_without_columns_is_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ParamsError, match=text):
        build_network(spec(**changes))
