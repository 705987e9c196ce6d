"""One timm network of each kind, pruned, exported, quantized and compared with torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import first_fault
from slipway.config.params import Params
from slipway.export.bundle_writer import ExportRows, Pruned, write_bundle
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.hops import HopRunner
from slipway.export.certification.lineage import trace_lineage
from slipway.export.certification.measurement import read_test_rows
from slipway.export.certification.verdict import make_certificate
from slipway.export.graphs.quantization import CPU, StaticQuantizer, dynamic_graph, prepare
from slipway.export.graphs.variants import OF_PRUNED
from slipway.system import files
from slipway.training.pruning.channels import prune_channels
from slipway.training.pruning.result import pruned_network
from slipway.training.targets.classes import ClassHead
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.calibration import Calibrator
from tests.export.conftest import CLASSES, QUICK, RESAMPLING, Project, make_project, trained

pytestmark = pytest.mark.nightly(seconds=20)
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "timm/test_vit": (32, {"img_size": 32}),
    "timm/test_convnext": (32, {}),
    "timm/mobilenetv3_small_050": (32, {}),
}
TRANSFORMER = "timm/test_vit"
MATRIX_PRODUCTS = (TRANSFORMER,)  # whose weights are mostly in these
ONLY_CONVOLUTIONS = ("timm/mobilenetv3_small_050",)  # up to the head


@dataclass(frozen=True)
class Exported:
    """A network's project, and a bundle with all of its variants."""

    name: str
    project: Project
    bundle: LoadedBundle


@pytest.fixture(name="exported", scope="module", params=NETWORKS)
def _exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, export_params: Params
) -> Exported:
    name: str = request.param
    size_px, arguments = NETWORKS[name]
    root = tmp_path_factory.mktemp("timm")
    project = make_project(root, "image_classification", size_px, name, arguments)
    network, train, val = project.network(), project.split("train"), project.split("val")
    weights, widths = prune_channels(network, 0.25)
    assert widths
    smaller = pruned_network(network.spec, weights)
    fitted = Calibrator(smaller, export_params.evaluate, 7, "cpu").fit(train, val)
    temperature = fitted.calibration.temperature
    calibrated = CalibratedNetwork(smaller, ClassHead, temperature, fitted.score).eval()
    pruned = Pruned("structured", calibrated, "a" * 64, fitted.calibration)
    dynamic = ["int8_dynamic"] if name in MATRIX_PRODUCTS else []
    variants = ["fp32", "fp16", "int8", *dynamic, *OF_PRUNED]
    params = export_params.export.model_copy(update={"variants": variants})
    rows = ExportRows(train.inputs[:], val, train)
    with files.new_directory(project.bundle_root) as folder:
        complete = replace(trained(project), pruned=pruned)
        write_bundle(folder, complete, rows, params, RESAMPLING, trace_lineage({}, []), QUICK)
    bundle = load_bundle(project.bundle_root)
    assert set(bundle.manifest.models) == set(variants)
    return Exported(name, project, bundle)


def test_every_executed_backend_of_a_timm_network_agrees_with_torch(
    exported: Exported, export_params: Params
) -> None:
    """The budget of int8 is wide enough for a network trained for seconds."""
    rows = read_test_rows(exported.project.packed, CLASSES)
    loss = dict.fromkeys(("int8", "int8_dynamic", "fp16", *OF_PRUNED), 0.2)
    verify = export_params.verify.model_copy(update={"max_metric_loss": loss})
    comparison = HopComparison(rows, RESAMPLING)
    runner = HopRunner(comparison, exported.bundle, exported.project.calibrated(), verify)
    hops = [runner.torch[0], *(hop for hop, _ in runner.run_onnx())]
    print([(hop.name, hop.status, hop.max_difference, len(hop.flipped)) for hop in hops])
    assert first_fault(hops) is None
    assert {hop.status for hop in hops if hop.requested.provider == "cpu"} == {"agrees"}
    assert make_certificate(exported.bundle, hops, {}, [], draft=True).status == "draft"


def test_dynamic_int8_quantizes_a_graph_with_shapes_from_the_exporter(
    exported: Exported, tmp_path: Path
) -> None:
    """The exporter records shapes of weights that fusion changes later."""
    fp32 = exported.bundle.model_bytes("fp32")
    assert onnx.load_model_from_string(fp32).graph.value_info
    assert len(dynamic_graph(fp32, tmp_path)) < 1.1 * len(fp32)
    assert prepare(fp32, tmp_path).exists()


def test_sums_are_quantized_between_convolutions_and_not_between_matrix_products(
    exported: Exported, tmp_path: Path
) -> None:
    split = exported.project.split("train")
    quantizer = StaticQuantizer(exported.bundle.model_bytes("fp32"), split.inputs[:], tmp_path, CPU)
    assert quantizer.layers
    assert bool(quantizer._joints) is (exported.name in ONLY_CONVOLUTIONS)
