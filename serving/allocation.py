"""Large buffers get memory of their own, which grows without a copy and goes back to the system as soon as it is free.

glibc does so by itself, until the first large buffer is freed: then it raises its threshold, up to 32 MB, and a body that arrives in
pieces is in memory twice each time that its buffer has to move. See mallopt(3).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
OWN_MEMORY_BYTES = 2 << 20  # smaller ones, such as most decoded images, are faster out of what is kept
_KEPT_BYTES = 2 << 20  # free at the end of the heap


def fix_thresholds() -> bool:
    """Whether it could be done: only glibc has these settings."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, OWN_MEMORY_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
