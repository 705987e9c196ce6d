"""The most memory that this process has held so far."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(*, on_gpu: bool) -> int:
    """On a GPU what torch had allocated on it; on the CPU the largest resident set, without what is mapped from files now.

    Mapped pages (libraries, the packed store) the system takes back when it is short of memory, and counts as it likes until then.
    """
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    # Not `ru_maxrss` where the kernel tells: it begins with that of the process which started this one.
    largest = status_bytes("VmHWM") - status_bytes("RssFile")
    return largest or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_bytes() -> int:
    """What this process holds now that is not mapped from files; 0 where the system does not tell."""
    return status_bytes("RssAnon")


def status_bytes(key: str) -> int:
    """A size of /proc/self/status, such as VmRSS; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
