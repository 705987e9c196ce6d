"""Adds GPU metrics to the service if the machine has an NVIDIA GPU.

Utilization, memory and temperature come from NVIDIA's management library (NVML). Without a driver
there are no series, no work and no error. NVML needs no CUDA context, so sampling costs the model
nothing. Figures that a GPU does not provide (a MIG slice has no utilization) are omitted.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from slipway.serving.extension import Extension, Hooks
from slipway.serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")

MAX_GPUS = 8  # four series each; a machine with more shows its first eight
GAUGES = {
    "slipway_gpu_utilization_ratio": "Fraction of the last sample period with a running kernel.",
    "slipway_gpu_memory_used_bytes": "Memory in use, by every process on the GPU.",
    "slipway_gpu_memory_total_bytes": "Memory of the GPU.",
    "slipway_gpu_temperature_celsius": "Temperature of the GPU's die.",
}
LOST = math.nan  # figure of a GPU that no longer answers, in place of its last good figures


class GpuMetrics:
    """Gauges of every GPU, labelled with its NVML index. `nvml` is the module pynvml or a fake."""

    def __init__(self, registry: CollectorRegistry, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] = {}
        self._num_gpus = min(nvml.nvmlDeviceGetCount(), MAX_GPUS)
        self._last: dict[int, dict[str, float]] = {}
        self._silent: set[int] = set()  # lost GPUs that were logged
        self._gauges = {
            # Every worker sees the same GPUs: the newest figure counts, not a sum.
            name: Gauge(name, text, ["gpu"], multiprocess_mode="livemostrecent", registry=registry)
            for name, text in GAUGES.items()
        }

    def sample(self) -> None:
        """Update the gauges of every GPU; those of a GPU that does not respond become NaN.

        Such a GPU is logged once.
        """
        for index in range(self._num_gpus):
            try:
                figures = self._read(index)
                self._silent.discard(index)
            except self._nvml.NVMLError as error:
                self._handles.pop(index, None)
                figures = dict.fromkeys(self._last.get(index, {}), LOST)
                if index not in self._silent:
                    logger.error("GPU %d does not answer: %s; its figures are NaN", index, error)
                self._silent.add(index)
            self._last[index] = figures
            for name, figure in figures.items():
                self._gauges[name].labels(str(index)).set(figure)

    def status(self) -> dict[str, Any]:
        """Return the last sample as a list of GPUs. Figures of a lost GPU are null."""
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
        if index not in self._handles:
            self._handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        handle = self._handles[index]
        memory = self._optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilization = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        temperature = self._optional(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        figures: dict[str, float] = {}
        if utilization is not None:
            figures["slipway_gpu_utilization_ratio"] = utilization.gpu / 100  # NVML returns percent
        if memory is not None:
            figures |= {
                "slipway_gpu_memory_used_bytes": float(memory.used),
                "slipway_gpu_memory_total_bytes": float(memory.total),
            }
        if temperature is not None:
            figures["slipway_gpu_temperature_celsius"] = float(temperature)
        return figures

    def _optional(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise


def open_gpu_metrics(registry: CollectorRegistry, nvml: Any = None) -> GpuMetrics | None:
    """Create the gauges in `registry`. Returns None if there is no NVIDIA driver or no GPU."""
    nvml = nvml or _bindings()
    try:
        nvml.nvmlInit()
        return GpuMetrics(registry, nvml) if nvml.nvmlDeviceGetCount() else None
    except nvml.NVMLError as error:
        logger.debug("no GPU metrics: %s", error)
        return None


def _bindings() -> Any:
    """Import NVIDIA's Python bindings, which load the driver only when nvmlInit is called."""
    import pynvml

    return pynvml


def _attach(worker: ModelWorker) -> Hooks:
    gpus = open_gpu_metrics(worker.metrics.registry)
    if gpus is None:
        return Hooks(status={"gpu": lambda: None})
    return Hooks(status={"gpu": gpus.status}, gauges=(gpus,))


EXTENSION = Extension("gpu", _attach)
