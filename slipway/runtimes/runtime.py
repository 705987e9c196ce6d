"""Runs models on ONNX Runtime (CPU, CUDA, its TensorRT provider) and on TensorRT.

One interface, `Runner`, covers all of them. `slipway/stages/verify.py` and the service run models
only through this module. A requested provider is never replaced by another one: it runs, or an
error gives the reason. An engine whose manifest does not match the bundle or the machine is
refused. onnxruntime and tensorrt are imported on first use.
"""

import ctypes
import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import (
    EngineMachine,
    EngineManifest,
    Profile,
    check_machine,
    check_origin,
    read_engine_manifest,
    read_plan,
)
from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.cpu_int8 import weight_bits
from slipway.runtimes.cuda import CudaDevice, describe_gpu
from slipway.runtimes.engine_cache import EngineKey, engine_folder
from slipway.runtimes.memfd import path_or_bytes
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.runtimes.tensorrt import check_precision
from slipway.system.errors import BundleError, EngineError, UnavailableError

NEWEST_FOR_TENSORRT = (3, 12)  # the newest Python that tensorrt-cu13 10.x has wheels for
ONNX_TENSORRT = "onnxruntime_tensorrt"  # ONNX Runtime's TensorRT provider, not TensorRT itself
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_FATAL = 4  # ONNX Runtime's highest severity
_PROVIDER_OPTIONS = {
    "cpu": {},
    "cuda": {
        "use_tf32": "0",  # TF32, the default, keeps 10 of fp32's 23 bits
        # The default, to time every algorithm, starts 4 times slower and is no faster afterwards.
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",  # a quarter less memory
    },
}


class Runner(Protocol):
    """A model that is loaded in a runtime and can run batches."""

    actual: Execution

    def run(self, batch: NDArray[Any]) -> Answers:
        """Map inputs (rows, ...) to float32 outputs (rows, outputs) and OOD scores (rows,)."""
        ...


def run_in_batches(run: Callable[[NDArray[Any]], Answers], rows: Any, batch_size: int) -> Answers:
    """Run all rows of an array or a packed store, in batches of `batch_size`, in order."""
    batches = [
        run(np.ascontiguousarray(rows[start : start + batch_size]))
        for start in range(0, len(rows), batch_size)
    ]
    return Answers(*(np.concatenate(part) for part in zip(*batches, strict=True)))


# Columns of a batch of tokens, at least: torch's exporter fixes a dimension of 1.
MIN_LENGTH = 2
# Sessions with weights of their own in GPU memory. The service needs one for each power of two up
# to its largest batch.
_MOST_SHAPES = 12


class OnnxRunner:
    """An ONNX graph in ONNX Runtime. `run` is thread-safe.

    With `open_another`, which opens one more session, each shape of a batch has a session of its
    own. On CUDA a session plans its convolutions again when a batch has another shape than the one
    before, which takes far longer than the batch. At most `_MOST_SHAPES` sessions stay open.
    """

    def __init__(
        self, session: Any, actual: Execution, open_another: Callable[[], Any] | None = None
    ) -> None:
        self.actual = actual
        self._session = session
        self._input: str = session.get_inputs()[0].name
        self._outputs: list[str] = [session.get_outputs()[0].name, SCORE_NAME]
        # Rows of tokens: without the columns of padding alone, short texts take less time.
        shape = session.get_inputs()[0].shape
        varies_in_length = len(shape) == 2 and not isinstance(shape[1], int)
        self._trims = varies_in_length and open_another is None
        self._open_another = open_another
        self._by_shape: dict[tuple[int, ...], Any] = {}  # the session used last at the end
        self._lock = threading.Lock()

    def run(self, batch: NDArray[Any]) -> Answers:
        if self._trims:
            longest = int(np.count_nonzero(batch.any(axis=0)))
            batch = np.ascontiguousarray(batch[:, : max(MIN_LENGTH, longest)])
        session = self._session_of(batch.shape)
        return Answers(*session.run(self._outputs, {self._input: batch}))

    def _session_of(self, shape: tuple[int, ...]) -> Any:
        if self._open_another is None:
            return self._session
        with self._lock:
            session = self._by_shape.pop(shape, None)
            if session is None:
                session = self._open_another() if self._by_shape else self._session
                if len(self._by_shape) == _MOST_SHAPES:
                    del self._by_shape[next(iter(self._by_shape))]
            self._by_shape[shape] = session
        return session


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


def why_unavailable(provider: str) -> str | None:
    """Return the reason why `provider` cannot run on this machine; None if it can.

    "cpu", "cuda" and "onnxruntime_tensorrt" belong to ONNX Runtime; "tensorrt" runs an engine.
    """
    onnxruntime = import_onnxruntime()

    if provider == "tensorrt":
        return why_no_cuda_driver() or _why_no_tensorrt()
    if provider == ONNX_TENSORRT:
        return why_no_cuda_driver() or _why_no_tensorrt() or _why_no_tensorrt_provider()
    if provider not in _PROVIDERS:
        known = ", ".join([*_PROVIDERS, "tensorrt", ONNX_TENSORRT])
        return f"unknown provider {provider!r}, expected one of {known}"
    if _PROVIDERS[provider] not in onnxruntime.get_available_providers():
        return f"this build of onnxruntime has no {_PROVIDERS[provider]}; install onnxruntime-gpu"
    # Available providers are compiled in; the driver decides whether one can load.
    return why_no_cuda_driver() if provider == "cuda" else None


def open_onnx(
    model: bytes, *, variant: str, precision: str, provider: str, num_threads: int
) -> OnnxRunner:
    """Load a graph from its verified bytes.

    `num_threads` 0 uses every core. Raises UnavailableError if `provider` cannot run, BundleError
    for a bad graph.
    """
    onnxruntime = import_onnxruntime()

    if provider not in _PROVIDERS:
        raise UnavailableError(
            f"ONNX Runtime has no provider {provider!r}, it has {', '.join(_PROVIDERS)}."
        )
    _require(provider)
    if provider == "cuda":
        onnxruntime.preload_dlls()  # finds CUDA libraries installed as wheels
        # cuDNN's search reports each plan that it cannot use as an error. Real ones are raised.
        onnxruntime.set_default_logger_severity(_FATAL)
    # Nodes without a CUDA kernel may run on the CPU; the session as a whole may not.
    names: list[Any] = [(_PROVIDERS[provider], _PROVIDER_OPTIONS[provider])]
    if provider != "cpu":
        names.append(_PROVIDERS["cpu"])
    open_session = partial(
        _open_session, model, names, num_threads, f"the {variant} graph on {provider}"
    )
    return OnnxRunner(
        open_session(),
        Execution(backend="onnxruntime", provider=provider, precision=precision, variant=variant),
        open_session if provider == "cuda" and has_convolutions(model) else None,
    )


def has_convolutions(model: bytes) -> bool:
    """Search the bytes of a graph for convolutions: the service has no package `onnx` to read it.

    A NodeProto stores its operator as field 4, the length, the name (onnx.proto).
    """
    return b'"\x04Conv' in model or b'"\x0dConvTranspose' in model


def open_onnx_tensorrt(
    bundle: LoadedBundle, variant: str, profile: Profile, cache: Path, num_threads: int
) -> OnnxRunner:
    """Load a graph in ONNX Runtime's TensorRT provider, with its engine from `cache`.

    Builds a missing engine, which takes minutes. Raises UnavailableError if the provider cannot run
    this variant here, EngineError or IntegrityError for a cached engine of another model or
    machine.
    """
    onnxruntime = import_onnxruntime()

    entry = bundle.manifest.models[variant]
    if entry.precision == "fp32":
        raise UnavailableError(
            "ONNX Runtime's TensorRT provider computes fp32 in TF32 and has no option against it; "
            "compile an engine."
        )
    if "tensorrt" not in entry.meant_for:
        raise UnavailableError(
            f"variant {variant!r} is not meant for TensorRT, but for {', '.join(entry.meant_for)}."
        )
    model = bundle.model_bytes(variant)
    _require(ONNX_TENSORRT)
    machine = this_machine().model_dump(include={"tensorrt_version", "gpu", "compute_capability"})
    key = EngineKey(
        model_sha256=entry.sha256,
        precision=entry.precision,
        profile=profile,
        onnxruntime_version=onnxruntime.__version__,
        **machine,
    )
    with engine_folder(cache / key.folder, key) as folder:
        names: list[Any] = [("TensorrtExecutionProvider", _tensorrt_options(bundle, key, folder))]
        names += [("CUDAExecutionProvider", _PROVIDER_OPTIONS["cuda"]), "CPUExecutionProvider"]
        session = _open_session(
            model, names, num_threads, f"the {variant} graph on {ONNX_TENSORRT}"
        )
        runner = OnnxRunner(
            session,
            Execution(
                backend="onnxruntime",
                provider="tensorrt",
                precision=entry.precision,
                variant=variant,
            ),
        )
        contract = bundle.manifest.input
        runner.run(np.zeros((profile.smallest, *contract.shape), contract.dtype))  # builds
    return runner


def _tensorrt_options(bundle: LoadedBundle, key: EngineKey, folder: Path) -> dict[str, str]:
    """Return provider options without a precision flag, so that the graph's types decide.

    See microsoft/onnxruntime#18707.
    """
    row = "x".join(str(size) for size in bundle.manifest.input.shape)
    shapes = {"min": key.profile.smallest, "opt": key.profile.optimal, "max": key.profile.largest}
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        # Otherwise two models of one architecture share a name.
        "trt_engine_cache_prefix": key.model_sha256[:32],
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
    } | {
        f"trt_profile_{name}_shapes": f"{bundle.manifest.input_name}:{size}x{row}"
        for name, size in shapes.items()
    }


def session_options(num_threads: int) -> dict[str, str]:
    """Return the session options that differ from the defaults, by ONNX Runtime's names.

    With equal options, the same package and the same processor, a batch gives the same bits. With
    `num_threads` 0, ONNX Runtime chooses the number.
    """
    options = {
        "intra_op_num_threads": str(num_threads),
        "session.intra_op.allow_spinning": "0",  # frees the cores
    }
    if weight_bits() == 7:  # int8 sums would saturate; with VNNI it would only cost speed
        options["session.x64quantprecision"] = "1"
    return options


def describe_session(num_threads: int) -> str:
    """Return the options of a session as text. Equal texts mean comparable sessions."""
    return ", ".join(f"{name}={value}" for name, value in session_options(num_threads).items())


def _open_session(model: bytes, providers: list[Any], num_threads: int, what: str) -> Any:
    """Open a session on the first of `providers`.

    Raises UnavailableError if it uses another one.
    """
    onnxruntime = import_onnxruntime()

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, value in session_options(num_threads).items():
        if name == "intra_op_num_threads":
            options.intra_op_num_threads = int(value)
        else:
            options.add_session_config_entry(name, value)
    # TensorRT's provider would name its engines after a file.
    source = path_or_bytes(model) if providers[0][0] == _PROVIDERS["cpu"] else nullcontext(model)
    try:
        with source as given:
            session = onnxruntime.InferenceSession(given, sess_options=options, providers=providers)
    except Exception as error:
        raise BundleError(f"ONNX Runtime cannot load {what}: {error}") from error
    found, wanted = session.get_providers()[0], providers[0][0]
    if found != wanted:
        raise UnavailableError(
            f"{wanted} was requested for {what}, but ONNX Runtime chose {found}. "
            "Check the CUDA and cuDNN libraries."
        )
    return session


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


def this_machine() -> EngineMachine:
    """Return this machine's GPU, CUDA and TensorRT. Raises UnavailableError if one is missing."""
    _require("tensorrt")
    import tensorrt

    return EngineMachine(tensorrt_version=tensorrt.__version__, **describe_gpu())


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


def _require(provider: str) -> None:
    reason = why_unavailable(provider)
    if reason:
        raise UnavailableError(
            f"provider {provider!r} was requested and cannot run here: {reason}."
        )


def _why_no_tensorrt() -> str | None:
    if sys.version_info[:2] > NEWEST_FOR_TENSORRT and not importlib.util.find_spec("tensorrt"):
        newest, here = (
            ".".join(map(str, version)) for version in (NEWEST_FOR_TENSORRT, sys.version_info[:2])
        )
        return f"TensorRT has no package for Python {here}; use Python {newest}"
    for module in ("tensorrt", "cuda.bindings.runtime"):
        try:
            importlib.import_module(module)
        except Exception as error:  # a wheel without its libraries raises whatever it likes
            return (
                f"the Python package {module} cannot be imported ({error}); "
                "install it with `pip install 'slipway-ml[gpu]'`"
            )
    return None


def _why_no_tensorrt_provider() -> str | None:
    onnxruntime = import_onnxruntime()

    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        return "this build of onnxruntime has no TensorRT provider; install onnxruntime-gpu"
    try:
        ctypes.CDLL("libnvinfer.so.10")  # linked by the provider, loaded by the package tensorrt
    except OSError:
        return (
            "onnxruntime-gpu needs TensorRT 10 (libnvinfer.so.10); "
            "install it with `pip install 'slipway-ml[gpu]'`"
        )
    return None


def why_no_cuda_driver() -> str | None:
    """Return the reason why this process has no usable NVIDIA GPU; None if it has one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 is not there)"
    count = ctypes.c_int(0)
    if (
        driver.cuInit(0) != 0
        or driver.cuDeviceGetCount(ctypes.byref(count)) != 0
        or count.value == 0
    ):
        return "the NVIDIA driver finds no GPU"
    return None
