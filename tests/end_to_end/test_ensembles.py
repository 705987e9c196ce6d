"""Ensembles of a small table and of texts, from a CSV to a certified service.

Each method is one ONNX graph.
"""

import csv
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import slipway
from slipway.artifacts.certificate import read_certificate
from slipway.inference.predictions import ClassPrediction
from slipway.training.networks.networks import read_model_manifest
from tests import plain_http, warm_starts
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready
from tests.end_to_end.test_divided_networks import TRANSFORMER
from tests.end_to_end.test_several_labels import PARAMS, STAGES
from tests.end_to_end.test_texts import project_of_sentences
from tests.training.trees.fitted import ARGUMENTS as TREES

pytestmark = pytest.mark.nightly(seconds=60)

FROM_TRAIN = STAGES[STAGES.index("train") :]
TREES_MEMBER = {"train": {"network": "lightgbm", "network_arguments": TREES, "epochs": 40}}
STUDENT = {"seed": 9, "train": {}, "temperature": 2.0, "soft_fraction": 0.8, "served": True}
CLEAR = [
    ({"x": -3.0, "y": 0.5, "colour": "green"}, "left"),
    ({"x": 3.0, "y": 2.5, "colour": "green"}, "up"),
    ({"x": 3.0, "y": -2.5, "colour": "red"}, "right"),
]


@pytest.fixture(name="project", scope="module")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose rows are packed; each test trains, exports and certifies in it."""
    project = copy_checkout(tmp_path_factory.mktemp("ensembles"))
    generator = np.random.default_rng(5)
    with (project.path / "data/planted.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["x", "y", "colour", "side"])
        for x, y in generator.normal(size=(500, 2)).tolist():
            colour = str(generator.choice(["red", "green"]))
            side = "left" if x < 0 else "up" if y > 0 and colour == "green" else "right"
            table.writerow([x, y, colour, side])
    project.set_params(PARAMS)
    project.set_params(
        {
            "data": {"task": "table_classification", "target_column": "side"},
            "evaluate": {"gates": {"accuracy": {"min": 0.8, "max": None}}},
        }
    )
    project.keep_own_keys()
    (project.path / "dvc.lock").unlink(missing_ok=True)
    return project


def certified(project: Project, **ensemble: Any) -> dict[str, Any]:
    """Train an ensemble, go on to the certificate, and return the record of `evaluate`."""
    is_packed = (project.path / "data/augmented").is_dir()
    project.set_params({"ensemble": {"folds": None, "student": None} | ensemble})
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in FROM_TRAIN if is_packed else STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    hops = {hop.name: hop for hop in certificate.hops}
    assert certificate.status == "certified"
    assert hops["onnxruntime/cpu/fp32"].status == hops["http"].status == "agrees"
    assert hops["http"].flipped == []
    record: dict[str, Any] = json.loads((project.path / "metrics/evaluate.json").read_text())
    return record


def operators(project: Project) -> Counter[str]:
    """The operators of the fp32 graph, each with its number of nodes."""
    graph = onnx.load(project.path / "artifacts/bundle/model_fp32.onnx").graph
    return Counter(node.op_type for node in graph.node)


def answers(project: Project) -> list[dict[str, Any]]:
    """The answers of the service to the clear rows."""
    with project.service() as address:
        wait_until_ready(address)
        rows = {"rows": [row for row, _ in CLEAR]}
        answer = plain_http.post(f"{address}/predict", json=rows).json()
    found: list[dict[str, Any]] = answer["predictions"]
    return found


def test_a_vote_of_networks_and_trees_is_one_certified_graph(project: Project) -> None:
    record = certified(project, method="vote", members=[{}, {"seed": 8}, TREES_MEMBER])
    (members,) = record["members"]
    assert [member["weight"] for member in members["members"]] == pytest.approx([1 / 3] * 3)
    assert operators(project)["TreeEnsemble"] == 1
    assert list((project.path / "artifacts/bundle").glob("*int8*.onnx")) == []
    assert [answer["label"] for answer in answers(project)] == [label for _, label in CLEAR]


def test_an_ensemble_is_explained_and_monitored_as_one_model(project: Project) -> None:
    certified(project, method="average", members=[{}, {"seed": 8}, TREES_MEMBER])
    generator = np.random.default_rng(6)
    usual = [
        {"x": x, "y": y, "colour": str(generator.choice(["red", "green"]))}
        for x, y in generator.normal(size=(200, 2)).tolist()
    ]
    moved = [row | {"y": row["y"] + 3, "colour": "green"} for row in usual]
    far = {"x": 40.0, "y": -40.0, "colour": "red"}
    with project.service(SLIPWAY_WINDOW_ROWS="100") as address:
        wait_until_ready(address)
        answer = plain_http.post(f"{address}/explain", json=CLEAR[0][0]).json()
        changes = {each["name"]: each["change"] for each in answer["explanation"]["columns"]}
        assert answer["label"] == "left"
        assert max(changes, key=lambda name: abs(changes[name])) == "x"
        scores = [
            plain_http.post(f"{address}/predict", json=row).json()["ood_score"]
            for row in (usual[0], far)
        ]
        assert scores[0] < scores[1]
        assert drift_after(address, usual) == set()
        assert drift_after(address, moved) >= {"column y", "column colour"}


def drift_after(address: str, rows: list[dict[str, Any]]) -> set[str]:
    """Send the rows, wait for the test of a window of 100, and return the features that alarm."""
    before = len(drift_status(address).get("windows", []))
    for start in range(0, len(rows), 8):
        sent = plain_http.post(f"{address}/predict", json={"rows": rows[start : start + 8]})
        assert sent.status_code == 200
    deadline = time.monotonic() + 60
    while len((drift := drift_status(address)).get("windows", [])) == before:
        assert time.monotonic() < deadline, drift
        time.sleep(0.2)
    assert drift["state"] == "monitoring"
    return {each["name"] for each in drift["features"] if abs(each["value"]) > each["threshold"]}


def drift_status(address: str) -> dict[str, Any]:
    found: dict[str, Any] = plain_http.get(f"{address}/status").json()["drift"]
    return found


def test_the_student_of_a_stack_is_certified_and_answers_in_its_place(project: Project) -> None:
    record = certified(
        project, method="stack", folds=2, members=[{}, TREES_MEMBER], student=STUDENT
    )
    (members,) = record["members"]
    assert members["student"]["is_served"]
    assert record["accuracy"] == members["student"]["measured"]
    model = read_model_manifest(project.path / "artifacts/model")
    assert (model.network.name, model.seed) == ("tabm", 7)  # of params.yaml, as it is compared
    assert operators(project)["TreeEnsemble"] == 0
    assert [answer["label"] for answer in answers(project)] == [label for _, label in CLEAR]


def test_a_soup_is_certified_as_one_network(project: Project) -> None:
    others = [{"train": {"learning_rate": rate}} for rate in (0.008, 0.012)]
    certified(project, method="soup", members=[{}, *others])
    model = read_model_manifest(project.path / "artifacts/model")
    assert (model.network.name, model.seed) == ("tabm", 7)
    assert operators(project)["TreeEnsemble"] == 0
    assert [answer["label"] for answer in answers(project)] == [label for _, label in CLEAR]


@pytest.mark.nightly(seconds=150)
def test_two_networks_of_texts_are_one_certified_graph_from_the_text_on(tmp_path: Path) -> None:
    project = project_of_sentences(tmp_path)
    members = [{}, {"train": TRANSFORMER}]  # hashed n-grams beside a transformer
    record = certified(project, method="average", members=members)
    (found,) = record["members"]
    assert [member["weight"] for member in found["members"]] == [0.5, 0.5]
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    statuses = {hop.name: hop.status for hop in certificate.hops}
    assert statuses["grpc"] == "agrees"
    texts = ["the soup needs more pepper", "\u8f66\u7968\u592a\u8d35", "soup " * 100]
    rows = {"rows": [{"text": text} for text in texts]}
    with project.service() as address:
        wait_until_ready(address)
        served = plain_http.post(f"{address}/predict", json=rows).json()["predictions"]
        asked = plain_http.post(f"{address}/explain", json={"text": texts[0]}).json()
    assert [answer["label"] for answer in served] == ["food", "travel", "food"]
    assert [answer["truncated"] for answer in served] == [False, False, True]
    assert [word["text"] for word in asked["explanation"]["words"]][:2] == ["the ", "soup "]
    with slipway.load(project.path) as model:
        own = model.predict(texts)
    for answer, other in zip(served, own, strict=True):
        assert isinstance(other, ClassPrediction)
        assert answer["probabilities"] == pytest.approx(other.probabilities, rel=1e-4)
