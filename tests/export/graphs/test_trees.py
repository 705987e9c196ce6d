"""Boosted trees as ONNX graphs, in which rows reach the same leaves as in LightGBM."""

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from slipway.artifacts.bundle import OutputContract
from slipway.export.graphs.graph import check_graph, export_graph, prove_parity
from slipway.export.graphs.trees import has_trees, read_trees, round_down, tree_node
from slipway.kinds.registry import kind_of
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system.errors import BundleError
from slipway.training.networks.ensemble import EnsembleNetwork, ensemble_spec
from slipway.training.networks.features import feature_layer
from slipway.training.networks.networks import Network, build_network, example_rows
from slipway.training.networks.trees import stored_text
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.ood_score import fit_ood_score
from tests.training.networks.test_ensemble import TABM
from tests.training.trees.fitted import Fitted, fitted, packed

NUM_CODES = 70  # more than the bits of two words
SETTINGS = {
    "deterministic": True,
    "force_row_wise": True,
    "num_leaves": 31,
    "min_data_in_leaf": 3,
    "min_data_per_group": 2,
    "cat_smooth": 1.0,
    "max_cat_to_onehot": 2,
    "verbosity": -1,
    "num_threads": 1,
}


def rows(num_rows: int, seed: int) -> NDArray[np.float32]:
    """Return rows of a number, one with gaps, one far from 0, and two categories."""
    generator = np.random.default_rng(seed)
    found = generator.normal(size=(num_rows, 5)).astype(np.float32)
    found[generator.random(num_rows) < 0.2, 1] = np.nan
    found[:, 2] = found[:, 2] * 1e-6 + 1e5
    found[:, 3] = generator.integers(0, NUM_CODES, num_rows)
    found[:, 4] = generator.integers(0, 3, num_rows)
    return found


def boosted(num_sums: int, seed: int) -> lightgbm.Booster:
    """Return trees that use all columns."""
    inputs, generator = rows(3000, seed), np.random.default_rng(seed + 100)
    signal = (
        inputs[:, 0]
        + np.nan_to_num(inputs[:, 1], nan=2.0)
        + np.sin(inputs[:, 3] * 7)
        + inputs[:, 4]
        + generator.normal(scale=0.3, size=len(inputs))
    )
    targets: NDArray[Any] = signal
    settings: dict[str, Any] = SETTINGS | {"objective": "regression"}
    if num_sums > 1:
        targets = np.digitize(signal, np.quantile(signal, np.linspace(0, 1, num_sums + 1)[1:-1]))
        settings |= {"objective": "multiclass", "num_class": num_sums}
    data = lightgbm.Dataset(inputs, targets, categorical_feature=[3, 4], params=settings)
    return lightgbm.train(settings, data, num_boost_round=15)


def graph_of(node: onnx.NodeProto, num_sums: int) -> bytes:
    """Return a graph that only contains the trees."""
    shapes: list[list[str | int]] = [["rows", 5], ["rows", num_sums]]
    source, target = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in zip(("columns", "sums"), shapes, strict=True)
    )
    model = helper.make_model(
        helper.make_graph([node], "trees", [source], [target]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 5)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    payload: bytes = model.SerializeToString()
    return payload


def run(graph: bytes, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    session = import_onnxruntime().InferenceSession(graph, providers=["CPUExecutionProvider"])
    answers: NDArray[np.float32] = session.run(None, {"columns": inputs})[0]
    return answers


def raw(booster: lightgbm.Booster, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sums that LightGBM itself predicts."""
    return np.asarray(booster.predict(inputs, raw_score=True), np.float64)


def rows_on_thresholds(text: str, seed: int) -> NDArray[np.float32]:
    """Return rows with each threshold, the float32 numbers around it, or NaN, one at a time.

    Categories also take every code, unknown ones and the missing one.
    """
    others = rows(1, seed)[0]
    found = []
    for tree in read_trees(text):
        for column, decision, threshold in zip(
            tree.columns, tree.decisions, tree.thresholds, strict=True
        ):
            if decision & 1:
                continue
            on = np.float32(threshold)
            around = [on, np.nextafter(on, np.float32(np.inf)), np.nextafter(on, np.float32(-9e9))]
            for value in [*around, np.float32(np.nan)]:
                row = others.copy()
                row[column] = value
                found.append(row)
    for code in [*range(NUM_CODES + 30), 1000]:
        for column in (3, 4):
            row = others.copy()
            row[column] = code
            found.append(row)
    return np.array(found, np.float32)


@pytest.mark.parametrize("num_sums", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rows_on_tree_thresholds_reach_the_same_leaves_in_onnx_as_in_lightgbm(
    num_sums: int, seed: int
) -> None:
    booster = boosted(num_sums, seed)
    text = stored_text(booster.model_to_string())
    graph = graph_of(tree_node(text, num_sums, "columns", "sums"), num_sums)
    for others in range(3):
        inputs = np.concatenate([rows_on_thresholds(text, others), rows(500, 50 + others)])
        expected = raw(booster, inputs).reshape(-1, num_sums)
        assert np.abs(run(graph, inputs) - expected).max() < 2e-6 * max(1, np.abs(expected).max())


def test_rounding_tree_thresholds_to_nearest_would_move_rows_to_another_leaf() -> None:
    booster = boosted(1, 0)
    text = stored_text(booster.model_to_string())
    inputs = rows_on_thresholds(text, 0)
    expected = raw(booster, inputs)[:, np.newaxis]
    node = tree_node(text, 1, "columns", "sums")
    thresholds = np.concatenate([tree.thresholds for tree in read_trees(text)])
    splits = next(entry for entry in node.attribute if entry.name == "nodes_splits").t
    nearest = helper.make_tensor("splits", TensorProto.FLOAT, splits.dims, thresholds)
    splits.CopyFrom(nearest)
    assert np.abs(run(graph_of(node, 1), inputs) - expected).max() > 1e-3


def test_a_threshold_is_rounded_to_the_largest_float32_below_it() -> None:
    exact = np.array([0.1, 1.0, -0.1, 1e-50, -1e-50, 16777217.0])
    found = round_down(exact)
    assert found.dtype == np.float32
    assert (found.astype(np.float64) <= exact).all()
    assert (np.nextafter(found, np.float32(np.inf)).astype(np.float64) > exact).all()


def test_tree_of_one_leaf_adds_its_value_to_every_row() -> None:
    inputs = rows(50, 0)
    data = lightgbm.Dataset(inputs, np.full(50, 3.5))
    booster = lightgbm.train(SETTINGS | {"objective": "regression"}, data, num_boost_round=2)
    text = stored_text(booster.model_to_string())
    expected = raw(booster, inputs)
    graph = graph_of(tree_node(text, 1, "columns", "sums"), 1)
    assert np.allclose(run(graph, inputs)[:, 0], expected)


def test_trees_that_treat_zero_as_missing_are_refused() -> None:
    inputs = rows(500, 0)
    inputs[::3, 0] = 0.0
    settings = SETTINGS | {"objective": "regression", "zero_as_missing": True}
    booster = lightgbm.train(
        settings, lightgbm.Dataset(inputs, inputs[:, 0] > 0, params=settings), num_boost_round=2
    )
    with pytest.raises(BundleError, match="treat 0 as missing"):
        tree_node(stored_text(booster.model_to_string()), 1, "columns", "sums")


def calibrated(found: Fitted, network: Network | None = None) -> CalibratedNetwork:
    encoding = found.network.encoding
    features = encoding.features(torch.from_numpy(np.array(found.data.train[0].inputs)))
    whole = network or found.network
    score = fit_ood_score(feature_layer(whole.eval(), example_rows(whole.spec)), features.numpy())
    head = kind_of(found.network.spec.task).target.load_part("head")
    return CalibratedNetwork(whole, head, 1.5, score).eval()


@pytest.mark.process
@pytest.mark.parametrize("task", ["table_regression", "table_classification"])
def test_graph_of_trees_includes_temperature_and_ood_score(tmp_path: Path, task: str) -> None:
    found = fitted(packed(tmp_path, task))
    network, spec = calibrated(found), found.network.spec
    kind = "probabilities" if spec.classes else "value"
    output = OutputContract(kind=kind, labels=spec.classes)
    graph = export_graph(network, spec.input, output, opset=18, max_batch_size=16)
    check_graph(graph, spec.input, output)
    assert has_trees(graph)
    worst = prove_parity(
        network, graph, found.data.val.inputs, batch_sizes=[1, 2, 7, 16], max_difference=1e-5
    )
    assert worst < 1e-6


@pytest.mark.process
def test_graph_of_an_ensemble_includes_its_trees_and_its_networks(tmp_path: Path) -> None:
    first, second = (fitted(packed(tmp_path / str(seed)), seed=seed) for seed in (7, 8))
    spec = first.network.spec
    torch.manual_seed(0)
    tabm = build_network(spec.model_copy(update={"name": "tabm", "arguments": TABM}))
    members = [tabm, first.network, second.network]
    specs, weights = [member.spec for member in members], [0.2, 0.3, 0.5]
    network = EnsembleNetwork(ensemble_spec(specs, ["a", "b", "c"], "greedy", weights, [0.1] * 3))
    network.adopt(members)
    whole, output = calibrated(first, network), OutputContract(kind="value", labels=[])
    graph = export_graph(whole, spec.input, output, opset=18, max_batch_size=16)
    check_graph(graph, spec.input, output)
    nodes = [node.op_type for node in onnx.load_model_from_string(graph).graph.node]
    assert nodes.count("TreeEnsemble") == 2
    rows = first.data.val.inputs
    assert prove_parity(whole, graph, rows, batch_sizes=[1, 7], max_difference=1e-5) < 1e-6
