"""A `tensorrt` without a GPU: its engine is the ONNX graph itself, run by ONNX Runtime on the CPU.

It has the part of TensorRT's interface that Slipway calls. The variable FAKE_TENSORRT makes it
misbehave in any process: `crash` or `kill` while it builds, `slow`, or engines whose answers are
`wrong` or `nan`.
"""

import enum
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from slipway.runtimes import engine_runner, rebuild, runtime

__version__ = "10.16.1"
GPU = {
    "gpu": "Pretended H200",
    "compute_capability": "9.0",
    "cuda_version": "13.0",
    "driver_version": "580.95.05",
    "driver_cuda_version": "13.0",
}
MEMORY: dict[int, NDArray[np.uint8]] = {}  # of the simulated GPU, by address
STREAM = 77


def pretend(change: Callable[[Any, str, Any], None]) -> None:
    """Simulate a GPU with TensorRT in this process.

    `change(object, name, value)` is `setattr`, or pytest's `monkeypatch.setattr`.
    """

    def why_unavailable(provider: str) -> str | None:
        return (
            None
            if provider in ("cpu", "tensorrt")
            else f"no {provider} beside the pretended TensorRT"
        )

    change(runtime, "why_unavailable", why_unavailable)
    change(rebuild, "why_unavailable", why_unavailable)
    change(engine_runner, "CudaDevice", Device)
    change(runtime, "describe_gpu", lambda: dict(GPU))
    sys.modules["tensorrt"] = sys.modules[__name__]


class Device:
    """Replaces `slipway.runtimes.cuda.CudaDevice`; the stream's work is done at once."""

    stream = STREAM

    def allocate(self, num_bytes: int) -> int:
        address = 1000 * (len(MEMORY) + 1)
        MEMORY[address] = np.zeros(num_bytes, dtype=np.uint8)
        return address

    def free(self, addresses: list[int]) -> None:
        for address in addresses:
            MEMORY[address] = np.zeros(0, dtype=np.uint8)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        MEMORY[address][: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, address: int, array: NDArray[np.float32]) -> None:
        array[...] = MEMORY[address][: array.nbytes].view(np.float32).reshape(array.shape)

    def wait(self) -> None:
        pass


class DataType(enum.Enum):
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    INT32 = 6
    INT64 = 7
    BOOL = 9
    HALF = 10


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


BuilderFlag = enum.Enum("BuilderFlag", ["TF32"])
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", ["DETAILED"])
MemoryPoolType = enum.Enum("MemoryPoolType", ["WORKSPACE"])
LayerInformationFormat = enum.Enum("LayerInformationFormat", ["JSON"])


class ILogger:
    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING"])


class Logger(ILogger):
    ERROR = ILogger.Severity.ERROR

    def __init__(self, severity: Any) -> None:
        pass


class Layer:
    """A layer with one output; it is its own output."""

    num_outputs = 1

    def __init__(self, dtype: DataType) -> None:
        self.dtype = dtype

    def get_output(self, index: int) -> "Layer":
        return self


class Network:
    def __init__(self) -> None:
        self.model = b""

    @property
    def dtypes(self) -> list[DataType]:
        graph = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(self.model)).graph
        kinds = {value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.output]}
        return [DataType(kind) for kind in sorted(kinds)]

    @property
    def num_layers(self) -> int:
        return len(self.dtypes)

    def get_layer(self, index: int) -> Layer:
        return Layer(self.dtypes[index])


class OnnxParser:
    num_errors = 1

    def __init__(self, network: Network, logger: Any) -> None:
        self._network = network

    def parse(self, model: bytes) -> bool:
        self._network.model = model
        return bool(model)

    def get_error(self, index: int) -> str:
        return "no graph"


class Cache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"|timed"


class Profile:
    def __init__(self) -> None:
        self.shapes: tuple[Any, ...] = ()

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes = shapes


class Config:
    def __init__(self) -> None:
        self.profiling_verbosity: Any = None
        self.profile = Profile()
        self._cache = Cache(b"")

    def clear_flag(self, flag: Any) -> None:
        pass

    def set_memory_pool_limit(self, pool: Any, num_bytes: int) -> None:
        pass

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profile = profile

    def create_timing_cache(self, content: bytes) -> Cache:
        return Cache(content)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> Cache:
        return self._cache


class Builder:
    def __init__(self, logger: Any) -> None:
        pass

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes:
        mood = os.environ.get("FAKE_TENSORRT", "")
        if mood == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if mood == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # ended with its parent long before
        if mood == "slow":
            time.sleep(1)
        header = {
            "profile": config.profile.shapes,
            "mood": mood,
            "dtypes": [kind.name for kind in network.dtypes],
        }
        return json.dumps(header).encode() + b"\0" + network.model


class Runtime:
    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, plan: bytes) -> "Engine | None":
        header, found, model = bytes(plan).partition(b"\0")
        return Engine(json.loads(header), model) if found else None


class Engine:
    def __init__(self, header: dict[str, Any], model: bytes) -> None:
        self.header = header
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.tensors = {
            tensor.name: tensor
            for tensor in [*self.session.get_inputs(), *self.session.get_outputs()]
        }
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        names: list[str] = list(self.tensors)
        return names[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return {"tensor(uint8)": DataType.UINT8, "tensor(float)": DataType.FLOAT}[
            self.tensors[name].type
        ]

    def get_tensor_profile_shape(self, name: str, index: int) -> list[Any]:
        return list(self.header["profile"])

    def create_engine_inspector(self) -> "Engine":
        return self

    def get_engine_information(self, form: Any) -> str:
        names = {"FLOAT": "Row major linear FP32", "HALF": "Half", "INT8": "Int8", "UINT8": "UInt8"}
        outputs = [
            {"Name": "x", "Format/Datatype": names.get(kind, kind)}
            for kind in self.header["dtypes"]
        ]
        return json.dumps(
            {"Layers": [{"Name": "all", "Outputs": outputs}], "Bindings": list(self.tensors)}
        )

    def create_execution_context(self) -> "Context":
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._addresses: dict[str, int] = {}
        self._shape: tuple[int, ...] = ()

    def set_tensor_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shape = shape
        return True

    def execute_async_v3(self, stream: int) -> bool:
        (taken,) = self._engine.session.get_inputs()
        dtype = np.dtype({"tensor(uint8)": np.uint8, "tensor(float)": np.float32}[taken.type])
        num_bytes = int(np.prod(self._shape)) * dtype.itemsize
        batch = MEMORY[self._addresses[taken.name]][:num_bytes].view(dtype).reshape(self._shape)
        answers = self._engine.session.run(None, {taken.name: batch})
        for output, answer in zip(self._engine.session.get_outputs(), answers, strict=True):
            spoiled = np.ascontiguousarray(_spoil(answer, self._engine.header["mood"]))
            MEMORY[self._addresses[output.name]][: spoiled.nbytes] = spoiled.reshape(-1).view(
                np.uint8
            )
        return stream == STREAM


def _spoil(answer: NDArray[np.float32], mood: str) -> NDArray[np.float32]:
    if mood == "wrong" and answer.ndim == 2:
        return np.roll(answer, 1, axis=1)
    if mood == "nan":
        answer[-1:] = np.nan
    return answer
