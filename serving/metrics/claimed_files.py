"""The files that a worker's metrics are in, whose space is claimed before it is written to.

prometheus_client writes to a memory map of a sparse file: on a full disk the first touch of a new page ends the process with SIGBUS. Here a
file has all its blocks first. Where there are none its values are kept in memory, which no scrape shows, until there are.
"""

import logging
import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from slipway.system.files import claim_space

logger = logging.getLogger("bentoml.slipway")

_NUM_BYTES = 1 << 16  # at first, as prometheus_client has it
_HEAD = 8  # how many bytes are used, in four of them
_RETRY_S = 1.0
_used = struct.Struct("i")
_waiting: set[str] = set()  # files for which there was no room, all of which are told of once


class ClaimedDict(MmapedDict):
    """prometheus_client's (0.26) dictionary in a file, which is never written to beyond what the disk has given it."""

    def __init__(self, filename: str) -> None:
        self._fname = filename
        self._f: Any = None
        content = b""
        with suppress(FileNotFoundError):  # else of an earlier process of this number
            content = Path(filename).read_bytes()
        self._capacity = max(len(content), _NUM_BYTES)
        self._m = _in_memory(content, self._capacity)
        self._used = _used.unpack_from(self._m)[0] or _HEAD
        _used.pack_into(self._m, 0, self._used)
        self._positions = {key: position for key, _, _, position in self._read_all_values()}  # type: ignore[no-untyped-call]
        self._is_on_disk = False
        self._retry_at = 0.0
        self._claim()

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set it. Where the disk was full it may have room now."""
        if not self._is_on_disk and time.monotonic() >= self._retry_at:
            self._claim()
        super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]  # it has no types

    def _init_value(self, key: str) -> None:
        while (
            self._used + len(key.encode()) + 64 > self._capacity
        ):  # more than it takes beside the key
            self._capacity *= 2
            self._m = _in_memory(self._m[:], self._capacity)
            self._is_on_disk = False
            self._claim()
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _claim(self) -> None:
        """Move what is in memory to the file, if the disk has room for all of it."""
        try:
            if self._f is None:
                self._f = open(self._fname, "a+b")  # noqa: SIM115 - `close` closes it
            self._f.truncate(self._capacity)
            claim_space(Path(self._fname))
            mapped = mmap.mmap(self._f.fileno(), self._capacity)
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_S
            if not _waiting:
                logger.error(
                    "some of what this worker counts is only in its memory for now, and not in /metrics: %s",
                    error,
                )
            _waiting.add(self._fname)
            return
        mapped[_HEAD : self._used] = self._m[_HEAD : self._used]
        mapped[:_HEAD] = self._m[:_HEAD]  # only now a reader takes it for written
        self._m, self._is_on_disk = mapped, True
        if self._fname in _waiting:
            _waiting.discard(self._fname)
            if not _waiting:
                logger.info("all that this worker counts is in /metrics again")


def claim_metric_files() -> None:
    """From now on prometheus_client's values are in such files, where it uses files at all."""
    values.MmapedDict = ClaimedDict  # type: ignore[attr-defined,assignment]


def _in_memory(content: bytes, num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes)
    memory[: len(content)] = content
    return memory


def new_claimed_file(path: Path, num_bytes: int) -> None:
    """An empty file of that length with all its blocks; OSError where the disk has none, and nothing is left then."""
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            os.truncate(file.fileno(), num_bytes)
        claim_space(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
