"""A local encoder folder, fine-tuned by LoRA, from a CSV of sentences to a certified service."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import slipway
from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.inputs.texts import TextContract
from tests import plain_http, warm_starts
from tests.encoder_folders import tiny_encoder, word_piece
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready
from tests.end_to_end.test_texts import PARAMS, STAGES
from tests.sentences import hostile_texts, sentences

pytestmark = pytest.mark.nightly(seconds=300)

NUM_TEXTS = 10_000
TRAIN: dict[str, Any] = PARAMS["train"] | {
    "network": "encoder",
    "network_arguments": {
        "pooling": "mean",
        "dropout": 0.0,
        "lora_rank": 4,
        "layer_decay": 1.0,
        "checkpoint_activations": True,
    },
    "pretrained": "models/tiny",
    "epochs": 12,
}


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = copy_checkout(tmp_path_factory.mktemp("encoders"))
    tiny_encoder(project.path / "models/tiny")
    return run_stages(project, ["text"], list(sentences(400, seed=1)))


def run_stages(project: Project, columns: list[str], rows: Sequence[tuple[str, ...]]) -> Project:
    with (project.path / "data/sentences.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", *columns])
        writer.writerows(rows)
    variants = ["fp32", "fp16", "int8_dynamic"]
    project.set_params(
        PARAMS
        | {
            "train": TRAIN,
            "evaluate": {"gates": {"accuracy": {"min": 0.7, "max": None}}},  # of drawn weights
            "export": {"variants": variants, "max_batch_size": 8},
        }
    )
    project.keep_own_keys()
    tokens = {"tokenizer": "models/tiny", "vocabulary_size": None, "max_tokens": 40}
    project.set_params({"data": {"text_columns": columns}, "precompute": tokens})
    (project.path / "dvc.lock").unlink(missing_ok=True)
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return project


@pytest.fixture(scope="module")
def service(verified: Project) -> Iterator[str]:
    with verified.service() as address:
        wait_until_ready(address)
        yield address


def test_every_hop_agrees_from_the_text_to_http(verified: Project) -> None:
    certificate = read_certificate(verified.path / "artifacts/certificate.json")
    agreeing = {hop.name for hop in certificate.hops if hop.status == "agrees"}
    assert certificate.status == "certified"
    assert {"torch", "onnxruntime/cpu/fp32", "http"} <= agreeing


def test_the_model_is_saved_without_adapters_and_the_bundle_has_the_tokenizer(
    verified: Project,
) -> None:
    model = json.loads((verified.path / "artifacts/model/model.json").read_text())
    assert model["network"]["arguments"]["lora_rank"] is None
    assert model["params"]["network_arguments"]["lora_rank"] == 4
    contract = load_bundle(verified.path / "artifacts/bundle").manifest.input
    assert isinstance(contract, TextContract)
    assert contract.tokenizer == (verified.path / "models/tiny/tokenizer.json").read_text()


def test_ten_thousand_hostile_texts_get_equal_answers_from_every_caller(
    service: str, verified: Project
) -> None:
    texts = list(hostile_texts(NUM_TEXTS, seed=8))
    with slipway.load(verified.path) as model:
        local = model.predict(texts)
    for begin in range(0, NUM_TEXTS, 250):
        part = texts[begin : begin + 250]
        rows = {"rows": [{"text": text} for text in part]}
        served = plain_http.post(f"{service}/predict", json=rows).json()["predictions"]
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(part)], "data": part}
        answer = plain_http.post(
            f"{service}/v2/models/slipway/infer", json={"inputs": [tensor]}
        ).json()
        outputs = {output["name"]: output["data"] for output in answer["outputs"]}
        assert outputs["truncated"] == [each["truncated"] for each in served]
        scores = [each["ood_score"] for each in served]
        assert outputs["ood_score"] == pytest.approx(scores, rel=1e-4)
        own = [each.ood_score for each in local[begin : begin + 250]]
        assert own == pytest.approx(scores, rel=1e-4)


def test_pairs_get_equal_answers_over_both_protocols_in_python_and_from_a_file(
    tmp_path: Path,
) -> None:
    project = copy_checkout(tmp_path)
    tiny_encoder(project.path / "models/tiny", tokenizer=word_piece())
    texts = [text for _, text in sentences(800, seed=1)]
    pairs = [
        (name, texts[place + 400], text) for place, (name, text) in enumerate(sentences(400, 1))
    ]
    run_stages(project, ["text_a", "text_b"], pairs)
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    assert "http" in {hop.name for hop in certificate.hops if hop.status == "agrees"}
    new: list[dict[str, str | None]] = [{"text_a": a, "text_b": b} for _, a, b in pairs[:40]]
    new += [{"text_a": "the soup", "text_b": None}, {"text_b": "only one of them"}]
    with project.service() as address:
        wait_until_ready(address)
        served = plain_http.post(f"{address}/predict", json={"rows": new}).json()["predictions"]
        swapped = {"text_a": new[0]["text_b"], "text_b": new[0]["text_a"]}
        other = plain_http.post(f"{address}/predict", json=swapped).json()
        tensors = [
            {
                "name": name,
                "datatype": "BYTES",
                "shape": [len(new)],
                "data": [row.get(name) or "" for row in new],
            }
            for name in ("text_a", "text_b")
        ]
        answer = plain_http.post(f"{address}/v2/models/slipway/infer", json={"inputs": tensors})
        words = plain_http.post(f"{address}/explain", json=new[0]).json()["explanation"]["words"]
    scores = [each["ood_score"] for each in served]
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert outputs["ood_score"] == pytest.approx(scores, rel=1e-4)
    with slipway.load(project.path) as model:
        assert [each.ood_score for each in model.predict(new)] == pytest.approx(scores, rel=1e-4)
    source, target = tmp_path / "new.csv", tmp_path / "answers.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text_b", "text_a"])
        writer.writeheader()
        writer.writerows(new)
    project.shell(f"slipway predict {source} {target}")
    with target.open(newline="") as file:
        found = [float(row["ood_score"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(scores, rel=1e-4)
    assert other["probabilities"]["food"] != pytest.approx(
        served[0]["probabilities"]["food"], rel=1e-6
    )
    assert sum("\n" in word["text"] for word in words) == 1
