"""What a measurement ran on, and how long its threads stood in line for a core that other work used."""

import os
import platform
from pathlib import Path

import torch

from slipway.system.cores import num_cores


def describe_machine() -> str:
    """Cores, GPUs, versions, and how busy the machine is."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{num_cores()} cores ({platform.machine()}), {', '.join(gpus) or 'no GPU'}"
    return f"{devices}; Python {platform.python_version()}, torch {torch.__version__}; load average {os.getloadavg()[0]:.1f}"


def queued_seconds() -> float:
    """Time that the threads of this process were ready to run and had no core, added up; 0 where Linux does not tell.

    The second number of /proc/PID/task/TID/schedstat, in nanoseconds (Linux: Documentation/scheduler/sched-stats.rst).
    """
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # a thread that has just ended
            continue
    return total / 1e9
