"""A fake of the module `pynvml` with simulated GPUs, for the calls that the service makes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

GIB = 1 << 30


@dataclass
class Gpu:
    """A simulated GPU; `failing` maps calls that raise to the error numbers of NVML."""

    used: int = 3 * GIB
    total: int = 80 * GIB
    utilization: int = 25  # percent
    temperature: int = 61
    failing: dict[str, int] = field(default_factory=dict)

    def asked(self, call: str) -> None:
        if call in self.failing:
            raise pynvml.NVMLError(self.failing[call])


class FakeNvml:
    """A fake of NVML for `gpus`; `init` is the error number if it cannot start."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *gpus: Gpu, init: int | None = None) -> None:
        self.gpus = gpus
        self._init = init

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name, as all below
        if self._init is not None:
            raise pynvml.NVMLError(self._init)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        self.gpus[index].asked("handle")
        return self.gpus[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        gpu.asked("memory")
        return SimpleNamespace(used=gpu.used, total=gpu.total)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        gpu.asked("utilization")
        return SimpleNamespace(gpu=gpu.utilization, memory=0)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        gpu.asked("temperature")
        return gpu.temperature
