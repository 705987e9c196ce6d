"""Builds TensorRT engines from ONNX by the strongly typed API, for TensorRT 10.13+ and 11.

The graph alone decides the precision: no builder flag lowers it, and TF32, TensorRT's default for
fp32, is off. The actual precision is read back from the engine. The build runs in its own process,
so a crash inside TensorRT becomes an error message. Refused: a graph that the parser rejects or of
another precision than requested, and an older TensorRT.
"""

import importlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from slipway.artifacts.engine_manifest import Profile
from slipway.system.errors import EngineError
from slipway.system.parent_death import end_with

OLDEST = (10, 13)  # the first release for CUDA 13, as the `gpu` extra requires
_PRECISIONS = ["fp4", "int4", "fp8", "int8", "bf16", "fp16", "fp32"]  # lowest precision first
_DATA_TYPES = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "INT4": "int4",
    "FP4": "fp4",
}
# The inspector also writes "Row major linear FP16 format".
_INSPECTED = _DATA_TYPES | {"FP32": "fp32", "FP16": "fp16", "BFLOAT16": "bf16"}
_CONVOLUTIONS = ("Convolution", "Deconvolution")  # as the inspector writes them
_WORD = re.compile(rf"\b({'|'.join(_INSPECTED)})\b", re.IGNORECASE)


@dataclass(frozen=True)
class BuildRequest:
    """An ONNX graph, and the settings for building an engine from it."""

    model: bytes
    input_name: str
    row_shape: tuple[int, ...]  # height, width, channels of an image; the width of a table's row
    precision: str  # precision of the graph: "fp32", "fp16", "int8"
    profile: Profile
    workspace_bytes: int
    timing_cache: bytes = b""
    compute_capability: str | None = None  # "SM86": for a GPU elsewhere; only tensorrt_rtx can


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine, its precision, and timings that speed up the next build."""

    plan: bytes
    timing_cache: bytes
    precision: str
    precision_read_from: Literal["engine", "network"]  # engines hide types inside fused layers


def build_engine(trt: Any, request: BuildRequest) -> BuiltEngine:
    """Build an engine with the module `trt` (`tensorrt`, or `tensorrt_rtx` as a check).

    Raises EngineError with the parser's or builder's message.
    """
    _check_version(trt)
    logger = _collecting_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(request.model):
        problems = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise EngineError(
            f"TensorRT {trt.__version__} does not accept the graph: {problems}. "
            "Choose another compile.variant or export.opset."
        )
    precision = network_precision(network)
    if precision != request.precision:
        raise EngineError(
            f"the graph is of precision {precision}, {request.precision} was requested. "
            "Run `dvc repro export`."
        )
    config = _configure(trt, builder, request)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(
            f"TensorRT {trt.__version__} built no engine: {_last(logger.problems)} "
            "Try a larger compile.workspace_mib."
        )
    cache = config.get_timing_cache()
    return BuiltEngine(
        plan=bytes(plan),
        timing_cache=bytes(cache.serialize()) if cache else b"",
        precision=precision,
        precision_read_from="network"
        if request.compute_capability
        else _read_back(trt, logger, plan, precision),
    )


def build_engine_apart(module: str, request: BuildRequest) -> BuiltEngine:
    """Run `build_engine` in a child process. Raises EngineError also if the child crashes."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(
        target=_build_and_send, args=(sending, module, request, os.getpid()), daemon=True
    )
    child.start()
    sending.close()
    try:
        answer = receiving.recv()
    except EOFError:
        answer = None
    child.join()
    if answer is None:
        raise EngineError(
            f"the process that builds the engine {_ending(child.exitcode)}. Its output is above."
        )
    if isinstance(answer, str):
        raise EngineError(answer)
    engine: BuiltEngine = answer
    return engine


def network_precision(network: Any) -> str:
    """Return the lowest precision of any layer output of a network, such as "fp16".

    An engine built from a strongly typed network computes in the network's precisions.
    """
    layers = (network.get_layer(index) for index in range(network.num_layers))
    kinds = (
        layer.get_output(index).dtype.name for layer in layers for index in range(layer.num_outputs)
    )
    return _lowest(_DATA_TYPES[kind] for kind in kinds if kind in _DATA_TYPES) or "fp32"


def engine_precision(trt: Any, engine: Any) -> tuple[str | None, bool]:
    """Read an engine's precision from TensorRT's inspector.

    Returns the lowest precision that it shows (None if it shows none), and True if it shows the
    types of the convolutions' weights. Only with these is the result certain: the inspector hides
    tensors inside fused layers, and the types of tensors with dynamic shapes.
    """
    shown = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    content = json.loads(shown)
    layers = [layer for layer in content.get("Layers", []) if isinstance(layer, dict)]
    convolutions = [layer for layer in layers if layer.get("ParameterType") in _CONVOLUTIONS]
    of_weights = _precisions(_values([one.get("Weights") for one in convolutions], "Type"))
    of_tensors = _precisions(_values(content, "Format/Datatype"))
    return _lowest([*of_weights, *of_tensors]), bool(of_weights)


def check_precision(trt: Any, engine: Any, expected: str) -> Literal["engine", "network"]:
    """Raise EngineError if the engine computes in another precision than `expected`.

    Returns the source of the evidence: "engine" if the inspector shows the precision, "network" if
    it only follows from the strongly typed network.
    """
    found, is_shown = engine_precision(trt, engine)
    is_lower = found is not None and _PRECISIONS.index(found) < _PRECISIONS.index(expected)
    if is_lower or (is_shown and found != expected):
        raise EngineError(
            f"the engine computes in {found}, {expected} was requested. "
            "Compile it again, or choose another compile.variant."
        )
    return "engine" if found == expected else "network"


def _read_back(trt: Any, logger: Any, plan: Any, precision: str) -> Literal["engine", "network"]:
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"TensorRT {trt.__version__} cannot load the engine it has just built: "
            f"{_last(logger.problems)}"
        )
    return check_precision(trt, engine, precision)


def _precisions(texts: Iterable[str]) -> list[str]:
    return [_INSPECTED[word.upper()] for text in texts for word in _WORD.findall(text)]


def _lowest(precisions: Iterable[str]) -> str | None:
    return min(precisions, key=_PRECISIONS.index, default=None)


def _values(content: Any, name: str) -> Iterator[str]:
    """Yield the value of each key `name` as text, at any depth of JSON `content`."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == name:
                yield str(value)
            else:
                yield from _values(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _values(value, name)


def _build_and_send(sending: Connection, module: str, request: BuildRequest, parent: int) -> None:
    end_with(parent)  # a build without its parent is useless
    try:
        sending.send(build_engine(importlib.import_module(module), request))
    except (EngineError, ImportError) as error:
        sending.send(str(error))


def _check_version(trt: Any) -> None:
    found = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if trt.__name__ == "tensorrt" and found < OLDEST:
        raise EngineError(
            f"TensorRT {trt.__version__} is installed, expected at least {OLDEST[0]}.{OLDEST[1]}. "
            "Run `pip install 'slipway-ml[gpu]'`."
        )


def _configure(trt: Any, builder: Any, request: BuildRequest) -> Any:
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # without it, types are hidden
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace_bytes)
    _restore_timings(config, request.timing_cache)
    batches = (request.profile.smallest, request.profile.optimal, request.profile.largest)
    profile = builder.create_optimization_profile()
    profile.set_shape(request.input_name, *((batch, *request.row_shape) for batch in batches))
    config.add_optimization_profile(profile)
    if request.compute_capability:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, request.compute_capability), 0)
    return config


def _restore_timings(config: Any, saved: bytes) -> None:
    """Load the timings of earlier builds, unless another GPU or TensorRT measured them."""
    cache = config.create_timing_cache(saved)
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _collecting_logger(trt: Any) -> Any:
    """Create a TensorRT logger that collects error messages, for use in an exception."""

    class CollectingLogger(trt.ILogger):  # type: ignore[misc]  # the module is an argument
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.problems: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.problems.append(message)

    return CollectingLogger()


def _last(problems: list[str]) -> str:
    return f"{problems[-1].strip().rstrip('.')}." if problems else "it gave no reason."


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
