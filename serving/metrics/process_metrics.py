"""What the worker's process itself takes: its memory, the memory it may have, how often one was started, and when their server was.

`prometheus_client` has no such figures where several processes answer for each other. A worker that is started again and again, or
that grows towards its limit, is seen here before it is killed.
"""

import resource
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # version 2, version 1
_PAGES = Path("/proc/self/statm")
_MACHINE = Path("/proc/meminfo")


class ProcessMetrics:
    """Gauges of one worker, and the count of the server's workers. The server began at `started`, in seconds since 1970."""

    def __init__(self, registry: CollectorRegistry, num_workers: int, started: float) -> None:
        self._memory = Gauge(
            "slipway_memory_bytes",
            "Resident memory of the workers together.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        limit = Gauge(
            "slipway_memory_limit_bytes",
            "Memory that all may have together.",
            multiprocess_mode="livemostrecent",
            registry=registry,
        )
        workers = Gauge(
            "slipway_workers",
            "Workers as configured.",
            multiprocess_mode="livemostrecent",
            registry=registry,
        )
        starts = Counter(
            "slipway_worker_starts",
            "Workers that were started, the first ones included.",
            registry=registry,
        )
        # Every count begins anew with a server that is started again: by this alone such starts can be told.
        start = Gauge(
            "slipway_start_time_seconds",
            "When the server began, since 1970.",
            multiprocess_mode="livemostrecent",
            registry=registry,
        )
        start.set(started)
        limit.set(memory_limit_bytes())
        workers.set(num_workers)
        starts.inc()
        self.sample()

    def sample(self) -> None:
        """Read the process' memory once."""
        self._memory.set(resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process. Pages that workers share count for each of them."""
    return int(_PAGES.read_text().split()[1]) * resource.getpagesize()


def memory_limit_bytes(cgroup: Path = _CGROUP, machine: Path = _MACHINE) -> int:
    """The container's limit, or the machine's memory where there is none, or where it is more than the machine has."""
    total = next(
        int(line.split()[1]) * 1024
        for line in machine.read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [(cgroup / name).read_text().strip() for name in _LIMITS if (cgroup / name).is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])  # "max" is none
