"""Tunes glibc malloc: training keeps freed memory for reuse, the service returns it to the OS.

By default, glibc returns a freed large block to the system. Once it has done so, it keeps later
blocks of that size (see mallopt(3)). Other C libraries are not changed.

*Training* with the default would get fresh pages from the system for each batch. That takes up to
two thirds of the time of a batch of small images, and a twentieth of cleaning a photograph. With
the setting, each thread that allocates keeps at most `_TRIM_BYTES` at the end of its heap.

*Training that gathers weights* (`fsdp`, ZeRO-3) would keep more freed memory than it uses, in gaps
of the heap that fit no later block. It exists to save memory, so blocks of the size of a weight are
returned.

*The service* with the default would keep 90 MB after one picture of many megapixels, even a refused
one, and the memory of a retired model. With the setting, large blocks have memory mappings of their
own, which grow without a copy and are returned when freed.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_BLOCK_BYTES = 32 << 20  # the maximum of glibc; larger blocks always come from the system
_TRIM_BYTES = 256 << 20
GATHERED_BLOCK_BYTES = 4 << 20  # of training that gathers weights
# Larger blocks come from the system. Smaller ones, such as most decoded images, are reused faster.
SERVICE_BLOCK_BYTES = 2 << 20
_SERVICE_TRIM_BYTES = 2 << 20


def keep_freed_pages(block_bytes: int = _BLOCK_BYTES) -> bool:
    """Let glibc keep freed blocks below `block_bytes` for reuse, in this process and its forks.

    Returns False if unsupported.
    """
    return _set_thresholds(block_bytes, _TRIM_BYTES)


def release_freed_pages() -> bool:
    """Let glibc return freed memory to the system from now on. Returns False if unsupported."""
    return _set_thresholds(SERVICE_BLOCK_BYTES, _SERVICE_TRIM_BYTES)


def return_memory_to_os() -> bool:
    """Return all freed memory to the system now.

    Call it after a model was dropped, because glibc would keep its hundreds of megabytes. It takes
    milliseconds, in which other threads may have to wait. Returns False if no memory was returned,
    or if that is unsupported.
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
