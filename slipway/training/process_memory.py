"""The most memory that this process has held so far."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(*, on_gpu: bool) -> int:
    """On a GPU what torch had allocated on it; on the CPU the resident set, files mapped into memory included."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    # Not `ru_maxrss` where the kernel tells: it begins with that of the process which started this one.
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status_bytes(key: str) -> int:
    """A size of /proc/self/status, such as VmRSS; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
