"""Packs images: decodes, resizes and stores every image of all splits; a killed run resumes.

The result is the same, byte for byte, for any number of workers, on Ray, and after any number of
interruptions. The raw bytes are digested again, and images that changed since `clean` are refused.
`slipway.data.store.packed` reads the store.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.code_version import pixel_code
from slipway.data.engine.parallel import Engine
from slipway.data.engine.rows import SPLITS
from slipway.data.store.image_conversion import (
    Read,
    RowPlacement,
    fill,
    finished_shards,
    places_of,
    prepare,
)
from slipway.data.store.jpeg_inputs import JPEG, OFFSETS
from slipway.data.store.packed import (
    Inputs,
    PackedManifest,
    open_inputs,
    write_labels,
    write_manifest,
    write_split,
)
from slipway.data.store.store_form import StoreForm
from slipway.data.store.targets import class_names, packed_rows, target_scale, targets_of
from slipway.data.store.transform_table import write_transform_table
from slipway.inputs.images import load_transform
from slipway.inputs.user_function import Values
from slipway.kinds.registry import Task
from slipway.system import files

_FORMAT = 1  # format version of the work folder
_MIN_STD = 1 / 255  # one grey level, because a constant channel must not be divided by zero
_STATISTICS_ROWS = 64  # rows summed at once; 64 rows of 4096 px times 255 squared stay below 2**32


class _Stored(NamedTuple):
    """The position of the JPEG of a finished row."""

    path: Path
    begin: int
    end: int


def packing_key(rows: pa.Table, form: StoreForm, task: Task) -> str:
    """Return a digest of everything that the packed store of `rows` depends on."""
    sink = pa.BufferOutputStream()
    ordered = rows.sort_by("id").combine_chunks()
    with pa.ipc.new_stream(sink, ordered.schema) as stream:
        stream.write_table(ordered)
    facts = {
        "format": _FORMAT,
        "rows": files.sha256_bytes(sink.getvalue()),
        "form": form.model_dump(),
        "task": task,
        "code": pixel_code(),
    }
    return files.digest_json(facts)[:32]


def pack(
    read: Read,
    rows: pa.Table,
    form: StoreForm,
    task: Task,
    work: Path,
    num_workers: int,
    engine: Engine = "local",
) -> Iterator[None]:
    """Write the packed store of `rows` (schema SPLIT_ROWS) to `work/store`.

    Yields once for each image, for a progress bar, first for the images that an earlier run
    finished in `work`. Raises IntegrityError, which names all missing or altered images, or
    DataError, which names all images on which the transform fails.
    """
    load_transform(form.network)
    rows = rows.sort_by("id")
    tables = {split: rows.filter(pc.equal(rows["split"], split)) for split in SPLITS}
    store = work / "store"
    (work / "shards").mkdir(exist_ok=True)
    for split, table in tables.items():
        prepare(store / split, table.num_rows, form, split)
    places = places_of(rows)
    finished = {
        number for _, shard in finished_shards(work, places, form) for number in shard.numbers
    }
    yield from (None for _ in finished)
    remaining = {source: place for source, place in places.items() if place.number not in finished}
    yield from fill(read, remaining, len(places), form, work, num_workers, engine)
    _assemble(work, tables, places, form)
    write_manifest(store, _describe(tables, form, task, store))


def channel_statistics(images: Inputs) -> tuple[list[float], list[float]]:
    """Return the mean and standard deviation of each channel of images (N, H, W, C).

    Pixels are scaled to [0, 1]. Sums of pixels and of their squares are exact whole numbers, so the
    result does not depend on the order of rows.
    """
    width, channels = images.shape[2:]
    sums = np.zeros((2, width * channels), np.uint64)
    for begin in range(0, len(images), _STATISTICS_ROWS):
        lines = np.asarray(images[begin : begin + _STATISTICS_ROWS]).reshape(-1, width * channels)
        sums += np.stack([np.add.reduce(lines, 0, np.uint64), _sums_of_squares(lines)])
    total, squares = sums.reshape(2, width, channels).sum(1).tolist()
    count = int(np.prod(images.shape[:3]))
    mean = [value / count / 255 for value in total]
    variances = [
        (count * square - value**2) / count**2 for value, square in zip(total, squares, strict=True)
    ]
    return mean, [max(variance**0.5 / 255, _MIN_STD) for variance in variances]


def _sums_of_squares(lines: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the exact sum of squares of each column of uint8 values, as uint64.

    Sums in 16 and 32 bits are 13 times as fast as counting values.
    """
    sums = np.zeros(lines.shape[1], np.uint64)
    for begin in range(0, len(lines), 1024):
        sums += np.add.reduce(np.square(lines[begin : begin + 1024], dtype=np.uint16), 0, np.uint32)
    return sums


def _assemble(
    work: Path, tables: dict[str, pa.Table], places: dict[str, RowPlacement], form: StoreForm
) -> None:
    """Copy JPEGs and transform values from the shards into the store, ordered by id."""
    if form.encoding == "raw" and form.network.transform is None:
        return
    jpegs: dict[int, _Stored] = {}
    values: dict[int, Values] = {}
    for path, shard in finished_shards(work, places, form):
        begin = 0
        for number, size, found in zip(shard.numbers, shard.jpeg_sizes, shard.values, strict=True):
            jpegs[number] = _Stored(path, begin, begin + size)
            values[number] = found
            begin += size
    numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
    for place in sorted(places.values()):
        numbers[place.split].append(place.number)
    for split in SPLITS:
        if form.is_jpeg(split):
            _write_jpegs(work / "store" / split, [jpegs[number] for number in numbers[split]])
    if form.network.transform is not None:
        found_values = {split: [values[number] for number in numbers[split]] for split in SPLITS}
        write_transform_table(
            work / "store", {split: table["id"] for split, table in tables.items()}, found_values
        )


def _write_jpegs(folder: Path, images: list[_Stored]) -> None:
    @cache
    def opened(path: Path) -> NDArray[np.uint8]:
        return np.memmap(path, np.uint8, "r")

    with (folder / JPEG).open("wb") as file:
        for image in images:
            file.write(opened(image.path)[image.begin : image.end].data)
    np.save(
        folder / OFFSETS,
        np.cumsum([0, *(image.end - image.begin for image in images)], dtype=np.int64),
    )


def _describe(
    tables: dict[str, pa.Table], form: StoreForm, task: Task, root: Path
) -> PackedManifest:
    classes = class_names(pa.concat_tables(tables.values()), task)
    targets = {split: targets_of(table, classes, task) for split, table in tables.items()}
    for split, found in targets.items():
        write_labels(root / split, found)
    mean, std = channel_statistics(open_inputs(root / "train", form.stored("train").shape))
    return PackedManifest(
        format_version=3,
        task=task,
        input=form.network,
        classes=classes,
        mean=mean,
        std=std,
        target_scale=None if classes else target_scale(targets["train"]),
        splits={
            split: write_split(
                root / split, packed_rows(table, targets[split]), form.stored(split).shape
            )
            for split, table in tables.items()
        },
    )
