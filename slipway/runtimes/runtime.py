"""Runs models on ONNX Runtime: on the CPU, on CUDA and by its TensorRT provider.

`Runner` is the interface of every loaded model; `engine_runner` implements it for TensorRT itself.
`slipway/stages/verify.py` and the service run models only through these two modules. A requested
provider is never replaced by another one: it runs, or an error gives the reason. onnxruntime and
tensorrt are imported on first use.
"""

import ctypes
import importlib
import importlib.util
import sys
import threading
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
    Profile,
)
from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.cpu_int8 import weight_bits
from slipway.runtimes.cuda import describe_gpu
from slipway.runtimes.engine_cache import EngineKey, engine_folder
from slipway.runtimes.memfd import path_or_bytes
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system.errors import BundleError, UnavailableError

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


def this_machine() -> EngineMachine:
    """Return this machine's GPU, CUDA and TensorRT. Raises UnavailableError if one is missing."""
    _require("tensorrt")
    import tensorrt

    return EngineMachine(tensorrt_version=tensorrt.__version__, **describe_gpu())


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
