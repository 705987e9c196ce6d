"""The bundle of boosted trees: one graph for the CPU, and reasons for the missing variants."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.engine_manifest import read_engine_manifest, read_skipped_build
from slipway.config.params import Params
from slipway.export.bundle_writer import ExportRows, Trained, write_bundle
from slipway.export.certification.lineage import trace_lineage
from slipway.export.graphs.graph import torch_answers
from slipway.kinds.registry import kind_of
from slipway.runtimes.runtime import open_onnx
from slipway.stages import compile as compile_stage
from slipway.system import files
from slipway.system.errors import EngineError, UnavailableError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.calibration import Calibrator
from tests.export.conftest import QUICK, RESAMPLING
from tests.project_params import PROJECT
from tests.training.trees.fitted import Fitted, fitted, packed

pytestmark = pytest.mark.process
VARIANTS = ["fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt"]


def trained(found: Fitted) -> Trained:
    """Return the trees with the calibration that `evaluate` fits to them."""
    fit = Calibrator(found.network, PROJECT.evaluate, 7, "cpu").fit(
        found.data.train[0], found.data.val
    )
    spec = found.network.spec
    head = kind_of(spec.task).target.load_part("head")
    network = CalibratedNetwork(found.network, head, fit.calibration.temperature, fit.score)
    sha256 = files.sha256_bytes(found.network.text.encode())
    return Trained(
        network.eval(), spec.task, spec.input, spec.classes, sha256, fit.calibration, {}, {}
    )


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return fitted(packed(tmp_path_factory.mktemp("trees"), "table_classification"))


@pytest.fixture(name="project", scope="module")
def _project(found: Fitted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundle")
    params = PROJECT.export.model_copy(update={"variants": VARIANTS, "max_batch_size": 16})
    rows = ExportRows(np.array(found.data.train[0].inputs), found.data.val)
    with files.new_directory(root / "artifacts/bundle") as folder:
        lineage = trace_lineage({}, [])
        write_bundle(folder, trained(found), rows, params, RESAMPLING, lineage, QUICK)
    return root


@pytest.fixture(name="bundle")
def _bundle(project: Path) -> LoadedBundle:
    return load_bundle(project / "artifacts/bundle")


def test_export_leaves_out_variants_that_trees_lack_and_gives_the_reason(
    bundle: LoadedBundle,
) -> None:
    assert list(bundle.manifest.models) == ["fp32"]
    assert bundle.manifest.models["fp32"].meant_for == ["cpu"]
    assert sorted(bundle.manifest.left_out) == sorted(VARIANTS[1:])
    assert "trees, which compare in float32" in bundle.manifest.left_out["fp16"]


def test_tree_graph_predicts_every_row_as_lightgbm_does(
    bundle: LoadedBundle, found: Fitted
) -> None:
    runner = open_onnx(
        bundle.model_bytes("fp32"), variant="fp32", precision="fp32", provider="cpu", num_threads=1
    )
    rows = np.array(found.data.val.inputs)
    for size in (1, 7, 16):
        expected = torch_answers(trained(found).network, rows[:size])
        answered = runner.run(rows[:size])
        assert np.abs(answered.outputs - expected.outputs).max() < 1e-6
        assert np.allclose(answered.scores, expected.scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("variant", "reason"), [("fp16", "would move rows"), ("fp32", "meant for the CPU only")]
)
def test_compile_records_why_trees_have_no_engine_or_refuses(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    reason: str,
) -> None:
    shutil.copytree(project / "artifacts", tmp_path / "artifacts")
    monkeypatch.chdir(tmp_path)
    compile_stage.run(_compiled(variant, require=False))
    skipped = read_skipped_build(Path("artifacts/engine"))
    assert skipped is not None
    assert reason in skipped.reason
    with pytest.raises(UnavailableError, match=r"\. No machine can build one\.$"):
        read_engine_manifest(Path("artifacts/engine"))
    with pytest.raises(EngineError, match=r"compile.require is true, but no engine"):
        compile_stage.run(_compiled(variant, require=True))


def _compiled(variant: str, *, require: bool) -> Params:
    settings = {"variant": variant, "require": require, "optimal_batch_size": 4}
    compiled = PROJECT.compile.model_copy(update=settings)
    return PROJECT.model_copy(update={"compile": compiled})
