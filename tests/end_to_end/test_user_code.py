"""The network, loss and metric of docs/how-to/own_network.md go from params to the certificate."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.artifacts.certificate import read_certificate
from slipway.kinds.code_digest import user_code
from slipway.training.networks.networks import load_network, read_model_manifest
from tests import warm_starts
from tests.conftest import ROOT
from tests.end_to_end.project import draw_shapes

pytestmark = pytest.mark.process
GUIDE = (ROOT / "docs/how-to/own_network.md").read_text()
STAGES = ("clean", "split", "precompute", "augment", "train", "evaluate", "prune", "export")
LAST_STAGES = ("compile", "verify")
SMALL: dict[str, dict[str, Any]] = {
    "data": {"path": "data/own"},
    "clean": {"max_bad_fraction": 0.9},
    "split": {"assignment": "exact"},
    "augment": {"forbid": [], "mixup_alpha": 0.2},
    "train": {"epochs": 3, "batch_size": 16, "strategy": "ddp", "devices": 2},
    "evaluate": {"bootstrap_samples": 100},
    "export": {"variants": ["fp32"], "max_batch_size": 8},
    "compile": {"variant": "fp32", "optimal_batch_size": 8},
    "verify": {"timing_rounds": 2},
}


def blocks(language: str) -> list[str]:
    """The blocks of the guide in one language, without their indentation."""
    found = re.findall(rf"^   ```{language}\n(.*?)^   ```", GUIDE, re.DOTALL | re.MULTILINE)
    return [re.sub("^   ", "", block, flags=re.MULTILINE) for block in found]


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with pictures and with what the guide writes."""
    monkeypatch.chdir(tmp_path)
    draw_shapes(Path("data/own"))
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name
        Path(name[1]).write_text(block)
    yaml = YAML(typ="safe", pure=True)
    content = yaml.load(ROOT / "params.yaml")
    for changes in (SMALL, yaml.load(blocks("yaml")[0])):
        for section, values in changes.items():
            content.setdefault(section, {}).update(values)
    content["clean"]["rules"] = {"near_duplicate": None}
    yaml.dump(content, Path("params.yaml"))
    return tmp_path


def run(stage: str, project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_BUILD_OPS": "0"}
    done = warm_starts.run([f"slipway.stages.{stage}"], project, environment, timeout=120)
    assert done.returncode == 0, (stage, done.stdout, done.stderr)


@pytest.mark.nightly(seconds=45)
def test_the_guides_code_is_trained_by_two_processes_certified_and_named(project: Path) -> None:
    for stage in STAGES:
        run(stage, project)
    manifest = read_model_manifest(Path("artifacts/model"))
    assert manifest.actual.world_size == 2
    assert manifest.network.name == "nets:Net"
    for stage in LAST_STAGES:
        run(stage, project)
    certificate = read_certificate(Path("artifacts/certificate.json"))
    assert certificate.status == "certified"
    expected = [
        *user_code(Path(), "train.network", ["nets:Net"]),
        *user_code(Path(), "train.loss", ["nets:focal"]),
        *user_code(Path(), "evaluate.metrics", ["scores:worst_recall"]),
    ]
    assert certificate.user_code == expected
    assert manifest.user_code == expected[:2]
    assert "worst_recall" in json.loads(Path("metrics/evaluate.json").read_text())
    assert certificate.gate_results[0].name == "worst_recall"
    card = Path("artifacts/bundle/MODEL_CARD.md").read_text()
    assert f"`evaluate.metrics` is `scores:worst_recall`, SHA-256 `{expected[2].sha256}`" in card
    assert load_network(Path("artifacts/model")).spec.num_outputs == 4
