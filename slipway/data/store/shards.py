"""Records the finished rows of an unfinished store: one small marker file per shard.

A marker is written after all rows of its shard are on the disk. It holds a digest of the shard, so
a shard damaged by a crash, a full disk or a bad disk is detected and made again. Shards follow the
order of the raw data. The store is ordered by id, so it does not depend on the shards.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import xxhash

from slipway.inputs.user_function import Values
from slipway.system import files
from slipway.system.contract import Contract

SHARD_ROWS = 1024
SHARD_BYTES = 64 << 20
SHARD_SECONDS = 10.0  # seconds of work that a kill may cost if images are slow


class FinishedRow(NamedTuple):
    """A row whose pixels are stored, or whose JPEG will be stored together with its shard."""

    number: int  # number in the table sorted by id
    num_bytes: int  # size of the stored image
    digest: bytes  # digest of the stored image, by `digest_of`
    jpeg: bytes | None  # None if the pixels are already in the store
    values: Values  # values of the transform


class Shard(Contract):
    """The content of a marker file; the JPEGs of its rows are in the file beside it."""

    numbers: list[int]
    jpeg_sizes: list[int]  # 0 for a row stored as pixels
    values: list[Values]
    digest: str

    def digest_with(self, digests: Sequence[bytes]) -> str:
        """Return the digest of this marker and of the images of its rows."""
        marker = files.canonical_json(self.model_dump(exclude={"digest"})).encode()
        return xxhash.xxh3_128_hexdigest(marker + b"".join(digests))


def digest_of(image: Any) -> bytes:
    """Return the XXH3 digest of stored bytes, which detects damage but not attacks."""
    return xxhash.xxh3_128_digest(image)


def read_shards(folder: Path, stored_pixels: Callable[[int], Any]) -> Iterator[tuple[Path, Shard]]:
    """Yield the JPEG file and the marker of each undamaged shard, and remove damaged shards.

    `stored_pixels` is called to get the bytes of a row that is stored as pixels.
    """
    seen: set[int] = set()
    for marker in sorted(folder.glob("*.json")):
        shard = _undamaged(marker, stored_pixels)
        if shard is None or not seen.isdisjoint(shard.numbers):
            marker.unlink()
            marker.with_suffix(".jpeg").unlink(missing_ok=True)
            continue
        seen.update(shard.numbers)
        yield marker.with_suffix(".jpeg"), shard


def _undamaged(marker: Path, stored_pixels: Callable[[int], Any]) -> Shard | None:
    try:
        shard = Shard.model_validate_json(marker.read_bytes())
        has_jpegs = any(shard.jpeg_sizes)
        payload = memoryview(marker.with_suffix(".jpeg").read_bytes() if has_jpegs else b"")
        digests = []
        begin = 0
        for number, size in zip(shard.numbers, shard.jpeg_sizes, strict=True):
            image = payload[begin : begin + size] if size else stored_pixels(number)
            digests.append(digest_of(image))
            begin += size
    except (OSError, ValueError, IndexError):
        return None
    return shard if shard.digest_with(digests) == shard.digest else None


class ShardWriter:
    """Collects finished rows, and writes each full shard in a thread."""

    def __init__(self, folder: Path, pixel_files: Sequence[Path]) -> None:
        self._folder, self._pixel_files = folder, pixel_files
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.json")), default=-1)
        self._rows: list[FinishedRow] = []
        self._num_bytes = 0
        self._begin = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-shard")
        self._pending: Future[None] | None = None

    def add(self, row: FinishedRow) -> None:
        """Add a finished row. Raises OSError if an earlier shard could not be written."""
        self._rows.append(row)
        self._num_bytes += row.num_bytes
        is_full = len(self._rows) >= SHARD_ROWS or self._num_bytes >= SHARD_BYTES
        if is_full or time.monotonic() - self._begin >= SHARD_SECONDS:
            self._complete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write the last shard, even after an error, so that the next run resumes after it."""
        try:
            if self._rows:
                self._complete()
            self._wait()
        finally:
            self._thread.shutdown()

    def _complete(self) -> None:
        self._wait()
        marker = self._folder / f"{self._next:06d}.json"
        self._pending = self._thread.submit(_write_shard, marker, self._rows, self._pixel_files)
        self._next += 1
        self._rows = []
        self._num_bytes = 0
        self._begin = time.monotonic()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _write_shard(marker: Path, rows: list[FinishedRow], pixel_files: Sequence[Path]) -> None:
    for path in pixel_files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    jpegs = [row.jpeg or b"" for row in rows]
    if any(jpegs):
        files.write_bytes(marker.with_suffix(".jpeg"), b"".join(jpegs))
    shard = Shard(
        numbers=[row.number for row in rows],
        jpeg_sizes=[len(jpeg) for jpeg in jpegs],
        values=[row.values for row in rows],
        digest="",
    )
    digest = shard.digest_with([row.digest for row in rows])
    files.write_json(marker, shard.model_copy(update={"digest": digest}).model_dump())
