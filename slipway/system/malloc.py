"""What becomes of freed memory: kept for the next batch where the same is done again and again, given back where callers decide.

glibc gives large blocks back to the system at once, until it has seen one; then it keeps those of that size. Other C libraries are left
as they are.

*Kept*: the next batch would pay for fresh pages, up to two thirds of the time of a batch of small images, and a twentieth of what
cleaning takes for a photograph. Each thread that allocates keeps at most `_KEPT_BYTES` at the end of its memory.

*Given back*: one picture of many megapixels, even a refused one, would leave a service 90 MB larger for as long as it runs; and so
would a model that ended. Larger blocks have memory of their own, which also grows without a copy: a body that arrives in pieces would be in
memory twice each time that its buffer has to move. See mallopt(3).
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_BLOCK = 32 << 20  # the most that glibc allows; larger ones still come from the system
_KEPT_BYTES = 256 << 20
LARGEST_BLOCK_OF_A_SERVICE = (
    2 << 20
)  # smaller ones, such as most decoded images, are faster out of what is kept
_KEPT_BYTES_OF_A_SERVICE = 2 << 20


def keep_freed_memory() -> bool:
    """Ask it of this process and of those that it forks; False where that cannot be asked."""
    return _set_thresholds(_LARGEST_BLOCK, _KEPT_BYTES)


def keep_little_freed_memory() -> bool:
    """Ask the opposite, also that glibc does not change its mind."""
    return _set_thresholds(LARGEST_BLOCK_OF_A_SERVICE, _KEPT_BYTES_OF_A_SERVICE)


def give_back_freed_memory() -> bool:
    """Return freed blocks to the system, whatever is kept otherwise; False where that cannot be asked or there are none.

    For after a model ended: glibc would keep its hundreds of megabytes. It takes milliseconds, in which other threads may have to wait.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))


def _set_thresholds(largest_block: int, kept_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, largest_block)) and bool(
        mallopt(_TRIM_THRESHOLD, kept_bytes)
    )
