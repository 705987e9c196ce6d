"""Rows with several labels, from a table to the answer of a service: planted labels are found."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from tests import plain_http, warm_starts
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready

pytestmark = pytest.mark.nightly(seconds=6)  # and the set-up of all

STAGES = (
    *("code", "clean", "split", "precompute", "augment", "train"),
    *("evaluate", "prune", "export", "compile", "verify"),
)
LABELS = ["left", "red", "up"]  # "up" only with "red"
PARAMS: dict[str, dict[str, Any]] = {
    "data": {"path": "data/planted.csv", "task": "table_multilabel", "target_column": "tags"},
    "clean": {"max_bad_fraction": 0.05},
    "split": {"assignment": "exact"},
    "train": {
        "network": "tabm",
        "network_arguments": {
            "num_submodels": 4,
            "num_blocks": 1,
            "width": 32,
            "dropout": 0.0,
            "embedding_size": 8,
            "num_bins": 8,
        },
        "epochs": 20,
        "batch_size": 64,
        "learning_rate": 0.01,
        "label_smoothing": 0.0,
        "class_weights": "balanced",
    },
    "evaluate": {
        "gates": {"f1_macro": {"min": 0.8, "max": None}},
        "bootstrap_samples": 100,
    },
    "export": {"variants": ["fp32", "int8"], "max_batch_size": 8},
    "compile": {"variant": "fp32", "optimal_batch_size": 8},
    "verify": {"timing_rounds": 5, "max_metric_loss": {"int8": 0.2}},
}
CLEAR = {"x": -2.0, "y": 2.0, "colour": "red"}


def labels_of(x: float, y: float, colour: str) -> list[str]:
    planted = {"left": x < 0, "red": colour == "red", "up": y > 0.7 and colour == "red"}
    return [label for label, is_there in planted.items() if is_there]


def planted_rows() -> list[list[Any]]:
    """500 rows of two numbers, a colour, and the list of their labels."""
    generator = np.random.default_rng(5)
    rows = []
    for x, y in generator.normal(size=(500, 2)).tolist():
        colour = str(generator.choice(["red", "green"]))
        rows.append([x, y, colour, labels_of(x, y, colour)])
    return rows


def write_table(project: Project, target: str, rows: list[list[Any]]) -> None:
    with (project.path / "data/planted.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x", "y", "colour", target], *rows])


def run_stages(project: Project) -> None:
    """Run every stage with the params that the project has."""
    project.keep_own_keys()
    (project.path / "dvc.lock").unlink(missing_ok=True)  # of a run in this checkout
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = copy_checkout(tmp_path_factory.mktemp("labels"))
    rows = [[*cells, "|".join(labels) or "[]"] for *cells, labels in planted_rows()]
    write_table(project, "tags", [*rows, [0.5, 0.5, "red", ""]])
    project.set_params(PARAMS)
    run_stages(project)
    return project


@pytest.fixture(scope="module")
def service(verified: Project) -> Iterator[str]:
    with verified.service() as address:
        wait_until_ready(address)
        yield address


def test_clean_refuses_a_row_without_an_answer_and_counts_each_label(verified: Project) -> None:
    report = json.loads((verified.path / "reports/clean.json").read_text())
    assert (report["kept"], report["refused"]["missing_label"]["count"]) == (500, 1)
    assert list(report["classes"]) == LABELS


def test_every_label_is_in_every_split_by_the_requested_fractions(verified: Project) -> None:
    splits = json.loads((verified.path / "reports/split.json").read_text())["splits"]
    for label in LABELS:
        counts = [splits[name]["classes"][label] for name in ("train", "val", "test")]
        assert np.array(counts) / sum(counts) == pytest.approx([0.7, 0.15, 0.15], abs=0.04)


def test_evaluate_records_each_label_and_the_labels_that_occur_together(verified: Project) -> None:
    record = json.loads((verified.path / "metrics/evaluate.json").read_text())
    assert [entry["label"] for entry in record["per_label"]] == LABELS
    pairs = {tuple(entry["labels"]): entry["rows"] for entry in record["co_occurrence"]}
    up = next(entry for entry in record["per_label"] if entry["label"] == "up")
    assert pairs["red", "up"] == up["rows"] > 0
    assert record["f1_macro"] > 0.8


def test_the_certificate_names_each_row_whose_labels_flip_and_http_flips_none(
    verified: Project,
) -> None:
    certificate = read_certificate(verified.path / "artifacts/certificate.json")
    hops = {hop.name: hop for hop in certificate.hops}
    assert certificate.status == "certified"
    assert hops["http"].status == hops["onnxruntime/cpu/fp32"].status == "agrees"
    assert hops["http"].flipped == hops["grpc"].flipped == []
    assert hops["grpc"].status == "agrees"
    ids = set(pq.read_table(verified.path / "artifacts/predictions.parquet")["id"].to_pylist())
    assert ids.issuperset(hops["onnxruntime/cpu/int8"].flipped)


def test_the_service_gives_the_labels_that_reach_their_threshold(service: str) -> None:
    model = plain_http.get(f"{service}/model").json()
    rows = [CLEAR, {"x": 2.0, "y": 2.0, "colour": "green"}, {"x": 2.0, "y": -2.0, "colour": "red"}]
    answers = plain_http.post(f"{service}/predict", json={"rows": rows}).json()["predictions"]
    assert [answer["labels"] for answer in answers] == [LABELS, [], ["red"]]
    thresholds = dict(zip(model["labels"], model["calibration"]["thresholds"], strict=True))
    for answer in answers:
        shares = answer["probabilities"]
        reached = [label for label in LABELS if shares[label] >= thresholds[label]]
        assert answer["labels"] == reached


def test_the_open_inference_protocol_marks_the_given_labels(service: str) -> None:
    url = f"{service}/v2/models/slipway"
    named = {tensor["name"]: tensor for tensor in plain_http.get(url).json()["outputs"]}
    assert (named["labels"]["datatype"], named["labels"]["shape"]) == ("BOOL", [-1, 3])
    inputs = [
        {"name": name, "datatype": kind, "shape": [1], "data": [CLEAR[name]]}
        for name, kind in (("x", "FP64"), ("y", "FP64"), ("colour", "BYTES"))
    ]
    answer = plain_http.post(f"{url}/infer", json={"inputs": inputs}).json()
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    assert found["labels"] == [True, True, True]


def test_slipway_predict_writes_a_list_of_labels(verified: Project) -> None:
    (verified.path / "new.csv").write_text("x,y,colour\n-2,2,red\n2,2,green\n")
    verified.shell("slipway predict new.csv answers.parquet")
    found = pq.read_table(verified.path / "answers.parquet")
    assert found["prediction"].to_pylist() == [LABELS, []]


def test_the_bundle_has_a_temperature_and_a_threshold_for_each_label(verified: Project) -> None:
    manifest = load_bundle(verified.path / "artifacts/bundle").manifest
    assert manifest.output.kind == "label_probabilities"
    assert isinstance(manifest.calibration.temperature, list)
    assert len(manifest.calibration.temperature) == len(manifest.calibration.thresholds or ()) == 3


@pytest.mark.nightly(seconds=90)
def test_pictures_with_several_labels_are_certified_with_a_threshold_for_each(
    tmp_path: Path,
) -> None:
    project = copy_checkout(tmp_path)
    generator = np.random.default_rng(3)
    images, tags = [], []
    for _ in range(300):
        pixels = generator.integers(0, 60, (16, 16), dtype=np.uint8)
        labels = [name for name in ("left", "right") if generator.random() < 0.5]
        for name in labels:
            columns = slice(1, 6) if name == "left" else slice(10, 15)
            pixels[4:12, columns] = 200
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        images.append({"bytes": stream.getvalue(), "path": None})
        tags.append(labels)
    pq.write_table(pa.table({"image": images, "tags": tags}), project.path / "data/planted.parquet")
    project.set_params(SMALL)
    project.set_params(
        {
            "data": {
                "path": "data/planted.parquet",
                "task": "image_multilabel",
                "target_column": "tags",
            },
            "split": {"assignment": "exact"},
            "train": {
                "epochs": 8,
                "batch_size": 32,
                "label_smoothing": 0.0,
                "strategy": "single",
                "precision": "32-true",
                "devices": 1,
            },
            "evaluate": {"gates": {"f1_macro": {"min": 0.9, "max": None}}},
        }
    )
    project.set_value("clean.rules.near_duplicate", None)
    project.set_value("clean.rules.conflicting_label", None)
    run_stages(project)
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    hops = {hop.name: hop for hop in certificate.hops}
    assert hops["http"].flipped == hops["grpc"].flipped == []
    assert hops["grpc"].status == "agrees"
    record = json.loads((project.path / "metrics/evaluate.json").read_text())
    assert [entry["label"] for entry in record["per_label"]] == ["left", "right"]


@pytest.mark.nightly(seconds=90)
def test_a_decision_by_cost_is_certified_and_reaches_the_files(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path)
    generator = np.random.default_rng(8)
    rows = [
        [*cells, "spam" if ("left" in labels) ^ (generator.random() < 0.1) else "letter"]
        for *cells, labels in planted_rows()
    ]
    write_table(project, "kind", rows)
    project.set_params(PARAMS)
    decision = {
        "positive": "spam",
        "costs": {"false_positive": 5, "false_negative": 1, "abstain": 0.4},
    }
    project.set_params(
        {
            "data": {"task": "table_classification", "target_column": "kind"},
            "evaluate": {
                "gates": {"accuracy": {"min": 0.5, "max": None}},
                "decision": decision,
            },
        }
    )
    run_stages(project)
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    hops = {hop.name: hop for hop in certificate.hops}
    assert hops["http"].flipped == hops["grpc"].flipped == []
    assert hops["grpc"].status == "agrees"
    manifest = load_bundle(project.path / "artifacts/bundle").manifest
    assert manifest.calibration.decision is not None
    assert manifest.calibration.decision.positive == "spam"
    (project.path / "new.csv").write_text("x,y,colour\n-3,0,red\n3,0,red\n0,0,red\n")
    project.shell("slipway predict new.csv answers.parquet")
    found = pq.read_table(project.path / "answers.parquet")
    sure, other, _ = found["prediction"].to_pylist()
    assert other == "letter"
    assert sure in ("spam", "letter")
    costs, asked = found["expected_cost"].to_pylist(), found["abstain"].to_pylist()
    assert all(cost == 0.4 for cost, is_asked in zip(costs, asked, strict=True) if is_asked)
    assert costs[1] < 0.4
