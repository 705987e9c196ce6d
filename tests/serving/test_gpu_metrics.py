"""GPU metrics through NVML: a simulated GPU in this process, a simulated driver for the service."""

import logging
import re
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from slipway.serving.gpu.extension import GAUGES, MAX_GPUS, GpuMetrics, open_gpu_metrics
from tests import plain_http
from tests.serving.fake_nvml import GIB, FakeNvml, Gpu
from tests.serving.server import running


def opened(*gpus: Gpu) -> tuple[GpuMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    metrics = open_gpu_metrics(registry, FakeNvml(*gpus))
    assert metrics
    metrics.sample()
    return metrics, registry


def shown(registry: CollectorRegistry, name: str, gpu: int = 0) -> float | None:
    return registry.get_sample_value(f"slipway_gpu_{name}", {"gpu": str(gpu)})


def test_each_gpu_has_its_own_metric_values() -> None:
    _, registry = opened(Gpu(), Gpu(used=GIB, utilization=100, temperature=84))
    assert shown(registry, "memory_used_bytes") == 3 * GIB
    assert shown(registry, "memory_total_bytes", 1) == 80 * GIB
    assert shown(registry, "utilization_ratio") == 0.25
    assert (shown(registry, "utilization_ratio", 1), shown(registry, "temperature_celsius", 1)) == (
        1.0,
        84.0,
    )


def test_new_gpu_sample_replaces_the_previous_values() -> None:
    gpu = Gpu()
    metrics, registry = opened(gpu)
    gpu.used, gpu.temperature = 7 * GIB, 90
    metrics.sample()
    assert (shown(registry, "memory_used_bytes"), shown(registry, "temperature_celsius")) == (
        7 * GIB,
        90,
    )
    assert metrics.status()["gpus"][0]["memory_used_bytes"] == 7 * GIB


@pytest.mark.parametrize(
    "reason",
    [
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_UNKNOWN,
    ],
)
def test_without_a_driver_there_are_no_gpu_metrics(reason: int) -> None:
    registry = CollectorRegistry()
    assert open_gpu_metrics(registry, FakeNvml(Gpu(), init=reason)) is None
    assert generate_latest(registry) == b""


def test_a_driver_without_a_gpu_adds_no_metrics() -> None:
    registry = CollectorRegistry()
    assert open_gpu_metrics(registry, FakeNvml()) is None
    assert generate_latest(registry) == b""


def test_unsupported_gpu_figures_have_no_series_and_the_others_do() -> None:
    _, registry = opened(Gpu(failing={"utilization": pynvml.NVML_ERROR_NOT_SUPPORTED}), Gpu())
    assert shown(registry, "utilization_ratio") is None
    assert shown(registry, "utilization_ratio", 1) == 0.25
    assert shown(registry, "memory_used_bytes") == 3 * GIB


def test_gauges_of_a_lost_gpu_are_nan_until_it_responds_and_it_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = Gpu()
    metrics, registry = opened(gpu, Gpu())
    gpu.failing = {"memory": pynvml.NVML_ERROR_GPU_IS_LOST, "handle": pynvml.NVML_ERROR_GPU_IS_LOST}
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            metrics.sample()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "GPU 0 does not answer"
    ]
    lost = shown(registry, "memory_used_bytes")
    assert lost is not None
    assert lost != lost  # NaN
    assert shown(registry, "memory_used_bytes", 1) == 3 * GIB
    assert metrics.status()["gpus"][0] == {"gpu": "0"} | dict.fromkeys(
        [name.removeprefix("slipway_gpu_") for name in GAUGES]
    )
    gpu.failing = {}
    metrics.sample()
    assert shown(registry, "memory_used_bytes") == 3 * GIB


def test_the_number_of_gpu_series_is_limited() -> None:
    _, registry = opened(*[Gpu()] * (MAX_GPUS + 3))
    assert len(
        re.findall(rb"^slipway_gpu_", generate_latest(registry), re.MULTILINE)
    ) == MAX_GPUS * len(GAUGES)


DRIVER = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
  unsigned int version; unsigned long long total, reserved, free, used;
} memory_v2_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  *device = (void *)0x51; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
  memory->total = 1000; memory->used = 250; memory->free = 750;
  return device == (void *)0x51 ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
  rates->gpu = 50; rates->memory = 1; return 0;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *temperature) {
  *temperature = 66; return 0;
}
"""


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler for a pretended driver's library"
)
def test_metrics_of_two_workers_contain_the_gpu_once(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the real bindings and a library with the driver's name that simulates a GPU."""
    (certified / "driver").mkdir()
    (certified / "driver/nvml.c").write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"],
        cwd=certified / "driver",
        check=True,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(certified / "driver"))
    with running(certified, workers=2) as server:
        server.wait()
        text = plain_http.get(server.url + "/metrics").text
    figures = dict(re.findall(r'^slipway_gpu_(\w+)\{gpu="0"\} (\S+)$', text, re.MULTILINE))
    assert {name: float(value) for name, value in figures.items()} == {
        "utilization_ratio": 0.5,
        "memory_used_bytes": 250,
        "memory_total_bytes": 1000,
        "temperature_celsius": 66,
    }
