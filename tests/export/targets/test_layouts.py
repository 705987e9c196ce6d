"""The folders for MLflow and the Hugging Face hub, read by these libraries."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from slipway.artifacts.bundle import Lineage
from slipway.artifacts.certificate import read_certificate
from slipway.export.targets import layouts
from slipway.export.targets.exported import ExportSource
from slipway.export.targets.layouts import (
    GRAPH,
    NOTE,
    README,
    hub_license,
    hub_task,
    preprocessing_note,
    run_layout_hop,
    write_layout,
)
from tests.export.targets.sources import image_source, photos, table_source

# Run in an environment of the folder's own requirements.txt: loads it as its users do.
READER = """
import sys
import numpy as np
import mlflow.pyfunc
model = mlflow.pyfunc.load_model(sys.argv[1])
found = model.predict(np.load(sys.argv[2]))
np.savez(sys.argv[3], **found)
print(model.metadata.signature)
"""


def lineage(**export: str | None) -> Lineage:
    return Lineage(
        git_revision=None, git_dirty=False, params={"export": export}, data=None, digests={}
    )


@pytest.mark.process
def test_reader_of_the_hub_finds_licence_tags_metrics_and_results_in_the_card(
    tmp_path: Path,
) -> None:
    source = image_source(tmp_path / "source", photos(), lineage=lineage(license="Apache-2.0"))
    record = write_layout(tmp_path / "out", source, "huggingface")
    assert (record.certified, record.hop.name, record.hop.rows) == (True, "huggingface", 12)
    assert record.hop.max_difference == 0.0
    card = ModelCard.load(tmp_path / "out" / README)
    data = card.data.to_dict()
    assert (data["license"], data["pipeline_tag"]) == ("apache-2.0", "image-classification")
    assert {"onnx", "slipway"} <= set(data["tags"])
    assert data["metrics"] == ["accuracy"]
    assert card.data.eval_results is not None
    (result,) = card.data.eval_results
    measured = source.bundle.manifest.metrics["accuracy"]
    assert (result.metric_type, result.metric_value) == ("accuracy", measured.value)
    assert result.dataset_split == "test"
    assert result.metric_args == {"confidence": 0.95, "low": measured.low, "high": measured.high}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["id2label"] == {"0": "dark", "1": "grey", "2": "bright"}
    assert (tmp_path / "out" / GRAPH).read_bytes() == source.graph()
    assert set(record.files) >= {"bundle.json", "certificate.json", "config.json", NOTE, README}


def test_hop_of_a_layout_is_in_its_certificate_and_a_wrong_graph_is_refused(
    tmp_path: Path,
) -> None:
    source = table_source(tmp_path / "source")
    write_layout(tmp_path / "out", source, "huggingface")
    assert read_certificate(tmp_path / "out/certificate.json").hops[-1].name == "huggingface"

    def wrong(folder: Path, source: ExportSource) -> layouts.Ask:
        ask = layouts._load_hub(folder, source)
        return lambda rows: {name: found * 1.01 for name, found in ask(rows).items()}

    hop = run_layout_hop(tmp_path / "out", source, "huggingface", wrong)
    assert (hop.name, hop.status) == ("huggingface", "differs")


@pytest.mark.parametrize(
    ("license_", "expected"),
    [
        (None, {}),
        ("apache-2.0", {"license": "apache-2.0"}),
        ("GPL-3.0-only", {"license": "other", "license_name": "GPL-3.0-only"}),
        ("Ours, on request", {"license": "other", "license_name": "Ours, on request"}),
    ],
)
def test_hub_license_returns_a_licence_known_to_the_hub_or_other(
    license_: str | None, expected: dict[str, str]
) -> None:
    assert hub_license(license_) == expected


def test_hub_task_is_none_for_tasks_that_the_hub_lacks() -> None:
    assert hub_task("table_regression") == "tabular-regression"
    assert hub_task("image_regression") is None


def test_preprocessing_note_lists_the_steps_that_the_caller_must_do(tmp_path: Path) -> None:
    note = preprocessing_note(image_source(tmp_path / "image", photos(2)))
    assert "turn it upright (EXIF), put transparency on white, convert it to RGB" in note
    assert "8 x 8 px (resize_mode stretch, bilinear)" in note
    note = preprocessing_note(table_source(tmp_path / "table"))
    assert "standardised numbers with missing ones filled" in note
    assert "other preprocessing is not certified" in note


@pytest.mark.process
def test_mlflow_model_predicts_every_row_as_certified(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    source = image_source(tmp_path / "source", photos(), lineage=lineage(license="MIT"))
    record = write_layout(tmp_path / "out", source, "mlflow")
    assert (record.certified, record.hop.name, record.hop.max_difference) == (True, "mlflow", 0.0)
    content = yaml.safe_load((tmp_path / "out/MLmodel").read_text())
    assert set(content["flavors"]) == {"onnx", "python_function"}
    assert content["metadata"]["slipway_bundle_sha256"] == source.bundle.digest
    (taken,) = json.loads(content["signature"]["inputs"])
    assert (taken["name"], taken["tensor-spec"]["shape"]) == ("image", [-1, 8, 8, 3])
    assert taken["tensor-spec"]["dtype"] == "uint8"
    assert (tmp_path / "out" / GRAPH).read_bytes() == source.graph()
    assert "onnxruntime" in (tmp_path / "out/requirements.txt").read_text()


@pytest.mark.nightly(seconds=80)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
@pytest.mark.parametrize("is_table", [False, True])
def test_mlflow_loads_the_folder_in_an_environment_of_its_own_requirements(
    is_table: bool, tmp_path: Path
) -> None:
    source = table_source(tmp_path) if is_table else image_source(tmp_path, photos())
    write_layout(tmp_path / "out", source, "mlflow")
    python = str(tmp_path / "reader/bin/python")
    subprocess.run(["uv", "venv", "--quiet", str(tmp_path / "reader")], check=True, timeout=60)
    install = ["uv", "pip", "install", "--quiet", "--python", python]
    install += ["-r", str(tmp_path / "out/requirements.txt")]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"the requirements cannot be installed: {installed.stderr[-300:]}")
    rows = np.ascontiguousarray(source.rows.comparison.rows.inputs[:])
    np.save(tmp_path / "rows.npy", rows)
    command = [python, "-c", READER, str(tmp_path / "out")]
    command += [str(tmp_path / "rows.npy"), str(tmp_path / "found.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = np.load(tmp_path / "found.npz"), source.reference(rows)
    np.testing.assert_allclose(found["probabilities"], expected.outputs, atol=1e-5)
    np.testing.assert_allclose(found["ood_score"], expected.scores, rtol=1e-5)


@pytest.mark.nightly
def test_code_snippet_of_the_hub_card_runs(tmp_path: Path) -> None:
    write_layout(tmp_path / "out", table_source(tmp_path), "huggingface")
    (snippet,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / README).read_text(), re.S)
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1
