"""Faults planted between the trained network and its graphs: the certificate names the hop."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Execution, first_fault
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST, Profile, write_engine
from slipway.artifacts.uncertainty import Answers
from slipway.config.params import Params
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.hops import HopRunner, Measured
from slipway.export.certification.measurement import read_test_rows
from slipway.export.certification.verdict import make_certificate, raise_if_refused
from slipway.export.graphs.variants import fp16_graph
from slipway.runtimes.runtime import open_onnx
from slipway.system import files
from slipway.system.errors import ParityError
from slipway.training.networks.image_networks import ImageNetwork
from tests.export.conftest import RESAMPLING, Project
from tests.serving.bundles import engine_manifest_for

pytestmark = pytest.mark.process


def run_hops(
    project: Project, network: Any, bundle: LoadedBundle, params: Params
) -> list[Measured]:
    runner = HopRunner(comparison_of(project), bundle, network, params.verify)
    return [runner.torch, *runner.run_onnx()]


def comparison_of(project: Project) -> HopComparison:
    return HopComparison(read_test_rows(project.packed, project.network().spec.classes), RESAMPLING)


class FakeEngine:
    """Fake TensorRT: the graph in ONNX Runtime; `is_stale` predicts as other weights would."""

    def __init__(self, actual: Execution, graph: bytes, is_stale: bool) -> None:
        self.actual = actual
        self._runner = open_onnx(
            graph, variant="fp16", precision="fp16", provider="cpu", num_threads=1
        )
        self._is_stale = is_stale

    def run(self, batch: NDArray[Any]) -> Answers:
        return self._runner.run(255 - batch if self._is_stale else batch)


def guilty(measured: list[Measured]) -> str | None:
    fault = first_fault([hop for hop, _ in measured])
    return fault.name if fault else None


def altered(
    project: Project,
    tmp_path: Path,
    change: Callable[[onnx.ModelProto], None],
    variant: str = "fp32",
) -> LoadedBundle:
    """Make a bundle with a valid manifest whose graph was changed before it was digested."""
    folder = tmp_path / "bundle"
    shutil.copytree(project.bundle_root, folder)
    path = folder / f"model_{variant}.onnx"
    model = onnx.load_model_from_string(path.read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())
    content = json.loads((folder / "bundle.json").read_text())
    content["models"][variant] |= {"sha256": files.sha256_file(path), "bytes": path.stat().st_size}
    files.write_json(folder / "bundle.json", content)
    return load_bundle(folder)


def scale_weights(factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = max(model.graph.initializer, key=lambda candidate: len(candidate.raw_data))
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(tensor) * np.float32(factor), tensor.name
            )
        )

    return change


def test_every_hop_of_a_healthy_bundle_agrees(
    classifier: Project, regressor: Project, export_params: Params
) -> None:
    for project in (classifier, regressor):
        measured = run_hops(project, project.calibrated(), project.bundle(), export_params)
        assert guilty(measured) is None
        assert [hop.name for hop, answers in measured if answers] == [
            "torch",
            *(
                f"onnxruntime/cpu/{variant}"
                for variant in ("fp32", "fp16", "int8", "int8_tensorrt")
            ),
        ]
        assert all(hop.rows == 41 for hop, answers in measured if answers)


def test_fp32_agrees_in_every_batch_size(classifier: Project, export_params: Params) -> None:
    measured = run_hops(classifier, classifier.calibrated(), classifier.bundle(), export_params)
    (fp32,) = (hop for hop, _ in measured if hop.name == "onnxruntime/cpu/fp32")
    assert [(check.batch_size, check.rows, check.flipped) for check in fp32.batches] == [
        (size, 41, 0) for size in (1, 2, 7, 32)
    ]
    assert all(
        check.max_difference is not None and check.max_difference <= 1e-5 for check in fp32.batches
    )
    assert fp32.max_difference == max(check.max_difference or 0.0 for check in fp32.batches)
    assert [len(hop.batches) for hop, answers in measured if answers and hop.name != fp32.name] == [
        0,
        1,
        1,
        1,
    ]  # torch has none


def shift_the_mean(network: ImageNetwork) -> Callable[[onnx.ModelProto], None]:
    """Shift the mean that the graph subtracts by two grey levels."""
    mean = network.pixel_mean.detach().numpy()

    def change(model: onnx.ModelProto) -> None:
        found = [
            tensor
            for tensor in model.graph.initializer
            if tensor.dims and list(tensor.dims) == list(mean.shape)
        ]
        (tensor,) = [
            tensor for tensor in found if np.allclose(onnx.numpy_helper.to_array(tensor), mean)
        ]
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(tensor) + np.float32(2.0), tensor.name
            )
        )

    return change


def test_a_wrong_mean_makes_the_fp32_graph_the_first_fault(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    network = classifier.network()
    assert isinstance(network, ImageNetwork)
    bundle = altered(classifier, tmp_path, shift_the_mean(network))
    assert (
        guilty(run_hops(classifier, classifier.calibrated(), bundle, export_params))
        == "onnxruntime/cpu/fp32"
    )


def test_swapped_channels_make_the_fp32_graph_the_first_fault(
    classifier: Project, export_params: Params
) -> None:
    class SwappedNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = classifier.calibrated()

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            answers: tuple[torch.Tensor, torch.Tensor] = self.network(image.flip(3))
            return answers

    assert (
        guilty(run_hops(classifier, SwappedNetwork(), classifier.bundle(), export_params))
        == "onnxruntime/cpu/fp32"
    )


def test_permuted_labels_are_first_reported_for_the_fp32_graph(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    shutil.copytree(classifier.bundle_root, tmp_path / "bundle")
    content = json.loads((tmp_path / "bundle/bundle.json").read_text())
    content["output"]["labels"] = content["output"]["labels"][::-1]
    files.write_json(tmp_path / "bundle/bundle.json", content)
    measured = run_hops(
        classifier, classifier.calibrated(), load_bundle(tmp_path / "bundle"), export_params
    )
    assert guilty(measured) == "onnxruntime/cpu/fp32"
    assert len(measured[1][0].flipped) > 20


def test_other_weights_of_the_same_architecture_make_the_fp32_graph_the_first_fault(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    bundle = altered(classifier, tmp_path, scale_weights(1.001))
    assert (
        guilty(run_hops(classifier, classifier.calibrated(), bundle, export_params))
        == "onnxruntime/cpu/fp32"
    )


@pytest.mark.parametrize("variant", ["fp16", "int8", "int8_tensorrt"])
def test_a_broken_variant_differs_and_fp32_agrees(
    classifier: Project, tmp_path: Path, export_params: Params, variant: str
) -> None:
    def negate_the_answer(model: onnx.ModelProto) -> None:
        softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
        model.graph.node.insert(
            list(model.graph.node).index(softmax),
            onnx.helper.make_node("Neg", [softmax.input[0]], ["negated"]),
        )
        softmax.input[0] = "negated"

    bundle = altered(classifier, tmp_path, negate_the_answer, variant)
    measured = run_hops(classifier, classifier.calibrated(), bundle, export_params)
    assert guilty(measured) == f"onnxruntime/cpu/{variant}"
    certificate = make_certificate(bundle, [hop for hop, _ in measured], {}, [], draft=False)
    with pytest.raises(ParityError, match=f"hop onnxruntime/cpu/{variant} differs from torch"):
        raise_if_refused(certificate, tmp_path)


@pytest.mark.parametrize(
    ("variant", "status"),
    [("int8_tensorrt", "uncertified"), ("fp16", "uncertified"), ("int8", "differs")],
)
def test_a_lossy_variant_is_refused_only_on_the_providers_it_is_meant_for(
    classifier: Project, tmp_path: Path, export_params: Params, variant: str, status: str
) -> None:
    """A graph that predicts the first class for some other rows; int8 is meant for the CPU."""

    def favour_the_first_class(model: onnx.ModelProto) -> None:
        softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
        favour = np.zeros((1, len(classifier.network().spec.classes)), np.float32)
        favour[0, 0] = size
        model.graph.initializer.append(onnx.numpy_helper.from_array(favour, "favour"))
        node = onnx.helper.make_node("Add", [softmax.input[0], "favour"], ["favoured"])
        model.graph.node.insert(list(model.graph.node).index(softmax), node)
        softmax.input[0] = "favoured"

    rows = comparison_of(classifier).rows
    with np.errstate(divide="ignore"):
        logits = np.log(answers_of_fp32(classifier, rows.inputs))
    leads = np.sort(logits.max(axis=1) - logits[:, 0])
    size = float(leads[len(leads) * 2 // 3]) + 0.1
    bundle = altered(classifier, tmp_path, favour_the_first_class, variant)
    measured = run_hops(classifier, classifier.calibrated(), bundle, export_params)
    (hop,) = (hop for hop, _ in measured if hop.name == f"onnxruntime/cpu/{variant}")
    assert 5 < len(hop.flipped) < 21
    assert hop.status == status
    assert f"(verify.max_metric_loss.{variant})" in hop.reason or "one row" in hop.reason
    assert guilty(measured) == (hop.name if status == "differs" else None)


def answers_of_fp32(project: Project, inputs: Any) -> NDArray[np.float32]:
    graph = project.bundle().model_bytes("fp32")
    runner = open_onnx(graph, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
    return np.concatenate(
        [runner.run(np.ascontiguousarray(inputs[row : row + 1])).outputs for row in range(41)]
    )


def test_export_refuses_a_layer_that_overflows_fp16_and_gives_its_name(
    classifier: Project,
) -> None:
    graph, rows = classifier.bundle().model_bytes("fp32"), classifier.split("train").inputs[:]
    fp16_graph(graph, rows)
    model = onnx.load_model_from_string(graph)
    scale_weights(1e6)(model)
    with pytest.raises(ParityError, match="fp16 holds numbers up to 65504, but"):
        fp16_graph(model.SerializeToString(), rows)


def test_an_overflowed_fp16_graph_differs_and_fp32_agrees(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    def overflow(model: onnx.ModelProto) -> None:
        halves = [
            tensor
            for tensor in model.graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT16
        ]
        tensor = max(halves, key=lambda candidate: len(candidate.raw_data))
        with np.errstate(over="ignore"):
            weights = onnx.numpy_helper.to_array(tensor) * np.float16(65504) * np.float16(8)
        assert np.isinf(weights).any()
        tensor.CopyFrom(onnx.numpy_helper.from_array(weights, tensor.name))

    measured = run_hops(
        classifier,
        classifier.calibrated(),
        altered(classifier, tmp_path, overflow, "fp16"),
        export_params,
    )
    assert guilty(measured) == "onnxruntime/cpu/fp16"
    (hop,) = (hop for hop, _ in measured if hop.name == "onnxruntime/cpu/fp16")
    assert hop.metric is None
    assert "are not probabilities" in hop.reason
    assert hop.worst_row


def test_stale_engine_with_a_matching_manifest_differs_by_its_predictions(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    """The manifest fits, but the plan has other weights of the same architecture."""
    bundle = classifier.bundle()
    engine = Execution(backend="tensorrt", provider="tensorrt", precision="fp16", variant="fp16")
    write_engine(
        tmp_path,
        b"plan",
        engine_manifest_for(bundle, b"plan", profile=Profile(smallest=1, optimal=8, largest=32)),
    )
    runner = HopRunner(
        comparison_of(classifier), bundle, classifier.calibrated(), export_params.verify
    )
    right, wrong = (
        FakeEngine(engine, bundle.model_bytes("fp16"), turned) for turned in (False, True)
    )
    assert runner.run_engine(tmp_path, opener=lambda *_: right)[0].status == "agrees"
    hop, _ = runner.run_engine(tmp_path, opener=lambda *_: wrong)
    assert (hop.name, hop.status) == ("tensorrt/fp16", "differs")
    assert "accuracy points lost" in hop.reason
    assert len(hop.flipped) > 20


def test_a_stale_engine_of_the_same_architecture_differs(
    classifier: Project, tmp_path: Path, export_params: Params
) -> None:
    bundle = classifier.bundle()
    runner = HopRunner(
        comparison_of(classifier), bundle, classifier.calibrated(), export_params.verify
    )
    stale = engine_manifest_for(
        bundle, b"plan", model_sha256="0" * 64, profile=Profile(smallest=1, optimal=8, largest=32)
    )
    write_engine(tmp_path / "stale", b"plan", stale)
    hop, _ = runner.run_engine(tmp_path / "stale")
    assert (hop.name, hop.status) == ("tensorrt/fp16", "differs")
    assert "model digest" in hop.reason

    fitting = stale.model_copy(update={"model_sha256": bundle.manifest.models["fp16"].sha256})
    write_engine(tmp_path / "fitting", b"plan", fitting)
    assert (tmp_path / "fitting" / ENGINE_MANIFEST).exists()
    assert runner.run_engine(tmp_path / "fitting")[0].status == "not_executed"  # no GPU here
