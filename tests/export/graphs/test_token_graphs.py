"""Graphs with token inputs, for any number of rows, any length and every precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.artifacts.bundle import OutputContract
from slipway.export.graphs.graph import (
    check_graph,
    describe_graph,
    export_graph,
    onnx_answers,
    prove_parity,
)
from slipway.export.graphs.variants import make_variant
from slipway.inputs.texts import encode_texts
from slipway.kinds.targets import CLASS
from slipway.training.networks.encoders import read_config
from slipway.training.networks.ensemble import EnsembleNetwork, ensemble_spec
from slipway.training.networks.features import last_layer
from slipway.training.networks.networks import NetworkSpec, build_network
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.ood_score import fit_ood_score
from tests.encoder_folders import SIZES, tiny_encoder
from tests.sentences import CLASSES, sentences
from tests.tokens import token_contract

pytestmark = pytest.mark.process
CONTRACT = token_contract()
OUTPUT = OutputContract(kind="probabilities", labels=list(CLASSES))
ROWS = encode_texts([text for _, text in sentences(40, seed=3)] + ["a", "x y " * 20], CONTRACT)


def calibrated(spec: NetworkSpec) -> CalibratedNetwork:
    """Calibrate a network with random weights."""
    torch.manual_seed(1)
    network = build_network(spec).eval()
    layer = last_layer(network, torch.from_numpy(ROWS[:1]))
    width = next(network.get_submodule(layer).parameters()).shape[1]
    features = np.random.default_rng(2).normal(size=(50, width)).astype(np.float32)
    score = fit_ood_score(layer, features)
    return CalibratedNetwork(network, CLASS.load_part("head"), 1.0, score).eval()


def spec_of(name: str, arguments: dict[str, Any]) -> NetworkSpec:
    return NetworkSpec(
        task="text_classification",
        name=name,
        arguments=arguments,
        classes=list(CLASSES),
        input=CONTRACT,
        mean=[],
        std=[],
        target_scale=None,
    )


def check_every_precision(spec: NetworkSpec, scratch: Path) -> None:
    """Export a network in every precision, and compare the graphs at every length."""
    network = calibrated(spec)
    graph = export_graph(network, CONTRACT, OUTPUT, opset=18, max_batch_size=8)
    described = describe_graph(
        graph,
        variant="fp32",
        task=spec.task,
        contract=CONTRACT,
        output=OUTPUT,
        weights_sha256="",
    )
    check_graph(described, CONTRACT, OUTPUT)
    prove_parity(network, graph, ROWS, batch_sizes=[1, 2, 7], max_difference=1e-5)
    fp32 = onnx_answers(graph, ROWS).outputs
    single = np.concatenate([onnx_answers(graph, row[None]).outputs for row in ROWS])
    np.testing.assert_allclose(single, fp32, atol=1e-6)  # each at its own length
    for variant in ("fp16", "int8_dynamic", "int8"):
        made, _ = make_variant(variant, graph, ROWS, scratch, lambda _: 0.0, 0.1)
        found = onnx_answers(made, ROWS, variant=variant).outputs
        assert np.abs(found - fp32).max() < 0.02, variant


def test_a_transformer_of_tokens_is_exported_for_every_length_and_precision(
    tmp_path: Path,
) -> None:
    arguments = {"width": 16, "num_layers": 1, "num_heads": 2, "patch": 1, "dropout": 0.1}
    check_every_precision(spec_of("small_transformer", arguments), tmp_path)


@pytest.mark.parametrize(
    "family",
    ["bert", *(pytest.param(name, marks=pytest.mark.nightly) for name in SIZES if name != "bert")],
)
def test_an_encoder_is_exported_for_every_length_and_precision(tmp_path: Path, family: str) -> None:
    arguments = {
        "pooling": "mean",
        "dropout": 0.1,
        "lora_rank": None,
        "layer_decay": 1.0,
        "checkpoint_activations": False,
        "config": read_config(tiny_encoder(tmp_path / "folder", family)),
    }
    check_every_precision(spec_of("encoder", arguments), tmp_path)


def test_average_of_two_ngram_networks_is_exported_as_one_graph_of_text_inputs() -> None:
    contract = CONTRACT.model_copy(update={"tokenizer": None, "max_tokens": None})
    arguments = {
        "buckets": 512,
        "width": 8,
        "word_ngrams": 2,
        "byte_ngrams": [3, 4],
        "lowercase": True,
        "dropout": 0.0,
    }
    spec = spec_of("hashed_ngrams", arguments).model_copy(update={"input": contract})
    torch.manual_seed(1)
    members = [build_network(spec).eval() for _ in range(2)]
    specs = [member.spec for member in members]
    network = EnsembleNetwork(
        ensemble_spec(specs, ["first", "second"], "average", [0.25, 0.75], [0.2, 0.1])
    )
    network.adopt(members)
    rows = encode_texts([text for _, text in sentences(20, seed=3)], contract)
    layer = last_layer(network.eval(), torch.from_numpy(rows[:1]))
    width = next(network.get_submodule(layer).parameters()).shape[1]
    features = np.random.default_rng(2).normal(size=(50, width)).astype(np.float32)
    calibrated_network = CalibratedNetwork(
        network, CLASS.load_part("head"), 1.0, fit_ood_score(layer, features)
    ).eval()
    graph = export_graph(calibrated_network, contract, OUTPUT, opset=18, max_batch_size=8)
    with torch.inference_mode():
        own = [member(torch.from_numpy(rows)).softmax(dim=1) for member in members]
    expected = 0.25 * own[0] + 0.75 * own[1]
    np.testing.assert_allclose(onnx_answers(graph, rows).outputs, expected, atol=1e-5)
    assert not torch.allclose(own[0], own[1], atol=1e-3)
