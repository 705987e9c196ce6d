"""Samples gauges every few seconds, on a thread of each worker, and measures the process.

A source that raises is counted and logged once, and sampled again the next time.
"""

import logging
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

logger = logging.getLogger("bentoml.slipway")

SECONDS = 5.0  # a third of Prometheus' usual scrape interval
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # in cgroups of version 2 and 1
_PAGES = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")


class MetricsSource(Protocol):
    """A source of gauges, which updates them when it is sampled."""

    def sample(self) -> None:
        """Update all gauges once. May take some milliseconds."""


class Sampler:
    """A thread that samples `sources` at intervals until it is closed.

    Calls `failed` each time that a source raises an exception.
    """

    def __init__(
        self, sources: Sequence[MetricsSource], failed: Callable[[], None], seconds: float = SECONDS
    ) -> None:
        self._sources = sources
        self._failed = failed
        self._seconds = seconds
        self._ended = threading.Event()
        self._logged: set[int] = set()  # positions of failing sources that were logged
        self._thread = threading.Thread(target=self._run, name="slipway-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Waits at most a second, because a source may hang in its driver."""
        self._ended.set()
        self._thread.join(1)

    def _run(self) -> None:
        while True:
            for position, source in enumerate(self._sources):
                self._sample(position, source)
            if self._ended.wait(self._seconds):
                return

    def _sample(self, position: int, source: MetricsSource) -> None:
        try:
            source.sample()
            self._logged.discard(position)
        except Exception:
            self._failed()
            if position not in self._logged:
                logger.exception("cannot sample %s", type(source).__name__)
            self._logged.add(position)


class ProcessMetrics:
    """Gauges of one worker: its memory, the limit, and the number of worker starts.

    prometheus_client has no process metrics in multiprocess mode. `started` is the start of the
    server, in seconds since 1970.
    """

    def __init__(self, registry: CollectorRegistry, num_workers: int, started: float) -> None:
        self._memory = Gauge(
            "slipway_memory_bytes",
            "Resident memory of all workers.",
            multiprocess_mode="livesum",
            registry=registry,
        )

        def show(name: str, documentation: str, value: float) -> None:
            Gauge(name, documentation, multiprocess_mode="livemostrecent", registry=registry).set(
                value
            )

        show("slipway_memory_limit_bytes", "Memory limit of all workers.", memory_limit_bytes())
        show("slipway_workers", "Configured number of workers.", num_workers)
        # All counters restart at zero with the server; only this gauge reveals it.
        show("slipway_start_time_seconds", "Start of the server, in seconds since 1970.", started)
        Counter(
            "slipway_worker_starts_total",
            "Started workers, the first ones included.",
            registry=registry,
        ).inc()
        self.sample()

    def sample(self) -> None:
        self._memory.set(resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, pages shared with workers included."""
    return int(_PAGES.read_text().split()[1]) * resource.getpagesize()


def memory_limit_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return the memory limit of the container in bytes, or the machine's memory if it is less."""
    total = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [(cgroup / name).read_text().strip() for name in _LIMITS if (cgroup / name).is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])  # "max": no limit
