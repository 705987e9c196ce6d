"""Replay on torch, in which the trained network is the reference of the fp32 graph."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Execution
from slipway.replay.backends import Places, Replay
from slipway.replay.comparison import BackendResult
from slipway.runtimes.runtime import open_onnx
from slipway.system import files
from slipway.traffic.request_log import LoggedRequest, digest_inputs
from tests.calibrations import described
from tests.export.certification.test_planted_faults import altered, scale_weights
from tests.export.conftest import Project, _png

pytestmark = pytest.mark.process
FP32 = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")


def with_lineage(project: Project, bundle: LoadedBundle, folder: Path) -> LoadedBundle:
    """Add the digest of the weights to the bundle, as `export` does."""
    if bundle.root != folder:
        shutil.copytree(bundle.root, folder)
    content = json.loads((folder / "bundle.json").read_text())
    digest = files.sha256_file(project.checkpoint / "weights.safetensors")
    content["lineage"]["digests"] = {"artifacts/model/weights.safetensors": digest}
    files.write_json(folder / "bundle.json", content)
    return load_bundle(folder)


def replay(
    project: Project, bundle: LoadedBundle, checkpoint: Path | None = None
) -> dict[str, BackendResult]:
    inputs = project.split("test").inputs[:1]
    runner = open_onnx(
        bundle.model_bytes("fp32"), variant="fp32", precision="fp32", provider="cpu", num_threads=1
    )
    outputs, scores = runner.run(np.ascontiguousarray(inputs))
    labels = bundle.manifest.output.labels
    answer = {
        "label": labels[int(outputs.argmax())],
        "probabilities": dict(zip(labels, outputs[0].tolist(), strict=True)),
    }
    request = LoggedRequest(
        request_id="one",
        time=datetime.now(UTC),
        bundle_digest=bundle.digest,
        execution=FP32,
        content_type="application/octet-stream",
        payload=_png(inputs[0]),
        is_list=False,
        inputs_sha256=digest_inputs(inputs),
        outputs={"probabilities": outputs, "ood_score": scores},
        answers=[described(answer, float(scores[0]), bundle.manifest.calibration)],
    )
    places = Places(checkpoint or project.checkpoint, bundle.root.parent / "engine", None)
    return {one.name: one for one in Replay(request, bundle, None, places).run()}


def test_replay_on_the_trained_network_agrees_with_every_backend(
    classifier: Project, tmp_path: Path
) -> None:
    results = replay(classifier, with_lineage(classifier, classifier.bundle(), tmp_path / "bundle"))
    assert results["torch"].status == "reference", results["torch"]
    assert results["onnxruntime/cpu/fp32"].reference == "torch"
    for name in (
        "decode",
        "onnxruntime/cpu/fp32",
        "onnxruntime/cpu/fp16",
        "onnxruntime/cpu/int8",
        "recorded",
    ):
        assert results[name].status == "equal", results[name]
    assert 0 < (results["onnxruntime/cpu/int8"].difference or 0) < 0.2


def test_replay_names_a_graph_that_diverges_from_the_trained_network(
    classifier: Project, tmp_path: Path
) -> None:
    bundle = altered(classifier, tmp_path, scale_weights(1.05))
    results = replay(classifier, with_lineage(classifier, bundle, bundle.root))
    assert (
        next(name for name, one in results.items() if one.status == "diverged")
        == "onnxruntime/cpu/fp32"
    )
    assert results["onnxruntime/cpu/fp32"].reference == "torch"
    assert results["recorded"].status == "equal"


def test_replay_skips_a_checkpoint_of_another_bundle(classifier: Project, tmp_path: Path) -> None:
    bundle = with_lineage(classifier, classifier.bundle(), tmp_path / "bundle")
    other = tmp_path / "checkpoint"
    shutil.copytree(classifier.checkpoint, other)
    weights = other / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    results = replay(classifier, bundle, other)
    assert results["torch"].status == "not_executed"
    assert "the bundle was made of" in results["torch"].detail
    assert results["onnxruntime/cpu/fp32"].status == "reference"
