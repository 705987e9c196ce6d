"""The packed store: decoded, resized pixels in arrays that all ranks and workers map into memory once.

data/packed/manifest.json        what is inside, with the SHA-256 of every file
data/packed/SPLIT/images.npy     (N, size_px, size_px, channels) uint8
data/packed/SPLIT/rows.parquet   id, source and target of each image, in the same order

Disk instead of time: the store is as large as the raw pixels.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway import files
from slipway.contract import Contract, Task
from slipway.data.randomness import id_keys
from slipway.data.rows import PACKED_ROWS, read_table, write_table
from slipway.errors import IntegrityError, SchemaError
from slipway.preprocess import ImageContract

SPLITS = ("train", "val", "test")


class TargetScale(Contract):
    """Mean and standard deviation of a numeric target over the training split, in the target's unit."""

    mean: float
    std: float


class PackedSplitManifest(Contract):
    """One split: its number of rows and the hex SHA-256 of each of its files."""

    rows: int
    files: dict[str, str]


class PackedManifest(Contract):
    """What a packed store holds."""

    format_version: Literal[1]
    task: Task
    input: ImageContract
    classes: list[str]  # in the order of the class indices; empty for a numeric target
    mean: list[float]  # per channel over the training split, pixels scaled to [0, 1]
    std: list[float]
    target_scale: TargetScale | None  # null for classes
    splits: dict[str, PackedSplitManifest]


@dataclass(frozen=True)
class PackedSplit:
    """One split, its pixels mapped into memory and not yet read."""

    images: NDArray[np.uint8]  # (N, size_px, size_px, channels)
    targets: NDArray[np.float64]  # (N,) class index, or the number itself
    ids: list[str]
    sources: list[str]

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """(N,) the ids as numbers, for `slipway.data.randomness`."""
        return id_keys(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def write_split(root: Path, ids: list[str], sources: list[str], targets: NDArray[np.float64]) -> PackedSplitManifest:
    """Write the rows of a split beside the `images.npy` that is already in `root`, and digest both."""
    table = pa.table({"id": ids, "source": sources, "target": targets}, schema=PACKED_ROWS)
    write_table(root / "rows.parquet", table, PACKED_ROWS)
    return PackedSplitManifest(rows=len(ids), files={name: files.sha256_file(root / name) for name in ("images.npy", "rows.parquet")})


def write_manifest(root: Path, manifest: PackedManifest) -> None:
    """Write `manifest.json`, last, when every split is complete."""
    files.write_json(root / "manifest.json", manifest.model_dump(mode="json"))


def read_manifest(root: Path) -> PackedManifest:
    """The manifest of a packed store; SchemaError if it is missing or not understood."""
    path = root / "manifest.json"
    try:
        return PackedManifest.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro precompute`.") from None
    except ValueError as error:
        raise SchemaError(f"{path} is not a packed store's manifest: {error}. Run `dvc repro --force precompute`.") from error


def open_split(root: Path, manifest: PackedManifest, split: str, *, verify: bool = False) -> PackedSplit:
    """Map one split into memory. `verify` first compares every file with its digest (IntegrityError)."""
    folder, expected = root / split, manifest.splits[split]
    if verify:
        _verify(folder, expected)
    table = read_table(folder / "rows.parquet", PACKED_ROWS)
    images = _map_images(folder / "images.npy")
    if len(images) != expected.rows or table.num_rows != expected.rows or images.shape[1:] != manifest.input.shape:
        raise SchemaError(
            f"{folder} has images {images.shape} and {table.num_rows} rows, expected {expected.rows} of {manifest.input.shape}. "
            "Run `dvc repro --force precompute`."
        )
    return PackedSplit(
        images=images,
        targets=table["target"].to_numpy(),
        ids=table["id"].to_pylist(),
        sources=table["source"].to_pylist(),
    )


def _map_images(path: Path) -> NDArray[np.uint8]:
    try:
        images: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path} is not a readable array: {error}. Run `dvc repro --force precompute`.") from error
    return images


def _verify(folder: Path, expected: PackedSplitManifest) -> None:
    for name, sha256 in expected.files.items():
        found = files.sha256_file(folder / name)
        if found != sha256:
            raise IntegrityError(f"{folder / name} was altered: SHA-256 {found}, expected {sha256}. Run `dvc repro --force precompute`.")
