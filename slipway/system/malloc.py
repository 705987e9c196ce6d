"""Tunes glibc malloc: training keeps freed memory for reuse, the service returns it to the OS.

By default glibc returns large blocks at once, until it has seen one; then it keeps blocks of that
size. Other C libraries are not changed. See mallopt(3).

*Training* would pay for fresh pages in each batch: up to two thirds of the time of a batch of small
images, and a twentieth of cleaning a photograph. Each thread that allocates keeps at most
`_TRIM_BYTES` at the end of its heap.

*The service* would stay 90 MB larger after one picture of many megapixels, even a refused one, and
so would a retired model. Larger blocks have their own memory mappings, which grow without a copy.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_BLOCK_BYTES = 32 << 20  # the maximum of glibc; larger blocks always come from the system
_TRIM_BYTES = 256 << 20
# Larger blocks come from the system. Smaller ones, such as most decoded images, are reused faster.
SERVICE_BLOCK_BYTES = 2 << 20
_SERVICE_TRIM_BYTES = 2 << 20


def keep_freed_pages() -> bool:
    """Keep freed memory in this process and its forks. Returns False if that is unsupported."""
    return _set_thresholds(_BLOCK_BYTES, _TRIM_BYTES)


def release_freed_pages() -> bool:
    """Return freed memory to the system from now on. Returns False if that is unsupported."""
    return _set_thresholds(SERVICE_BLOCK_BYTES, _SERVICE_TRIM_BYTES)


def return_memory_to_os() -> bool:
    """Return all freed memory to the system once. Returns False if there is none, or no support.

    After the end of a model, glibc would keep its hundreds of megabytes. Takes milliseconds, in
    which other threads may have to wait.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))


def _set_thresholds(block_bytes: int, trim_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    is_set = bool(mallopt(_MMAP_THRESHOLD, block_bytes))
    return is_set and bool(mallopt(_TRIM_THRESHOLD, trim_bytes))
