"""Keeps the memory that a batch or a picture leaves behind, for the next one; and gives back what a whole model leaves.

glibc gives large blocks back to the system at once, and the next batch pays for fresh pages: up to two thirds of the time of a batch
of small images, and a twentieth of what cleaning takes for a photograph. Other C libraries are left as they are. Each thread that
allocates keeps at most `_KEPT_BYTES` at the end of its memory.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_BLOCK = 32 << 20  # the most that glibc allows; larger ones still come from the system
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Ask it of this process and of those that it forks; False where that cannot be asked."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def give_back_freed_memory() -> bool:
    """Return freed blocks to the system, whatever is kept otherwise; False where that cannot be asked or there are none.

    For after a model ended: glibc would keep its hundreds of megabytes. It takes milliseconds, in which other threads may have to wait.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))
