from pathlib import Path

import pytest

from slipway.runtimes.cuda import CudaDevice, call_cuda, driver_version
from slipway.runtimes.runtime import why_unavailable
from slipway.system.errors import EngineError


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


def test_the_driver_version_comes_from_nvml_or_the_kernel_module(tmp_path: Path) -> None:
    module = tmp_path / "version"
    assert driver_version("no_such_library.so.1", module) == "unknown"
    module.write_text("580.95.05\n")
    assert driver_version("no_such_library.so.1", module) == "580.95.05"
    assert driver_version("libc.so.6", module) == "580.95.05"  # a library that is not NVML
