"""The gauges of a worker's memory, and the thread that samples them."""

import logging
import mmap
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from slipway.serving.metrics.gauges import (
    ProcessMetrics,
    Sampler,
    memory_limit_bytes,
    resident_bytes,
)
from tests import plain_http
from tests.serving.server import Server, running

MACHINE = "MemTotal:       16384 kB\nMemFree:        1 kB\n"


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("memory.max", "4096000\n", 4096000),
        ("memory.max", "max\n", 16 << 20),
        ("memory/memory.limit_in_bytes", "8192\n", 8192),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 16 << 20),
        (None, "", 16 << 20),
    ],
)
def test_the_memory_limit_is_that_of_the_container_or_of_the_machine(
    tmp_path: Path, file: str | None, content: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(MACHINE)
    (tmp_path / "memory").mkdir()
    if file:
        (tmp_path / file).write_text(content)
    assert memory_limit_bytes(tmp_path, tmp_path / "meminfo") == expected


def test_memory_gauge_rises_with_allocated_memory() -> None:
    registry = CollectorRegistry()
    metrics = ProcessMetrics(registry, num_workers=3, started=1e9)
    before = registry.get_sample_value("slipway_memory_bytes") or 0
    size = 64 << 20
    with mmap.mmap(-1, size) as taken:
        for _ in range(
            size >> 16
        ):  # at once would need the same in bytes, and malloc may keep these
            taken.write(b"\1" * (1 << 16))
        metrics.sample()
        assert (registry.get_sample_value("slipway_memory_bytes") or 0) - before == pytest.approx(
            size, rel=0.5
        )
    assert registry.get_sample_value("slipway_workers") == 3
    assert registry.get_sample_value("slipway_start_time_seconds") == 1e9
    assert (registry.get_sample_value("slipway_memory_limit_bytes") or 0) > resident_bytes()


class MetricsSource:
    """A source of gauges that raises on the samples whose numbers are in `failing`."""

    def __init__(self, *failing: int) -> None:
        self.num_samples = 0
        self.enough = threading.Event()
        self._failing = failing

    def sample(self) -> None:
        self.num_samples += 1
        if self.num_samples >= 5:
            self.enough.set()
        if self.num_samples in self._failing:
            raise OSError("no such device")


def test_failing_gauge_source_is_counted_logged_once_and_affects_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, healthy, failures = MetricsSource(1, 2, 3), MetricsSource(), []
    with caplog.at_level(logging.ERROR):
        sampler = Sampler([failing, healthy], lambda: failures.append(1), seconds=0.01)
        assert failing.enough.wait(10)
        assert healthy.enough.wait(10)
        sampler.close()
    assert len(failures) == 3
    assert [record.getMessage() for record in caplog.records] == ["cannot sample MetricsSource"]
    after = healthy.num_samples
    time.sleep(0.1)
    assert healthy.num_samples == after  # it ended


@pytest.mark.process
def test_hanging_gauge_source_does_not_delay_the_workers_end() -> None:
    released, ended = threading.Event(), threading.Event()

    class Hanging:
        def sample(self) -> None:
            released.wait(30)
            ended.set()

    sampler = Sampler([Hanging()], lambda: None, seconds=0.01)
    sampler.close()
    assert not ended.is_set()
    released.set()


def figure(server: Server, name: str) -> float:
    found = re.search(
        rf"^{name} (\S+)$", plain_http.get(server.url + "/metrics").text, re.MULTILINE
    )
    assert found, name
    return float(found[1])


@pytest.mark.nightly
def test_restarted_workers_are_counted(certified: Path) -> None:
    with running(certified, workers=2) as server:
        server.wait()
        wait_for(server, "slipway_worker_starts_total", 2)
        wait_for(server, "slipway_ready", 2)
        assert figure(server, "slipway_workers") == 2
        assert figure(server, "slipway_memory_bytes") > 2 * 20e6
        began = figure(server, "slipway_start_time_seconds")
        os.kill(server.worker(), signal.SIGKILL)
        wait_for(server, "slipway_worker_starts_total", 3)
        wait_for(server, "slipway_ready", 2)
        assert figure(server, "slipway_start_time_seconds") == began  # its server is the same
        has_gpu = "slipway_gpu_" in plain_http.get(server.url + "/metrics").text
        assert (
            has_gpu == Path("/proc/driver/nvidia").exists()
        )  # the twin of the pretended driver in test_gpu_metrics.py


@pytest.mark.process
def test_a_restarted_server_exposes_a_new_start_time_and_restarted_counters(
    certified: Path,
) -> None:
    starts = []
    for _ in range(2):
        before = time.time()
        with running(certified) as server:
            server.wait()
            starts.append(figure(server, "slipway_start_time_seconds"))
            assert before < starts[-1] < time.time()
            assert figure(server, "slipway_worker_starts_total") == 1
    assert starts[0] < starts[1]


def wait_for(server: Server, name: str, value: float, seconds: float = 30) -> None:
    started = time.monotonic()
    while figure(server, name) != value:
        assert time.monotonic() - started < seconds, (
            f"{name} is {figure(server, name)}, not {value}"
        )
        time.sleep(0.1)
