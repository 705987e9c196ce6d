"""Runs TensorRT engines on a GPU.

An engine whose manifest does not match the bundle or the machine is refused.
"""

import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, LoadedBundle
from slipway.artifacts.engine_manifest import (
    EngineManifest,
    check_machine,
    check_origin,
    read_engine_manifest,
    read_plan,
)
from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.cuda import CudaDevice
from slipway.runtimes.runtime import this_machine
from slipway.runtimes.tensorrt import check_precision
from slipway.system.errors import EngineError


class Device(Protocol):
    """GPU memory and a stream for an engine: implemented by `CudaDevice`, or by a fake in tests."""

    stream: int

    def allocate(self, num_bytes: int) -> int: ...
    def free(self, addresses: list[int]) -> None: ...
    def upload(self, address: int, array: NDArray[Any]) -> None: ...
    def download(self, address: int, array: NDArray[np.float32]) -> None: ...
    def wait(self) -> None: ...


class EngineRunner:
    """A TensorRT engine with memory for its largest batch. Calls of `run` are serialised."""

    def __init__(
        self, engine: Any, bundle: LoadedBundle, engine_manifest: EngineManifest, device: Device
    ) -> None:
        manifest = bundle.manifest
        self.actual = engine_manifest.actual
        self._names = _tensor_names(bundle)
        self._engine = engine  # must outlive the context
        self._context = engine.create_execution_context()
        if self._context is None:
            raise EngineError(
                "TensorRT created no execution context: GPU memory is too small. "
                "Free some, or lower export.max_batch_size."
            )
        self._device = device
        self._largest = engine_manifest.profile.largest
        self._columns = max(len(manifest.output.labels), 1)
        self._dtype = np.dtype(manifest.input.dtype)
        row_bytes = int(np.prod(manifest.input.shape)) * self._dtype.itemsize
        number = np.dtype(np.float32).itemsize
        self._addresses = [
            device.allocate(self._largest * size)
            for size in (row_bytes, self._columns * number, number)
        ]
        for name, address in zip(self._names, self._addresses, strict=True):
            self._context.set_tensor_address(name, address)
        self._lock = threading.Lock()
        # At exit the driver frees all memory.
        weakref.finalize(self, device.free, self._addresses).atexit = False

    def run(self, batch: NDArray[Any]) -> Answers:
        if not 1 <= len(batch) <= self._largest:
            raise ValueError(f"the batch has {len(batch)} rows, expected 1 to {self._largest}")
        if batch.dtype != self._dtype:  # its bytes would be misread
            raise ValueError(f"the batch is {batch.dtype}, expected {self._dtype}")
        answers = Answers(
            np.empty((len(batch), self._columns), dtype=np.float32),
            np.empty(len(batch), dtype=np.float32),
        )
        with self._lock:
            self._device.upload(self._addresses[0], np.ascontiguousarray(batch))
            if not self._context.set_input_shape(
                self._names[0], batch.shape
            ) or not self._context.execute_async_v3(self._device.stream):
                raise EngineError(
                    f"TensorRT did not run a batch of shape {batch.shape}. "
                    "Compile the engine again (dvc repro --force compile)."
                )
            for address, answer in zip(self._addresses[1:], answers, strict=True):
                self._device.download(address, answer)
            self._device.wait()
        return answers


def open_engine(root: Path, bundle: LoadedBundle, certified: str | None = None) -> EngineRunner:
    """Load the engine in `root` for this bundle; `certified` is the digest of its manifest.

    Raises UnavailableError without an engine, GPU or TensorRT, EngineError if the manifest does not
    fit the bundle's graph, this TensorRT or this GPU, IntegrityError if a file was altered or
    replaced.
    """
    engine_manifest = read_engine_manifest(root, certified)
    check_origin(engine_manifest, bundle)
    plan = read_plan(root, engine_manifest)
    check_machine(engine_manifest, this_machine())
    import tensorrt

    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"TensorRT {tensorrt.__version__} cannot load the engine in {root}. "
            "Run `dvc repro --force compile`."
        )
    takes = {
        np.uint8: tensorrt.DataType.UINT8,
        np.float32: tensorrt.DataType.FLOAT,
        np.int32: tensorrt.DataType.INT32,
    }[bundle.manifest.input.dtype]
    _check_tensors(engine, bundle, (takes, tensorrt.DataType.FLOAT, tensorrt.DataType.FLOAT))
    _check_profile(engine, bundle, engine_manifest)
    check_precision(tensorrt, engine, engine_manifest.actual.precision)
    return EngineRunner(engine, bundle, engine_manifest, CudaDevice())


def _tensor_names(bundle: LoadedBundle) -> tuple[str, str, str]:
    return bundle.manifest.input_name, bundle.manifest.output_name, SCORE_NAME


def _check_tensors(engine: Any, bundle: LoadedBundle, kinds: tuple[Any, Any, Any]) -> None:
    names = _tensor_names(bundle)
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if found != set(names):
        raise EngineError(
            f"the engine has the tensors {sorted(found)}, expected {sorted(names)}. "
            "Run `dvc repro --force compile`."
        )
    for name, kind in zip(names, kinds, strict=True):
        if engine.get_tensor_dtype(name) != kind:
            raise EngineError(
                f"the engine's tensor {name!r} is {engine.get_tensor_dtype(name)}, "
                f"expected {kind}. Compile it again."
            )


def _check_profile(engine: Any, bundle: LoadedBundle, engine_manifest: EngineManifest) -> None:
    profile = engine_manifest.profile
    expected = [
        (size, *bundle.manifest.input.shape)
        for size in (profile.smallest, profile.optimal, profile.largest)
    ]
    found = [
        tuple(shape) for shape in engine.get_tensor_profile_shape(bundle.manifest.input_name, 0)
    ]
    if found != expected:
        raise EngineError(
            f"the engine's profile is {found}, its manifest says {expected}. "
            "Run `dvc repro --force compile`."
        )
