import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from slipway.artifacts.certificate import Execution
from slipway.runtimes.runtime import (
    NEWEST_FOR_TENSORRT,
    OnnxRunner,
    _why_no_tensorrt,
    has_convolutions,
    open_onnx,
    this_machine,
    why_unavailable,
)
from slipway.system.errors import UnavailableError


def test_error_names_the_unknown_provider() -> None:
    assert why_unavailable("cpu") is None
    assert "unknown provider 'tpu'" in str(why_unavailable("tpu"))
    with pytest.raises(UnavailableError, match="'tensorrt', it has cpu, cuda"):
        open_onnx(b"", variant="fp32", precision="fp32", provider="tensorrt", num_threads=1)


class FakeSession:
    """A fake session of ONNX Runtime that records the shapes it receives."""

    def __init__(self, shape: list[int | str]) -> None:
        self.shape = shape
        self.shapes: set[tuple[int, ...]] = set()

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="image", shape=self.shape)]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="probabilities")]

    def run(self, names: list[str], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        self.shapes.add(feeds["image"].shape)
        return [feeds["image"], feeds["image"][:, 0]]


def runner_of_fakes(
    shape: list[int | str], *, per_shape: bool
) -> tuple[OnnxRunner, list[FakeSession]]:
    opened = [FakeSession(shape)]

    def open_another() -> FakeSession:
        opened.append(FakeSession(shape))
        return opened[-1]

    actual = Execution(backend="onnxruntime", provider="cuda", precision="fp32", variant="fp32")
    return OnnxRunner(opened[0], actual, open_another if per_shape else None), opened


def test_each_shape_of_a_batch_has_its_own_session_where_a_session_plans_for_one_shape() -> None:
    runner, opened = runner_of_fakes(["rows", 4], per_shape=True)
    for num_rows in (1, 8, 2, 8, 1, 2):
        assert runner.run(np.ones((num_rows, 4), np.uint8)).outputs.shape == (num_rows, 4)
    assert [session.shapes for session in opened] == [{(1, 4)}, {(8, 4)}, {(2, 4)}]
    one, opened = runner_of_fakes(["rows", 4], per_shape=False)
    for num_rows in (1, 8):
        one.run(np.ones((num_rows, 4), np.uint8))
    assert [session.shapes for session in opened] == [{(1, 4), (8, 4)}]


def test_the_session_used_longest_ago_is_closed_when_there_are_twelve() -> None:
    runner, opened = runner_of_fakes(["rows", 4], per_shape=True)
    for num_rows in (*range(1, 13), 1, 13, 1, 2):
        runner.run(np.ones((num_rows, 4), np.uint8))
    assert len(opened) == 14, "13 took the place of 2, not of 1"
    assert opened[13].shapes == {(2, 4)}


def test_texts_keep_their_padding_where_a_session_plans_for_one_shape() -> None:
    short = np.array([[7, 7, 7, 0, 0, 0]], np.int64)
    for per_shape, length in ((True, 6), (False, 3)):
        runner, opened = runner_of_fakes(["rows", "length"], per_shape=per_shape)
        runner.run(short)
        assert opened[0].shapes == {(1, length)}


def convolution(operator: str, name: str = "image") -> bytes:
    """Return an ONNX graph of images (rows, 3, 32, 32) with two layers of `operator`."""
    weights = np.random.default_rng(0).normal(0, 0.2, (2, 3, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node(operator, [name, "first"], ["between"], pads=[1, 1, 1, 1]),
        helper.make_node(operator, ["between", "second"], ["after"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["after"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["probabilities"]),
        helper.make_node("ReduceMax", ["probabilities"], ["ood_score"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, 1, ["rows", 3, 32, 32])],
        [
            helper.make_tensor_value_info("probabilities", 1, ["rows", 3]),
            helper.make_tensor_value_info("ood_score", 1, ["rows"]),
        ],
        [
            numpy_helper.from_array(weight, name)
            for weight, name in zip(weights, ("first", "second"), strict=True)
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return content


def test_convolutions_are_found_in_the_bytes_of_a_graph() -> None:
    assert has_convolutions(convolution("Conv"))
    assert has_convolutions(convolution("ConvTranspose"))
    assert not has_convolutions(convolution("MaxPool", name="Conv"))


NO_CUDA_HERE = why_unavailable("cuda")


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA_HERE is not None, reason=str(NO_CUDA_HERE))
def test_batches_of_changing_size_are_as_quick_on_a_gpu_as_batches_of_one_size() -> None:
    graph = convolution("Conv")
    on_cpu, on_gpu = (
        open_onnx(graph, variant="fp32", precision="fp32", provider=provider, num_threads=1)
        for provider in ("cpu", "cuda")
    )
    generator = np.random.default_rng(1)
    batches = [generator.random((size, 3, 32, 32), np.float32) for size in (1, 8, 32)]
    for batch in batches:
        assert np.abs(on_gpu.run(batch).outputs - on_cpu.run(batch).outputs).max() < 1e-5

    def median_seconds(ordered: list[NDArray[np.float32]]) -> float:
        times = []
        for batch in ordered:
            begin = time.perf_counter()
            on_gpu.run(batch)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    of_one_size = statistics.mean(median_seconds([batch] * 30) for batch in batches)
    assert median_seconds(batches * 30) < 3 * of_one_size  # 100 times with a single session


NO_ENGINE_HERE = why_unavailable("tensorrt")


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(NO_ENGINE_HERE is not None, reason=str(NO_ENGINE_HERE))
def test_this_machine_names_its_gpu_and_versions() -> None:
    machine = this_machine()
    assert machine.gpu
    assert float(machine.compute_capability) >= 7.5
    assert int(machine.tensorrt_version.split(".")[0]) >= 10


@pytest.mark.skipif(
    sys.version_info[:2] <= NEWEST_FOR_TENSORRT, reason="TensorRT has packages for this Python"
)
def test_tensorrt_is_refused_on_a_python_version_without_its_package() -> None:
    assert "TensorRT has no package for Python 3.1" in str(_why_no_tensorrt())
