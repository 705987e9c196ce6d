"""Export from torch to ONNX, with networks small enough to export in seconds."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.artifacts.bundle import OutputContract
from slipway.export.graphs.graph import check_graph, describe_graph, export_graph, prove_parity
from slipway.inputs.images import ImageContract
from slipway.runtimes.runtime import open_onnx
from slipway.system.errors import BundleError, ParityError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from tests.calibrations import calibrated
from tests.export.conftest import Project

pytestmark = pytest.mark.process

CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=3,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10**6,
)
PROBABILITIES = OutputContract(kind="probabilities", labels=["a", "b", "c"])
VALUE = OutputContract(kind="value", labels=[])


class TinyNetwork(nn.Module):
    """A network of one convolution, with the same first operations as the real networks."""

    mean: Tensor

    def __init__(self, num_outputs: int = 3, mean: float = 127.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, num_outputs)
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, image: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, K)"""
        pixels = (image.to(torch.float32).permute(0, 3, 1, 2) - self.mean) / 64
        answer: Tensor = self.head(self.convolution(pixels).relu().mean(dim=(2, 3)))
        return answer


class BranchingNetwork(TinyNetwork):
    """A network whose control flow depends on the pixels, so it cannot be one graph."""

    def forward(self, image: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, K)"""
        answer = super().forward(image)
        return answer if answer.mean() > 0 else -answer


class BatchNetwork(TinyNetwork):
    """A network that can be traced and exported, but only runs batches of two rows."""

    def forward(self, image: Tensor) -> Tensor:
        """(2, H, W, C) uint8 -> (2, K)"""
        return super().forward(image) + torch.arange(2.0)[:, None]


def pictures(num_rows: int = 20) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (num_rows, *CONTRACT.shape), dtype=np.uint8)


def tiny(
    num_outputs: int = 3, mean: float = 127.0, temperature: float | None = 2.0
) -> CalibratedNetwork:
    """Return a tiny network, calibrated on its features of the pictures."""
    network = TinyNetwork(num_outputs)
    whole = calibrated(network, pictures(), temperature)
    network.mean.fill_(mean)
    return whole


@pytest.fixture(scope="module")
def graph() -> bytes:
    return export_graph(tiny(), CONTRACT, PROBABILITIES, opset=18, max_batch_size=33)


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_torch_and_the_exported_graph_agree_at_every_batch_size(
    classifier: Project, regressor: Project, size: int
) -> None:
    for project in (classifier, regressor):
        bundle = project.bundle()
        difference = prove_parity(
            project.calibrated(),
            bundle.model_bytes("fp32"),
            project.split("test").inputs,
            batch_sizes=[size],
            max_difference=1e-5,
        )
        assert difference < 1e-5


def test_a_graph_with_another_normalisation_is_refused_with_the_batch_size(graph: bytes) -> None:
    prove_parity(tiny(), graph, pictures(), batch_sizes=[7], max_difference=1e-5)
    with pytest.raises(ParityError, match=r"differ by \S+ at batch size 7"):
        prove_parity(tiny(mean=120.0), graph, pictures(), batch_sizes=[7], max_difference=1e-5)


def test_export_refuses_a_network_that_returns_nan(graph: bytes) -> None:
    with pytest.raises(ParityError, match="differ by nan"):
        prove_parity(
            tiny(mean=float("nan")), graph, pictures(), batch_sizes=[2], max_difference=1e-5
        )


def test_export_refuses_a_network_that_cannot_be_traced_as_one_graph() -> None:
    with pytest.raises(
        BundleError, match="torch cannot export this network for batches of 1 to 16"
    ):
        export_graph(
            calibrated(BranchingNetwork(), pictures()),
            CONTRACT,
            PROBABILITIES,
            opset=18,
            max_batch_size=16,
        )


def test_export_refuses_a_network_that_fails_on_a_batch_and_gives_its_size() -> None:
    network = calibrated(BatchNetwork(), pictures(2))
    graph = export_graph(network, CONTRACT, PROBABILITIES, opset=18, max_batch_size=16)
    with pytest.raises(ParityError, match="cannot run a batch of 7"):
        prove_parity(network, graph, pictures(), batch_sizes=[2, 7], max_difference=1e-5)


@pytest.mark.parametrize(
    ("max_batch_size", "output"), [(1, PROBABILITIES), (2, PROBABILITIES), (2, VALUE)]
)
def test_export_works_for_the_smallest_values_of_max_batch_size(
    max_batch_size: int, output: OutputContract
) -> None:
    network = tiny(
        num_outputs=max(len(output.labels), 1), temperature=2.0 if output.labels else None
    )
    graph = export_graph(network, CONTRACT, output, opset=18, max_batch_size=max_batch_size)
    check_graph(graph, CONTRACT, output)
    prove_parity(network, graph, pictures(), batch_sizes=[1, max_batch_size], max_difference=1e-5)


def test_the_graph_begins_with_a_cast_and_ends_with_softmax(graph: bytes) -> None:
    operations = [
        node.op_type
        for node in onnx.load_model_from_string(graph).graph.node
        if node.op_type != "Constant"
    ]
    assert operations[0] == "Cast"
    assert [
        node.op_type
        for node in onnx.load_model_from_string(graph).graph.node
        if "probabilities" in node.output
    ] == ["Softmax"]
    assert operations.count("Cast") == 1


def test_a_repeated_export_has_equal_bytes_without_traces_of_the_machine(
    graph: bytes, root: Path
) -> None:
    assert export_graph(tiny(), CONTRACT, PROBABILITIES, opset=18, max_batch_size=33) == graph
    assert str(root).encode() not in graph
    assert b"test_graph.py" not in graph


def test_graph_metadata_contains_variant_task_and_labels(graph: bytes) -> None:
    described = describe_graph(
        graph,
        variant="fp32",
        task="image_classification",
        contract=CONTRACT,
        output=PROBABILITIES,
        weights_sha256="ab",
    )
    facts = {
        entry.key: entry.value for entry in onnx.load_model_from_string(described).metadata_props
    }
    assert facts["labels"] == '["a", "b", "c"]'
    assert facts["weights_sha256"] == "ab"
    assert ImageContract.model_validate_json(facts["input"]) == CONTRACT
    open_onnx(described, variant="fp32", precision="fp32", provider="cpu", num_threads=1)


def test_check_graph_refuses_a_graph_of_another_signature_than_declared(graph: bytes) -> None:
    check_graph(graph, CONTRACT, PROBABILITIES)
    for contract, output in [
        (CONTRACT.model_copy(update={"channels": 1}), PROBABILITIES),
        (CONTRACT, OutputContract(kind="probabilities", labels=["a", "b"])),
        (CONTRACT, VALUE),
    ]:
        with pytest.raises(BundleError, match="inputs and outputs"):
            check_graph(graph, contract, output)


def test_a_graph_with_external_weights_is_refused(graph: bytes) -> None:
    model = onnx.load_model_from_string(graph)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    with pytest.raises(BundleError, match="second file"):
        check_graph(model.SerializeToString(), CONTRACT, PROBABILITIES)


def test_a_graph_that_the_checker_rejects_is_refused(graph: bytes) -> None:
    model = onnx.load_model_from_string(graph)
    model.graph.node[-1].op_type = "NoSuchOperation"
    with pytest.raises(BundleError, match="the ONNX checker refuses"):
        check_graph(model.SerializeToString(), CONTRACT, PROBABILITIES)
