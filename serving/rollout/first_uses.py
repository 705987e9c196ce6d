"""Which request ids a canary has met before, over all workers: a bit for each of NUM_PLACES, in a file that they share.

An answer tells which model an id belongs to, and repetitions of a request are no further draws. So an id is evidence once, the first time.
An id whose place another one has taken is taken for known: that costs some evidence after millions of requests, and favours no model.
"""

import hashlib
import logging
import mmap
import os
from pathlib import Path

from slipway.system import files

logger = logging.getLogger("bentoml.slipway")

NUM_PLACES = 1 << 23
_NUM_BYTES = NUM_PLACES // 8
SUFFIX = ".used"


class FirstUses:
    """The ids of one candidate's rollout. Where `path` cannot be written, those of this worker alone."""

    def __init__(self, path: Path, salt: str) -> None:
        self._salt = salt
        try:
            self._bits = _shared(path)
        except OSError as error:
            logger.warning(
                "rollout: ids that come twice are only known within each worker: %s", error
            )
            self._bits = mmap.mmap(-1, _NUM_BYTES)

    def is_first(self, request_id: str) -> bool:
        """Whether it was not asked before; from now on it was."""
        digest = hashlib.sha256(f"{self._salt}:used:{request_id}".encode()).digest()
        place, bit = divmod(int.from_bytes(digest[:8]) % NUM_PLACES, 8)
        byte = self._bits[place]
        if byte >> bit & 1:
            return False
        self._bits[place] = (
            byte | 1 << bit
        )  # two workers at the same byte in the same moment may lose one of two bits
        return True


def _shared(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, _NUM_BYTES)
        files.claim_space(path)
        return mmap.mmap(descriptor, _NUM_BYTES)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
