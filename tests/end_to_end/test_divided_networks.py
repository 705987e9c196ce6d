"""Networks that two processes trained in parts: exported, compiled and certified as any other."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.certificate import read_certificate
from slipway.system import files
from tests.end_to_end import test_texts
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import Project, copy_checkout, draw_shapes
from tests.end_to_end.test_several_labels import run_stages
from tests.sentences import sentences

SHARING = ("tensor_parallel", "pipeline")  # processes of a copy of a transformer
TRANSFORMER: dict[str, Any] = {
    "network": "small_transformer",
    "network_arguments": {"width": 32, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.0},
    "epochs": 12,
    "learning_rate": 0.003,
}


def shapes_project(root: Path) -> Project:
    project = copy_checkout(root)
    draw_shapes(project.path / "data/own")
    project.set_params(SMALL)
    project.set_value("clean.rules.near_duplicate", None)
    return project


def text_project(root: Path) -> Project:
    project = copy_checkout(root)
    with (project.path / "data/sentences.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["label", "text", "language"]])
        csv.writer(file).writerows([*row, "any"] for row in sentences(400, seed=1))
    project.set_params(test_texts.PARAMS)
    project.set_params({"train": TRANSFORMER, "export": {"variants": ["fp32"]}})
    project.keep_own_keys()
    project.set_params({"data": {"text_columns": ["text"]}})
    project.set_params({"precompute": {"max_text_bytes": 64}})
    return project


@pytest.mark.nightly(seconds=120)
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", *SHARING])
def test_a_network_trained_in_parts_is_certified(tmp_path: Path, strategy: str) -> None:
    shares = strategy in SHARING
    project = (text_project if shares else shapes_project)(tmp_path)
    project.set_params({"train": {"strategy": strategy, "precision": "32-true", "devices": 2}})
    run_stages(project)
    manifest = project.path / "artifacts/model/model.json"
    model = json.loads(manifest.read_bytes())
    assert (model["actual"]["strategy"], model["actual"]["world_size"]) == (strategy, 2)
    assert model["actual"]["model_parallel"] == (2 if shares else None)
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    # The file that names the strategy is one that the certificate covers.
    assert certificate.digests["artifacts/model/model.json"] == files.sha256_file(manifest)
    hops = {hop.name: hop.status for hop in certificate.hops}
    assert {"torch", "onnxruntime/cpu/fp32", "http"} <= hops.keys()
    assert set(hops.values()) <= {"agrees", "not_executed"}
    assert hops["http"] == "agrees"
