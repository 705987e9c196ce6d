"""Memory of this process: the peak so far, and the current size."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(*, on_gpu: bool) -> int:
    """Peak memory: torch's allocations on a GPU, the resident set without mapped files on a CPU.

    Mapped pages (libraries, the packed store) do not count, because the system reclaims them when
    memory runs short.
    """
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    # `ru_maxrss` is the fallback only: it starts at the value of the parent process.
    largest = status_bytes("VmHWM") - status_bytes("RssFile")
    return largest or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_bytes() -> int:
    """Current memory that is not mapped from files; 0 if the system does not report it."""
    return status_bytes("RssAnon")


def status_bytes(key: str) -> int:
    """Read a size such as VmRSS from /proc/self/status; 0 if it is not there."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
