"""Compares a local encoder trained on two processes by each strategy with one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from slipway.artifacts.bundle import OutputContract
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.store import packed
from slipway.export.graphs.graph import export_graph, onnx_answers
from slipway.inputs.texts import encode_texts, read_tokenizer
from slipway.kinds.targets import CLASS
from slipway.system import files
from slipway.training.networks.features import last_layer
from slipway.training.networks.networks import load_network, read_model_manifest
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.ood_score import fit_ood_score
from tests.encoder_folders import tiny_encoder, word_piece
from tests.packed_rows import packed_rows
from tests.project_params import PROJECT, augment_params, of_kind
from tests.sentences import CLASSES, sentences
from tests.tokens import token_contract
from tests.training.checkpoints.test_other_layouts import EVERY_STEP, change
from tests.training.real_runs import kill_at_step, run_command, run_training

pytestmark = pytest.mark.nightly(seconds=60)
NUM_STEPS = 5
STRATEGIES = (
    *("ddp", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp", "tensor_parallel", "pipeline"),
)
TWICE: dict[str, Any] = {"strategy": "fsdp", "model_parallel": 2, "devices": 4}
SETTINGS = [*({"strategy": strategy, "devices": 2} for strategy in STRATEGIES), TWICE]
NAMES = [*STRATEGIES, "fsdp-model_parallel"]


def encoder_project(
    root: Path,
    lora_rank: int | None = None,
    checkpoint_activations: bool = False,
    family: str = "bert",
    **train: Any,
) -> Path:
    """Write a packed store of texts, an encoder folder, and params.yaml."""
    torch.manual_seed(3)
    folder = tiny_encoder(root / "models/tiny", family, tokenizer=word_piece())
    config = json.loads((folder / "config.json").read_text())
    config |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    (folder / "config.json").write_text(json.dumps(config))
    contract = token_contract(tokenizer=read_tokenizer(folder), max_tokens=24)
    splits: dict[str, packed.PackedSplitManifest] = {}
    for name, num_rows in {"train": 150, "val": 61}.items():
        place = root / "data/packed" / name
        place.mkdir(parents=True)
        rows = list(sentences(num_rows, seed=len(splits)))
        np.save(place / "inputs.npy", encode_texts([text for _, text in rows], contract))
        ids = [files.sha256_bytes(f"{name}{row}".encode())[:32] for row in range(num_rows)]
        targets = [CLASSES.index(label) for label, _ in rows]
        splits[name] = packed.write_split(place, packed_rows(ids, ids, targets), contract.shape)
    manifest = packed.PackedManifest(
        format_version=3,
        task="text_classification",
        input=contract,
        classes=list(CLASSES),
        mean=[],
        std=[],
        target_scale=None,
        splits=splits,
    )
    packed.write_manifest(root / "data/packed", manifest)
    write_plan(root / "data/augmented", plan_from_params(augment_params(), seed=7))
    params = of_kind(PROJECT.model_dump(mode="json"), "text_classification")
    params["data"]["text_columns"] = ["text"]
    tokens = {"tokenizer": "models/tiny", "vocabulary_size": None, "max_tokens": 24}
    params["precompute"] |= tokens
    arguments = {
        "pooling": "mean",
        "dropout": 0.0,
        "lora_rank": lora_rank,
        "layer_decay": 1.0 if lora_rank else 0.9,
        "checkpoint_activations": checkpoint_activations,
    }
    params["train"] |= {
        "network": "encoder",
        "network_arguments": arguments,
        "pretrained": "models/tiny",
        "precision": "32-true",
        "epochs": NUM_STEPS,  # of one step each
        "batch_size": 128,
        "learning_rate": 0.001,
        "warmup_epochs": 1.0,
        "checkpoint_every_epochs": 1,
        "devices": 1,
        "accelerator": "cpu",
        **train,
    }
    files.write_text(root / "params.yaml", yaml.safe_dump(params))
    return root


def trained(project: Path, num_processes: int = 1) -> list[float]:
    """Train the project; return the loss of each epoch."""
    # A warm start has only one process beside the first.
    done = run_training(project) if num_processes <= 2 else run_command(project)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (project / "reports/live/plots/metrics/train/loss.tsv").read_text().splitlines()
    return [float(line.split("\t")[1]) for line in lines[1:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    project = encoder_project(tmp_path_factory.mktemp("alone"), strategy="single")
    return project, trained(project)


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_a_divided_encoder_has_the_loss_of_one_process_and_its_weights_are_exported(
    tmp_path: Path, settings: dict[str, Any], alone: tuple[Path, list[float]]
) -> None:
    project = encoder_project(tmp_path, **settings)
    losses = trained(project, settings["devices"])
    assert len(losses) == NUM_STEPS
    np.testing.assert_allclose(losses, alone[1], rtol=0, atol=1e-5)
    actual = read_model_manifest(project / "artifacts/model").actual
    found = (actual.strategy, actual.world_size, actual.model_parallel)
    shared = 2 if settings["strategy"] == "tensor_parallel" else settings.get("model_parallel")
    assert found == (settings["strategy"], settings["devices"], shared)
    network = load_network(project / "artifacts/model").eval()
    rows = np.load(project / "data/packed/val/inputs.npy")
    # Not the weights: a bias of keys changes no answer, so Adam steps along the noise of rounding.
    expected = load_network(alone[0] / "artifacts/model").eval()
    with torch.inference_mode():
        answers, own = (net(torch.from_numpy(rows)) for net in (expected, network))
    torch.testing.assert_close(own, answers, rtol=0, atol=1e-4)
    layer = last_layer(network, torch.from_numpy(rows[:1]))
    features = np.random.default_rng(2).normal(size=(50, 16)).astype(np.float32)
    score = fit_ood_score(layer, features)
    calibrated = CalibratedNetwork(network, CLASS.load_part("head"), 1.0, score).eval()
    output = OutputContract(kind="probabilities", labels=list(CLASSES))
    contract = network.spec.input
    graph = export_graph(calibrated, contract, output, opset=18, max_batch_size=8)
    with torch.inference_mode():
        probabilities = network(torch.from_numpy(rows)).softmax(dim=1)
    np.testing.assert_allclose(onnx_answers(graph, rows).outputs, probabilities, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_a_divided_lora_training_has_the_loss_of_one_process_and_leaves_no_adapter(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    one = encoder_project(tmp_path / "one", lora_rank=4, strategy="single")
    two = encoder_project(tmp_path / "two", lora_rank=4, **settings)
    losses = trained(two, settings["devices"])
    np.testing.assert_allclose(losses, trained(one), rtol=0, atol=1e-5)
    expected = load_network(one / "artifacts/model").state_dict()
    found = load_network(two / "artifacts/model").state_dict()
    assert not [name for name in found if "lora" in name]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4)


@pytest.mark.nightly
def test_zero_1_saves_the_frozen_weights_that_its_shards_lack(tmp_path: Path) -> None:
    one = encoder_project(tmp_path / "one", lora_rank=4, strategy="single")
    two = encoder_project(tmp_path / "two", lora_rank=4, strategy="deepspeed_stage_1", devices=2)
    np.testing.assert_allclose(trained(two), trained(one), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_an_encoder_with_activation_checkpoints_and_offload_has_the_loss_of_one_process(
    tmp_path: Path, lora_rank: int | None
) -> None:
    one = encoder_project(tmp_path / "one", lora_rank, strategy="single")
    two = encoder_project(
        tmp_path / "two",
        lora_rank,
        checkpoint_activations=True,
        strategy="deepspeed_stage_3",
        offload="optimizer_and_parameters",
        devices=2,
    )
    np.testing.assert_allclose(trained(two), trained(one), rtol=0, atol=1e-5)
    actual = read_model_manifest(two / "artifacts/model").actual
    assert (actual.zero_stage, actual.offload) == (3, "optimizer_and_parameters")


def test_a_modernbert_whose_layers_have_masks_of_their_own_trains_in_a_pipeline(
    tmp_path: Path,
) -> None:
    losses = [
        trained(
            encoder_project(
                tmp_path / strategy,
                family="modernbert",
                strategy=strategy,
                devices=devices,
                epochs=20,
            )
        )
        for strategy, devices in (("single", 1), ("pipeline", 2))
    ]
    assert len(losses[0]) == 20
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)


@pytest.mark.nightly(seconds=120)
def test_a_gradually_unfrozen_encoder_resumes_with_a_pipeline_and_without(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 6, "freeze_epochs": 2, "unfreeze_epochs": 2}
    whole = encoder_project(tmp_path / "whole", strategy="single", **settings)
    expected = trained(whole)
    moved = encoder_project(tmp_path / "moved", **(settings | EVERY_STEP))
    layouts = [("pipeline", 2), ("single", 1), ("pipeline", 2), ("ddp", 2)]
    for index, (strategy, devices) in enumerate(layouts):
        change(moved, strategy=strategy, devices=devices)
        if index + 1 < len(layouts):
            kill_at_step(moved, index + 1)
    np.testing.assert_allclose(trained(moved), expected, rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    assert [segment.strategy for segment in segments] == [strategy for strategy, _ in layouts]
