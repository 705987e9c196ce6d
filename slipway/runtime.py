"""The one seam array-in, array-out: ONNX Runtime and TensorRT behind the same call.

`stages/verify.py` and the service run models through here and nowhere else. What was asked for is
what runs: a provider that cannot load is refused with its reason, never replaced. onnxruntime and
tensorrt are imported when they are used.
"""

import ctypes
import ctypes.util
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipway.certificate import Execution
from slipway.errors import BundleError, UnavailableError

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Runner(Protocol):
    """A model that is loaded and answers."""

    actual: Execution

    def run(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(rows, height, width, channels) uint8 in [0, 255] to (rows, outputs) float32."""
        ...


class OnnxRunner:
    """A graph in ONNX Runtime. `run` may be called from several threads."""

    def __init__(self, session: Any, actual: Execution) -> None:
        self.actual = actual
        self._session = session
        self._input: str = session.get_inputs()[0].name
        self._outputs: list[str] = [session.get_outputs()[0].name]

    def run(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(rows, height, width, channels) uint8 in [0, 255] to (rows, outputs) float32."""
        answer: NDArray[np.float32] = self._session.run(self._outputs, {self._input: batch})[0]
        return answer


def why_unavailable(provider: str) -> str | None:
    """Why ONNX Runtime cannot run on `provider` ("cpu" or "cuda") here, or None if it can."""
    import onnxruntime

    if provider not in _PROVIDERS:
        return f"unknown provider {provider!r}, expected one of {', '.join(_PROVIDERS)}"
    if _PROVIDERS[provider] not in onnxruntime.get_available_providers():
        return f"this build of onnxruntime has no {_PROVIDERS[provider]}; install onnxruntime-gpu"
    # The list above names what was compiled in, not what can load: the driver decides.
    return _why_no_cuda_driver() if provider == "cuda" else None


def open_onnx(model: bytes, *, variant: str, precision: str, provider: str, num_threads: int) -> OnnxRunner:
    """Load a graph from its verified bytes. UnavailableError if `provider` cannot run, BundleError if the graph is bad.

    `num_threads` 0 lets ONNX Runtime take every core.
    """
    import onnxruntime

    reason = why_unavailable(provider)
    if reason:
        raise UnavailableError(f"provider {provider!r} was asked for and cannot run here: {reason}.")
    if provider == "cuda":
        onnxruntime.preload_dlls()  # finds the CUDA libraries that came as wheels
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leaves the cores to the server
    wanted = _PROVIDERS[provider]
    # Nodes that CUDA lacks may run on the CPU inside the session; the session as a whole may not move there.
    names = [wanted] if provider == "cpu" else [wanted, _PROVIDERS["cpu"]]
    try:
        session = onnxruntime.InferenceSession(model, sess_options=options, providers=names)
    except Exception as error:
        raise BundleError(f"ONNX Runtime cannot load the {variant} graph on {provider}: {error}") from error
    found = session.get_providers()[0]
    if found != wanted:
        raise UnavailableError(f"provider {provider!r} was asked for, but ONNX Runtime chose {found}. Check the CUDA and cuDNN libraries.")
    return OnnxRunner(session, Execution(backend="onnxruntime", provider=provider, precision=precision, variant=variant))


def _why_no_cuda_driver() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 is not there)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    return None
