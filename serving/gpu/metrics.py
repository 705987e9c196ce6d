"""How the GPUs fare: utilisation, memory and temperature, through NVIDIA's management library (NVML).

Where there is no driver there is nothing: no series, no thread's work, no error. NVML needs no CUDA context, so asking costs the model
nothing. What a GPU does not tell (a MIG slice has no utilisation, say) is not shown.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

logger = logging.getLogger("bentoml.slipway")

MAX_GPUS = (
    8  # each is four series of a worker's bounded number; a machine with more shows its first eight
)
GAUGES = {
    "slipway_gpu_utilization_ratio": "Share of the last sample period in which a kernel ran, 0 to 1.",
    "slipway_gpu_memory_used_bytes": "Memory in use, by every process on the GPU.",
    "slipway_gpu_memory_total_bytes": "Memory of the GPU.",
    "slipway_gpu_temperature_celsius": "Temperature of the GPU's die.",
}
LOST = math.nan  # Prometheus compares it with nothing, so that a GPU that no longer answers never shows its last good figures


class GpuMetrics:
    """Gauges of every GPU, by NVML's index. `nvml` is the module `pynvml`, or what acts like it."""

    def __init__(self, registry: CollectorRegistry, nvml: Any) -> None:
        self._nvml = nvml
        self._known: dict[int, Any] = {}  # handles, by index
        self._num_gpus = min(nvml.nvmlDeviceGetCount(), MAX_GPUS)
        self._last: dict[int, dict[str, float]] = {}
        self._silent: set[int] = set()  # whose loss the log has
        self._gauges = {
            # Every worker sees the same GPUs: the newest figure counts, not a sum.
            name: Gauge(name, text, ["gpu"], multiprocess_mode="livemostrecent", registry=registry)
            for name, text in GAUGES.items()
        }

    def sample(self) -> None:
        """Read every GPU once. One that does not answer is shown as NaN until it does; the log says so once."""
        for index in range(self._num_gpus):
            try:
                figures = self._read(index)
                self._silent.discard(index)
            except self._nvml.NVMLError as error:
                self._known.pop(index, None)
                figures = dict.fromkeys(self._last.get(index, {}), LOST)
                if index not in self._silent:
                    logger.error("GPU %d does not answer: %s", index, error)
                self._silent.add(index)
            self._last[index] = figures
            for name, figure in figures.items():
                self._gauges[name].labels(str(index)).set(figure)

    def status(self) -> dict[str, Any]:
        """The last sample, for people: a list of GPUs with their figures; null for what one no longer tells."""
        gpus = [
            {"gpu": str(index)}
            | {
                name.removeprefix("slipway_gpu_"): None if math.isnan(figure) else figure
                for name, figure in figures.items()
            }
            for index, figures in sorted(self._last.items())
        ]
        return {"gpus": gpus}

    def _read(self, index: int) -> dict[str, float]:
        nvml = self._nvml
        if index not in self._known:
            self._known[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        handle = self._known[index]
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilization = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        temperature = self._told(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        figures: dict[str, float] = {}
        if utilization is not None:
            figures["slipway_gpu_utilization_ratio"] = (
                utilization.gpu / 100
            )  # NVML gives whole percent
        if memory is not None:
            figures |= {
                "slipway_gpu_memory_used_bytes": float(memory.used),
                "slipway_gpu_memory_total_bytes": float(memory.total),
            }
        if temperature is not None:
            figures["slipway_gpu_temperature_celsius"] = float(temperature)
        return figures

    def _told(self, ask: Callable[[], Any]) -> Any:
        """The answer, or None where this GPU has none to give."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise


def open_gpu_metrics(registry: CollectorRegistry, nvml: Any = None) -> GpuMetrics | None:
    """The GPUs' gauges, or None where there is no NVIDIA driver, or no GPU."""
    nvml = nvml or _bindings()
    try:
        nvml.nvmlInit()
        return GpuMetrics(registry, nvml) if nvml.nvmlDeviceGetCount() else None
    except nvml.NVMLError as error:
        logger.debug("no GPU is watched: %s", error)
        return None


def _bindings() -> Any:
    """NVIDIA's own bindings, which BentoML brings along. They load the driver's library only when asked to."""
    import pynvml

    return pynvml
