"""Filling the store: images are made in parallel, each goes to its place, and finished ones are written down by shards.

Local workers write pixels into the mapped arrays themselves; those of a cluster send them back. JPEGs, whose size is not
known before, are kept with their shards.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

Read = Callable[
    [Collection[str]], Iterable[RawSample]
]  # the samples of these sources, in any order
_MAX_SHOWN = 10
_CHUNK_OF_TRANSFORMED = 16  # a transform may take a second for each image: then few at a time, so that every worker has some


class RowPlacement(NamedTuple):
    number: int  # in the table sorted by id
    split: str
    position: int  # in the split
    sha256: str


class _Placed(NamedTuple):
    sample: RawSample
    place: RowPlacement


class _Problem(NamedTuple):
    kind: Literal["changed", "transform_failed"]
    detail: str


class _Packed(NamedTuple):
    source: str
    problem: _Problem | None
    row: FinishedRow | None
    pixels: NDArray[np.uint8] | None  # None where they are in their place already


def prepare(folder: Path, num_rows: int, form: StoreForm, split: str) -> None:
    """Create the file for a split's pixels, unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    path, shape = folder / "inputs.npy", (num_rows, *form.stored(split).shape)
    if form.is_jpeg(split):
        return
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
    places, counts = {}, dict.fromkeys(SPLITS, 0)
    for number, (source, sha256, split) in enumerate(
        zip(*(rows[name].to_pylist() for name in ("source", "sha256", "split")), strict=True)
    ):
        places[source] = RowPlacement(number, split, counts[split], sha256)
        counts[split] += 1
    return places


def finished_shards(
    work: Path, places: dict[str, RowPlacement], form: StoreForm
) -> Iterator[tuple[Path, Shard]]:
    by_number = {place.number: place for place in places.values()}
    images = {
        split: _open_for_reading(work / "store" / split)
        for split in SPLITS
        if not form.is_jpeg(split)
    }

    def stored_pixels(number: int) -> Any:
        place = by_number.get(number)
        if place is None or place.split not in images:
            raise IndexError(number)
        return images[place.split][place.position]

    return read_shards(work / "shards", stored_pixels)


def _open_for_reading(folder: Path) -> NDArray[np.uint8]:
    images: NDArray[np.uint8] = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
    return images


def fill(
    read: Read,
    places: dict[str, RowPlacement],
    num_rows: int,
    form: StoreForm,
    work: Path,
    num_workers: int,
    engine: Engine,
) -> Iterator[None]:
    if not places:
        return
    store = work / "store"
    pack_one = partial(_pack_one, form=form, store=str(store) if engine == "local" else None)
    samples = (
        _Placed(sample, places[sample.source])
        for sample in read(places.keys())
        if sample.source in places
    )
    missing, problems = set(places), []
    room = _JpegRoom(work, sum(form.is_jpeg(place.split) for place in places.values()))
    _images.cache_clear()
    pixel_files = [store / split / "inputs.npy" for split in SPLITS if not form.is_jpeg(split)]
    chunk_items = _CHUNK_OF_TRANSFORMED if form.network.transform else None
    with ShardWriter(work / "shards", pixel_files) as writer:
        for packed in ordered_map(
            pack_one,
            samples,
            num_workers,
            lambda placed: len(placed.sample.payload),
            engine,
            chunk_items=chunk_items,
        ):
            missing.discard(packed.source)
            if packed.pixels is not None:
                _store_pixels(store, places[packed.source], packed.pixels)
            if packed.row is not None:
                writer.add(packed.row)
                room.take(packed.row)
            problems += [(packed.source, packed.problem)] if packed.problem else []
            yield
    _images.cache_clear()
    problems += [
        (source, _Problem("changed", "it is no longer there")) for source in sorted(missing)
    ]
    _refuse(problems, num_rows)


def _pack_one(placed: _Placed, form: StoreForm, store: str | None) -> _Packed:
    """Convert one image. With `store` None, on another machine, the pixels are sent back."""
    sample, place = placed
    if not sample.payload and sample.fault:
        return _Packed(sample.source, _Problem("changed", sample.fault.detail), None, None)
    found = files.sha256_bytes(sample.payload)
    if found != place.sha256:
        return _Packed(
            sample.source,
            _Problem("changed", f"SHA-256 {found[:16]}..., expected {place.sha256[:16]}..."),
            None,
            None,
        )
    try:
        pixels, values = array_and_values(sample.payload, form.stored(place.split))
    except ImageError as error:
        kind: Literal["changed", "transform_failed"] = (
            "transform_failed" if error.rule == "transform_failed" else "changed"
        )
        return _Packed(sample.source, _Problem(kind, error.detail), None, None)
    if form.is_jpeg(place.split):
        jpeg = encode_jpeg(pixels, form.jpeg_quality or 100)
        return _Packed(
            sample.source,
            None,
            FinishedRow(place.number, len(jpeg), digest_of(jpeg), jpeg, values),
            None,
        )
    row = FinishedRow(
        place.number, pixels.nbytes, digest_of(np.ascontiguousarray(pixels)), None, values
    )
    if store is None:
        return _Packed(sample.source, None, row, pixels)
    _store_pixels(Path(store), place, pixels)
    return _Packed(sample.source, None, row, None)


def _store_pixels(store: Path, place: RowPlacement, pixels: NDArray[np.uint8]) -> None:
    _images(str(store / place.split / "inputs.npy"))[place.position] = pixels


@cache
def _images(path: str) -> NDArray[np.uint8]:
    """Map the pixels of one split, once in each process."""
    images: NDArray[np.uint8] = np.lib.format.open_memmap(path, mode="r+")
    return images


class _JpegRoom:
    """Checks that the JPEGs will fit, from the sizes of those that are done."""

    def __init__(self, work: Path, num_left: int) -> None:
        self._work, self._num_left, self._num_done, self._bytes_done = work, num_left, 0, 0

    def take(self, row: FinishedRow) -> None:
        if row.jpeg is None:
            return
        self._num_left, self._num_done, self._bytes_done = (
            self._num_left - 1,
            self._num_done + 1,
            self._bytes_done + row.num_bytes,
        )
        if self._num_done % SHARD_ROWS == 0:
            check_jpeg_space(self._num_done, self._bytes_done, self._num_left, self._work)


def _refuse(problems: list[tuple[str, _Problem]], num_rows: int) -> None:
    """Raise one error for all problems."""
    changed = [
        f"{source}: {problem.detail}" for source, problem in problems if problem.kind == "changed"
    ]
    failed = [
        f"{source}: {problem.detail}"
        for source, problem in problems
        if problem.kind == "transform_failed"
    ]
    texts = []
    if changed:
        texts.append(
            f"{len(changed)} of {num_rows} images are not what they were when they were cleaned:\n{_listing(changed)}\n"
            "Put the files back, or run `dvc repro --force clean` to take the data as it is now."
        )
    if failed:
        texts.append(
            f"transform_failed: precompute.transform failed on {len(failed)} of {num_rows} images:\n{_listing(failed)}\n"
            "Mend the function, or remove these images from the data."
        )
    if texts:
        raise (IntegrityError if changed else DataError)("\n".join(texts))


def _listing(problems: list[str]) -> str:
    return "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN]) + "\n  ..." * (
        len(problems) > _MAX_SHOWN
    )
