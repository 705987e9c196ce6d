"""A kind of task that only this test has goes from raw data to the answer of a service.

Its record and its parts are in tests/end_to_end/series. Nothing else of Slipway knows it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import MANIFEST
from slipway.config.yaml_text import yaml_text
from tests import plain_http
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready

pytestmark = pytest.mark.process

PARTS = Path(__file__).with_name("series")
STAGES = (
    *("code", "clean", "split", "precompute", "augment", "audit", "train", "evaluate"),
    *("prune", "export", "compile", "verify"),
)
PARAMS: dict[str, dict[str, Any]] = {
    "data": {"path": "data/series.jsonl", "task": "series_regression"},
    "split": {"assignment": "exact"},
    "augment": {"forbid": []},
    "train": {
        "network": "series_mlp",
        "network_arguments": {"width": 16},
        "epochs": 30,
        "batch_size": 16,
        "learning_rate": 0.03,
    },
    "evaluate": {"gates": {"r2": {"min": 0.8, "max": None}}, "bootstrap_samples": 100},
    "export": {"variants": ["fp32"], "max_batch_size": 8},
    "compile": {"variant": "fp32", "optimal_batch_size": 8},
}


@dataclass(frozen=True)
class SeriesProject(Project):
    """A project whose processes import the module that registers the kind."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(self.path)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> SeriesProject:
    project = SeriesProject(copy_checkout(tmp_path_factory.mktemp("series")).path)
    for path in PARTS.glob("*.py"):
        folder = project.path if path.stem == "sitecustomize" else project.path / "transforms"
        (folder / path.name).write_text(path.read_text())
    rows = np.random.default_rng(3).normal(size=(240, 8))
    lines = [{"series": row.tolist(), "target": float(row @ np.arange(8))} for row in rows]
    lines.append({"series": [1.0], "target": 0.0})
    text = "\n".join(map(json.dumps, lines))
    (project.path / "data/series.jsonl").write_text(text)
    (project.path / "params.yaml").write_text(yaml_text(PARAMS))  # without the keys of images
    project.run_stages(STAGES)
    return project


@pytest.fixture(scope="module")
def service(exported: SeriesProject) -> Iterator[str]:
    with exported.service() as address:
        wait_until_ready(address)
        yield address


def test_clean_refuses_the_row_that_breaks_the_rule_of_the_kind(exported: SeriesProject) -> None:
    report = json.loads((exported.path / "reports/clean.json").read_text())
    assert (report["kept"], report["refused"]["wrong_length"]["count"]) == (240, 1)


def test_the_bundle_has_the_contract_of_the_kind(exported: SeriesProject) -> None:
    manifest = json.loads((exported.path / "artifacts/bundle" / MANIFEST).read_text())
    assert manifest["input"] == {"kind": "series", "length": 8}


def test_the_service_predicts_a_row(service: str) -> None:
    row = [0.0, 0.1, 0.2, -0.1, 0.3, 0.0, 0.5, 0.4]
    answer = plain_http.post(f"{service}/predict", json=row).json()
    expected = float(np.dot(row, np.arange(8)))
    assert answer["value"] == pytest.approx(expected, abs=4)
    refused = plain_http.post(f"{service}/predict", json=[1.0])
    assert refused.json()["error"]["code"] == "not_a_row"


def test_the_service_describes_the_input(service: str) -> None:
    assert plain_http.get(f"{service}/model").json()["input"] == {"kind": "series", "length": 8}
    document = plain_http.get(f"{service}/docs.json").json()
    body = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["maxItems"] == 8
    assert plain_http.get(service).status_code == 200


def test_the_open_inference_protocol_gives_the_same_value(service: str) -> None:
    row = [0.5] * 8
    alone = plain_http.post(f"{service}/predict", json=row).json()
    tensor = {"name": "series", "datatype": "FP32", "shape": [1, 8], "data": row}
    url = f"{service}/v2/models/slipway"
    metadata = plain_http.get(url).json()
    answer = plain_http.post(f"{url}/infer", json={"inputs": [tensor]}).json()
    values = {output["name"]: output["data"] for output in answer["outputs"]}
    assert metadata["inputs"][0]["name"] == "series"
    assert values["value"] == [pytest.approx(alone["value"], rel=1e-6)]


def test_an_explanation_is_refused_because_the_kind_has_none(service: str) -> None:
    answer = plain_http.post(f"{service}/explain", json=[0.5] * 8)
    assert answer.json()["error"]["code"] == "not_found"
