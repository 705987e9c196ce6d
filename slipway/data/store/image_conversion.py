"""Converts images for the store with parallel workers, one shard after the other.

Local workers write pixels directly into the memory-mapped arrays; workers of a cluster send pixels
back. JPEGs, whose size is not known in advance, are stored with their shards.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.parallel import Engine, ordered_map
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.samples import RawSample
from slipway.data.store.disk_space import check_jpeg_space
from slipway.data.store.jpeg_inputs import encode_jpeg
from slipway.data.store.shards import (
    SHARD_ROWS,
    FinishedRow,
    Shard,
    ShardWriter,
    digest_of,
    read_shards,
)
from slipway.data.store.store_form import StoreForm
from slipway.inputs.images import array_and_values
from slipway.system import files
from slipway.system.errors import DataError, ImageError, IntegrityError

Read = Callable[[Collection[str]], Iterable[RawSample]]  # samples of these sources, in any order
_MAX_SHOWN = 10
# A transform may take a second per image: small chunks then keep every worker busy.
_CHUNK_OF_TRANSFORMED = 16


class RowPlacement(NamedTuple):
    """The position of a row in the store, and the digest that its raw bytes must have."""

    number: int  # number in the table sorted by id
    split: str
    position: int  # position in the split
    sha256: str


class _Packed(NamedTuple):
    """The result for one image: a finished row, or the reason why there is none."""

    source: str
    row: FinishedRow | None = None
    pixels: NDArray[np.uint8] | None = None  # set only if they are not in the store yet
    changed: str | None = None  # the difference from the image that was cleaned
    failed: str | None = None  # the error of the user's transform


def prepare(folder: Path, num_rows: int, form: StoreForm, split: str) -> None:
    """Create the file for the pixels of a split, unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    if form.is_jpeg(split):
        return
    path = folder / "inputs.npy"
    shape = (num_rows, *form.stored(split).shape)
    if not _is_array(path, shape):
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape).flush()
    files.claim_space(path)


def _is_array(path: Path, shape: tuple[int, ...]) -> bool:
    try:
        found: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return False
    return found.shape == shape and found.dtype == np.uint8


def places_of(rows: pa.Table) -> dict[str, RowPlacement]:
    """Return the placement of each row, by source."""
    places: dict[str, RowPlacement] = {}
    counts = dict.fromkeys(SPLITS, 0)
    columns = (rows[name].to_pylist() for name in ("source", "sha256", "split"))
    for number, (source, sha256, split) in enumerate(zip(*columns, strict=True)):
        places[source] = RowPlacement(number, split, counts[split], sha256)
        counts[split] += 1
    return places


def finished_shards(
    work: Path, places: dict[str, RowPlacement], form: StoreForm
) -> Iterator[tuple[Path, Shard]]:
    """Yield the undamaged shards of an earlier run, see `read_shards`."""
    by_number = {place.number: place for place in places.values()}
    images = {
        split: np.load(_pixel_file(work / "store", split), mmap_mode="r", allow_pickle=False)
        for split in SPLITS
        if not form.is_jpeg(split)
    }

    def stored_pixels(number: int) -> Any:
        place = by_number.get(number)
        if place is None or place.split not in images:
            raise IndexError(number)
        return images[place.split][place.position]

    return read_shards(work / "shards", stored_pixels)


def fill(
    read: Read,
    places: dict[str, RowPlacement],
    num_rows: int,
    form: StoreForm,
    work: Path,
    num_workers: int,
    engine: Engine,
) -> Iterator[None]:
    """Convert the images at `places` and store them shard by shard; yield once for each image.

    Raises a single error that names all images that are missing, altered, or rejected by the
    transform.
    """
    if not places:
        return
    store = work / "store"
    convert = partial(_convert, form=form, store=store if engine == "local" else None)
    samples = (
        (sample, places[sample.source]) for sample in read(places.keys()) if sample.source in places
    )
    missing = set(places)
    changed: dict[str, str] = {}
    failed: dict[str, str] = {}
    space = _JpegSpace(work, sum(form.is_jpeg(place.split) for place in places.values()))
    pixel_files = [_pixel_file(store, split) for split in SPLITS if not form.is_jpeg(split)]
    _open_pixels.cache_clear()
    with ShardWriter(work / "shards", pixel_files) as writer:
        for packed in ordered_map(
            convert,
            samples,
            num_workers,
            lambda placed: len(placed[0].payload),
            engine,
            chunk_items=_CHUNK_OF_TRANSFORMED if form.network.transform else None,
        ):
            missing.discard(packed.source)
            if packed.pixels is not None:
                _store_pixels(store, places[packed.source], packed.pixels)
            if packed.row is not None:
                writer.add(packed.row)
                space.check(packed.row)
            if packed.changed is not None:
                changed[packed.source] = packed.changed
            if packed.failed is not None:
                failed[packed.source] = packed.failed
            yield
    _open_pixels.cache_clear()
    changed |= dict.fromkeys(sorted(missing), "it no longer exists")
    _refuse(changed, failed, num_rows)


def _convert(
    placed: tuple[RawSample, RowPlacement], form: StoreForm, store: Path | None
) -> _Packed:
    """Convert one image and write its pixels to `store`; return the pixels if `store` is None."""
    sample, place = placed
    if not sample.payload and sample.fault:
        return _Packed(sample.source, changed=sample.fault.detail)
    found = files.sha256_bytes(sample.payload)
    if found != place.sha256:
        detail = f"SHA-256 {found[:16]}..., expected {place.sha256[:16]}..."
        return _Packed(sample.source, changed=detail)
    try:
        pixels, values = array_and_values(sample.payload, form.stored(place.split))
    except ImageError as error:
        if error.rule == "transform_failed":
            return _Packed(sample.source, failed=error.detail)
        return _Packed(sample.source, changed=error.detail)
    if form.is_jpeg(place.split):
        jpeg = encode_jpeg(pixels, form.jpeg_quality or 100)
        row = FinishedRow(place.number, len(jpeg), digest_of(jpeg), jpeg, values)
        return _Packed(sample.source, row)
    digest = digest_of(np.ascontiguousarray(pixels))
    row = FinishedRow(place.number, pixels.nbytes, digest, None, values)
    if store is None:
        return _Packed(sample.source, row, pixels)
    _store_pixels(store, place, pixels)
    return _Packed(sample.source, row)


def _pixel_file(store: Path, split: str) -> Path:
    return store / split / "inputs.npy"


def _store_pixels(store: Path, place: RowPlacement, pixels: NDArray[np.uint8]) -> None:
    _open_pixels(_pixel_file(store, place.split))[place.position] = pixels


@cache
def _open_pixels(path: Path) -> NDArray[np.uint8]:
    """Map the pixels of one split into memory, once for each process."""
    images: NDArray[np.uint8] = np.lib.format.open_memmap(path, mode="r+")
    return images


class _JpegSpace:
    """Checks that the remaining JPEGs will fit on the disk, based on the sizes of finished ones."""

    def __init__(self, work: Path, num_left: int) -> None:
        self._work = work
        self._num_left = num_left
        self._num_done = 0
        self._bytes_done = 0

    def check(self, row: FinishedRow) -> None:
        if row.jpeg is None:
            return
        self._num_left -= 1
        self._num_done += 1
        self._bytes_done += row.num_bytes
        if self._num_done % SHARD_ROWS == 0:
            check_jpeg_space(self._num_done, self._bytes_done, self._num_left, self._work)


def _refuse(changed: dict[str, str], failed: dict[str, str], num_rows: int) -> None:
    texts = []
    if changed:
        texts.append(
            f"{len(changed)} of {num_rows} images changed since they were cleaned:\n"
            f"{_listing(changed)}\n"
            "Put the files back, or run `dvc repro --force clean` to take the data as it is now."
        )
    if failed:
        texts.append(
            f"transform_failed: precompute.transform failed on {len(failed)} of {num_rows} images:"
            f"\n{_listing(failed)}\nFix the function, or remove these images from the data."
        )
    if texts:
        raise (IntegrityError if changed else DataError)("\n".join(texts))


def _listing(problems: dict[str, str]) -> str:
    lines = [f"  {source}: {detail}" for source, detail in problems.items()]
    if len(lines) > _MAX_SHOWN:
        lines[_MAX_SHOWN:] = ["  ..."]
    return "\n".join(lines)
