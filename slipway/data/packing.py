"""Packing: every image of the split rows is decoded, resized and written into one memory-mapped array per split.

The workers write into the mapping, each image at its own place, so the bytes are the same for any number of workers.
The raw bytes are digested again: what changed since `clean` is refused. See `slipway.data.packed` for the reader.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway import files
from slipway.contract import Task, is_classification
from slipway.data.packed import SPLITS, PackedManifest, TargetScale, write_manifest, write_split
from slipway.data.parallel import ordered_map
from slipway.data.rows import PACKED_ROWS
from slipway.data.samples import RawSample
from slipway.errors import DataError, ImageError, IntegrityError, UnavailableError
from slipway.preprocess import ImageContract, array_from_bytes

_MIN_STD = 1 / 255  # one grey level: a constant channel must not be divided by zero
_MAX_SHOWN = 10
_STATISTICS_ROWS = 256
_MARGIN_BYTES = 64 << 20  # for the tables and the file system itself


class _Place(NamedTuple):
    split: str
    position: int
    sha256: str


class _Placed(NamedTuple):
    sample: RawSample
    place: _Place


def pack(samples: Iterable[RawSample], rows: pa.Table, contract: ImageContract, task: Task, root: Path, num_workers: int) -> Iterator[None]:
    """Fill the folder `root` with a packed store of `rows` (`rows.SPLIT_ROWS`); yields once for each image, for a progress bar.

    `samples` must bring every `source` of `rows`, in any order. IntegrityError naming those that are gone or altered.
    """
    rows = rows.sort_by("id")
    check_disk_space(root, rows.num_rows * int(np.prod(contract.shape)))
    tables = {split: rows.filter(pc.equal(rows["split"], split)) for split in SPLITS}
    for split, table in tables.items():
        _create(root / split / "inputs.npy", (table.num_rows, *contract.shape))
    yield from _fill(samples, _places(tables), contract, root, num_workers)
    write_manifest(root, _describe(tables, contract, task, root))


def check_disk_space(root: Path, image_bytes: int) -> None:
    """UnavailableError if the file system of `root` has less room than the store needs."""
    needed, free = image_bytes + _MARGIN_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise UnavailableError(
            f"the packed store needs {needed / 2**20:,.0f} MiB, {root.parent} has {free / 2**20:,.0f} MiB free. "
            "Free space, or lower precompute.image_size_px."
        )


def channel_statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of (N, H, W, C) images, pixels scaled to [0, 1].

    Counts of the 256 values are exact whole numbers, so the result does not depend on the order of rows.
    """
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), np.int64)
    for begin in range(0, len(images), _STATISTICS_ROWS):
        pixels = images[begin : begin + _STATISTICS_ROWS].reshape(-1, channels)
        counts += np.stack([np.bincount(pixels[:, channel], minlength=256) for channel in range(channels)])
    values = np.arange(256) / 255
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean.tolist(), np.maximum(std, _MIN_STD).tolist()


def _create(path: Path, shape: tuple[int, ...]) -> None:
    path.parent.mkdir()
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape).flush()
    if hasattr(os, "posix_fallocate"):  # without it a full disk shows as a bus error in a worker
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _places(tables: dict[str, pa.Table]) -> dict[str, _Place]:
    return {
        source: _Place(split, position, sha256)
        for split, table in tables.items()
        for position, (source, sha256) in enumerate(zip(table["source"].to_pylist(), table["sha256"].to_pylist(), strict=True))
    }


def _fill(samples: Iterable[RawSample], places: dict[str, _Place], contract: ImageContract, root: Path, num_workers: int) -> Iterator[None]:
    pack_one = partial(_pack_one, contract=contract, root=str(root))
    work = (_Placed(sample, places[sample.source]) for sample in samples if sample.source in places)
    _images.cache_clear()
    missing, problems = set(places), []
    for source, problem in ordered_map(pack_one, work, num_workers, lambda placed: len(placed.sample.payload)):
        missing.discard(source)
        problems += [f"{source}: {problem}"] if problem else []
        yield
    problems += [f"{source}: it is no longer there" for source in sorted(missing)]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN]) + "\n  ..." * (len(problems) > _MAX_SHOWN)
        raise IntegrityError(
            f"{len(problems)} of {len(places)} images are not what they were when they were cleaned:\n{shown}\n"
            "Put the files back, or run `dvc repro --force clean` to take the data as it is now."
        )


def _pack_one(placed: _Placed, contract: ImageContract, root: str) -> tuple[str, str | None]:
    """Write one image at its place; its source, and what is wrong with it."""
    sample, place = placed
    if not sample.payload and sample.fault:
        return sample.source, sample.fault.detail
    found = files.sha256_bytes(sample.payload)
    if found != place.sha256:
        return sample.source, f"SHA-256 {found[:16]}..., expected {place.sha256[:16]}..."
    try:
        _images(root, place.split)[place.position] = array_from_bytes(sample.payload, contract)
    except ImageError as error:
        return sample.source, error.detail
    return sample.source, None


@cache
def _images(root: str, split: str) -> NDArray[np.uint8]:
    """The mapping of one split, opened once in each process."""
    images: NDArray[np.uint8] = np.lib.format.open_memmap(Path(root, split, "inputs.npy"), mode="r+")
    return images


def _describe(tables: dict[str, pa.Table], contract: ImageContract, task: Task, root: Path) -> PackedManifest:
    classes = sorted({label for table in tables.values() for label in table["label"].to_pylist()}) if is_classification(task) else []
    targets = {split: _targets(table, classes) for split, table in tables.items()}
    mean, std = channel_statistics(np.load(root / "train" / "inputs.npy", mmap_mode="r", allow_pickle=False))
    return PackedManifest(
        format_version=2,
        task=task,
        input=contract,
        classes=classes,
        mean=mean,
        std=std,
        target_scale=None if classes else _target_scale(targets["train"]),
        splits={split: write_split(root / split, _packed_rows(table, targets[split]), contract.shape) for split, table in tables.items()},
    )


def _packed_rows(table: pa.Table, targets: NDArray[np.float64]) -> pa.Table:
    columns = {
        "id": table["id"],
        "source": table["source"],
        "target": targets,
        "weight": pc.fill_null(table["weight"], 1.0),
        "leaked": table["leaked"],
    }
    return pa.table(columns, schema=PACKED_ROWS)


def _targets(table: pa.Table, classes: list[str]) -> NDArray[np.float64]:
    """(N,) class indices, or the numbers themselves where there are no classes."""
    if not classes:
        return np.asarray(table["target"].to_numpy(), np.float64)
    index = {label: position for position, label in enumerate(classes)}
    return np.array([index[label] for label in table["label"].to_pylist()], np.float64)


def _target_scale(targets: NDArray[np.float64]) -> TargetScale:
    std = float(targets.std())
    if std == 0:
        raise DataError(f"all {len(targets)} targets of the training split are {targets[0]:g}, expected different numbers. Add data.")
    return TargetScale(mean=float(targets.mean()), std=std)
