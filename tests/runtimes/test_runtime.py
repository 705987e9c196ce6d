import statistics
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import write_engine
from slipway.runtimes.cuda import CudaDevice, call_cuda, driver_version
from slipway.runtimes.runtime import (
    NEWEST_FOR_TENSORRT,
    EngineRunner,
    OnnxRunner,
    _why_no_tensorrt,
    has_convolutions,
    open_engine,
    open_onnx,
    this_machine,
    why_unavailable,
)
from slipway.system.errors import EngineError, UnavailableError
from tests.packed_tables import fit_contract
from tests.small_bundle import CONTRACT, LABELS, engine_manifest_for, write_small_bundle


class FakeDevice:
    """Fake GPU memory: a dict of arrays, in which queued work is done at once."""

    stream = 77

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.freed: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        address = 1000 * (len(self.memory) + 1)
        self.memory[address] = np.zeros(num_bytes, dtype=np.uint8)
        return address

    def free(self, addresses: list[int]) -> None:
        self.freed += addresses

    def upload(self, address: int, array: NDArray[Any]) -> None:
        self.memory[address][: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, address: int, array: NDArray[np.float32]) -> None:
        array[...] = self.memory[address][: array.nbytes].view(np.float32).reshape(array.shape)

    def wait(self) -> None:
        pass


class FakeContext:
    """A fake engine context that predicts the mean pixel of each row in the fake memory."""

    def __init__(self, device: FakeDevice, runs: bool = True) -> None:
        self.device, self.runs = device, runs
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()
        self.busy = threading.Lock()

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "image"
        self.shape = shape
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == self.device.stream
        assert self.busy.acquire(blocking=False), "two threads at once"
        size = int(np.prod(self.shape))
        rows = self.device.memory[self.addresses["image"]][:size].reshape(self.shape[0], -1)
        answer = np.repeat(rows.mean(axis=1, dtype=np.float32)[:, None], len(LABELS), axis=1)
        self.device.upload(self.addresses["probabilities"], np.ascontiguousarray(answer))
        self.device.upload(self.addresses["ood_score"], rows.max(axis=1).astype(np.float32))
        self.busy.release()
        return self.runs


class FakeEngine:
    def __init__(self, context: FakeContext | None) -> None:
        self._context = context

    def create_execution_context(self) -> FakeContext | None:
        return self._context


def make_runner(tmp_path: Path, runs: bool = True) -> tuple[EngineRunner, FakeDevice]:
    bundle, device = write_small_bundle(tmp_path), FakeDevice()
    return EngineRunner(
        FakeEngine(FakeContext(device, runs)), bundle, engine_manifest_for(bundle, b"plan"), device
    ), device


def pictures(num_rows: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (num_rows, *CONTRACT.shape), dtype=np.uint8)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_engine_runs_every_batch_size_of_its_profile(tmp_path: Path, num_rows: int) -> None:
    runner, _ = make_runner(tmp_path)
    batch = pictures(num_rows)
    outputs, scores = runner.run(batch)
    assert outputs.shape == (num_rows, len(LABELS))
    assert np.allclose(outputs[:, 0], batch.reshape(num_rows, -1).mean(axis=1))
    assert scores.tolist() == batch.reshape(num_rows, -1).max(axis=1).tolist()


@pytest.mark.parametrize("num_rows", [0, 9])
def test_an_engine_refuses_batches_outside_its_profile(tmp_path: Path, num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"the batch has {num_rows} rows, expected 1 to 8"):
        make_runner(tmp_path)[0].run(pictures(num_rows))


def test_engine_refuses_a_batch_of_another_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the batch is float32, expected uint8"):
        make_runner(tmp_path)[0].run(pictures(2).astype(np.float32))


def test_engine_for_a_table_allocates_four_bytes_per_number(tmp_path: Path) -> None:
    contract = fit_contract({"size": [1.0, 2.0], "place": ["a", "b"]})
    bundle, device = write_small_bundle(tmp_path, contract=contract), FakeDevice()
    EngineRunner(
        FakeEngine(FakeContext(device)), bundle, engine_manifest_for(bundle, b"plan"), device
    )
    assert [len(memory) for memory in device.memory.values()] == [
        8 * 2 * 4,
        8 * len(LABELS) * 4,
        8 * 4,
    ]


def test_engine_accepts_a_batch_that_is_not_contiguous(tmp_path: Path) -> None:
    batch = pictures(8)[::2]
    assert np.allclose(
        make_runner(tmp_path)[0].run(batch).outputs[:, 0], batch.reshape(4, -1).mean(axis=1)
    )


def test_threads_share_an_engine_in_turn_and_get_their_own_predictions(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    batches = [np.full((2, *CONTRACT.shape), value, dtype=np.uint8) for value in range(16)]
    answers: dict[int, NDArray[np.float32]] = {}

    def ask(value: int) -> None:
        for _ in range(20):
            answers[value] = runner.run(batches[value]).outputs

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(answers[value][0, 0]) for value in range(16)] == list(range(16))


def test_failed_engine_execution_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not run a batch"):
        make_runner(tmp_path, runs=False)[0].run(pictures(2))


def test_an_engine_without_an_execution_context_is_refused(tmp_path: Path) -> None:
    bundle = write_small_bundle(tmp_path)
    with pytest.raises(EngineError, match="GPU memory is too small"):
        EngineRunner(FakeEngine(None), bundle, engine_manifest_for(bundle, b"plan"), FakeDevice())


def test_a_deleted_runner_frees_its_device_memory(tmp_path: Path) -> None:
    runner, device = make_runner(tmp_path)
    del runner
    assert sorted(device.freed) == sorted(device.memory)


def test_error_message_contains_the_cuda_error() -> None:
    class Cuda:
        @staticmethod
        def cudaMalloc(num_bytes: int) -> tuple[int, int]:  # noqa: N802  # CUDA's own name
            return (0, 4096) if num_bytes < 100 else (2, 0)

    assert call_cuda(Cuda, "cudaMalloc", 10) == 4096
    with pytest.raises(EngineError, match="cudaMalloc failed with 2"):
        call_cuda(Cuda, "cudaMalloc", 1000)


@pytest.mark.skipif(why_unavailable("cuda") is None, reason="there is a GPU")
def test_error_without_a_gpu_contains_the_message_of_cuda() -> None:
    pytest.importorskip("cuda.bindings", reason="requirements.cpu.lock leaves CUDA's packages out")
    with pytest.raises(EngineError, match=r"cudaStreamCreate failed with cudaError\w+"):
        CudaDevice()


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


@pytest.mark.skipif(NO_ENGINE_HERE is None, reason="there is a GPU with TensorRT")
def test_without_a_gpu_an_engine_is_refused_and_never_replaced(tmp_path: Path) -> None:
    bundle = write_small_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", b"plan", engine_manifest_for(bundle, b"plan"))
    with pytest.raises(UnavailableError, match="'tensorrt' was requested and cannot run here"):
        open_engine(tmp_path / "engine", bundle)


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(NO_ENGINE_HERE is not None, reason=str(NO_ENGINE_HERE))
def test_this_machine_names_its_gpu_and_versions() -> None:
    machine = this_machine()
    assert machine.gpu
    assert float(machine.compute_capability) >= 7.5
    assert int(machine.tensorrt_version.split(".")[0]) >= 10


def test_the_driver_version_comes_from_nvml_or_the_kernel_module(tmp_path: Path) -> None:
    module = tmp_path / "version"
    assert driver_version("no_such_library.so.1", module) == "unknown"
    module.write_text("580.95.05\n")
    assert driver_version("no_such_library.so.1", module) == "580.95.05"
    assert driver_version("libc.so.6", module) == "580.95.05"  # a library that is not NVML


@pytest.mark.skipif(
    sys.version_info[:2] <= NEWEST_FOR_TENSORRT, reason="TensorRT has packages for this Python"
)
def test_tensorrt_is_refused_on_a_python_version_without_its_package() -> None:
    assert "TensorRT has no package for Python 3.1" in str(_why_no_tensorrt())
