"""Memory and a stream on the first NVIDIA GPU, without torch, for TensorRT engines.

A thin layer over NVIDIA's `cuda-bindings`, imported when used. CUDA errors become EngineErrors.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.system.errors import EngineError


class CudaDevice:
    """A CUDA stream on GPU 0, and the memory that is allocated for it."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._cuda = runtime
        self._stream = self._call("cudaStreamCreate")
        self.stream = int(self._stream)

    def allocate(self, num_bytes: int) -> int:
        """Allocate bytes on the GPU and return their address."""
        return int(self._call("cudaMalloc", num_bytes))

    def free(self, addresses: list[int]) -> None:
        for address in addresses:
            self._call("cudaFree", address)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Queue a copy of a contiguous array to the GPU memory at `address`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self._stream)

    def download(self, address: int, array: NDArray[np.float32]) -> None:
        """Queue a copy from the GPU memory at `address` to a contiguous array.

        The array has its values after `wait`.
        """
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self._stream)

    def wait(self) -> None:
        """Wait until all queued work of the stream is done."""
        self._call("cudaStreamSynchronize", self._stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        return call_cuda(self._cuda, function, *arguments)


def call_cuda(cuda: Any, function: str, *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.runtime`. Raises EngineError that names a CUDA error."""
    error, *values = getattr(cuda, function)(*arguments)
    if int(error) != 0:
        raise EngineError(
            f"{function} failed with {getattr(error, 'name', error)}. "
            "Check with nvidia-smi that the GPU is free and healthy."
        )
    return values[0] if values else None


def describe_gpu() -> dict[str, str]:
    """Return facts about GPU 0: name, compute capability, versions of CUDA runtime and driver."""
    from cuda.bindings import runtime

    properties = call_cuda(runtime, "cudaGetDeviceProperties", 0)
    return {
        "gpu": bytes(properties.name).split(b"\0")[0].decode(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda_version": _version(call_cuda(runtime, "cudaRuntimeGetVersion")),
        "driver_version": driver_version(),
        "driver_cuda_version": _version(call_cuda(runtime, "cudaDriverGetVersion")),
    }


def driver_version(
    library: str = "libnvidia-ml.so.1", module: Path = Path("/sys/module/nvidia/version")
) -> str:
    """Return the NVIDIA driver's version ("580.95.05") from NVML or its kernel module."""
    try:
        nvml = ctypes.CDLL(library)
        text = ctypes.create_string_buffer(96)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    return module.read_text().strip() if module.exists() else "unknown"


def _version(number: int) -> str:
    """Format CUDA's version number: 13050 becomes "13.5"."""
    return f"{number // 1000}.{number % 1000 // 10}"
