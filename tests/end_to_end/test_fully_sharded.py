"""A network that two processes trained in parts: exported, compiled and certified as any other."""

import json
from pathlib import Path

import pytest

from slipway.artifacts.certificate import read_certificate
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import copy_checkout, draw_shapes
from tests.end_to_end.test_several_labels import run_stages


@pytest.mark.nightly(seconds=120)
def test_a_network_trained_by_fsdp_is_certified(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path)
    draw_shapes(project.path / "data/own")
    project.set_params(SMALL)
    project.set_params({"train": {"strategy": "fsdp", "precision": "32-true", "devices": 2}})
    project.set_value("clean.rules.near_duplicate", None)
    run_stages(project)
    model = json.loads((project.path / "artifacts/model/model.json").read_bytes())
    assert (model["actual"]["strategy"], model["actual"]["world_size"]) == ("fsdp", 2)
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    assert {hop.name: hop.status for hop in certificate.hops}["http"] == "agrees"
