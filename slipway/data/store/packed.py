"""The packed store: the network's inputs as arrays, which all processes memory-map and share.

data/packed/manifest.json              the content, with the SHA-256 of every file
data/packed/SPLIT/inputs.npy           (N, size_px, size_px, channels) uint8 pixels, or
                                       (N, width) float32 encoded columns
data/packed/train/inputs.jpeg          replaces inputs.npy with `precompute.encoding: jpeg`, and has
                                       offsets.npy (N + 1 int64)
data/packed/SPLIT/rows.parquet         id, source and target of each row, in the same order
data/packed/SPLIT/labels.npy           (N, K) uint8, only if rows have several labels: 1 for each
data/packed/SPLIT/transform.parquet    the values that `precompute.transform` found on each row

The store is as large as the raw pixels, but fast to read.
"""

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.randomness import id_keys
from slipway.data.engine.rows import PACKED_ROWS, read_record, read_table, write_table
from slipway.data.store.jpeg_inputs import JPEG, OFFSETS, JpegInputs
from slipway.data.store.transform_table import TRANSFORM_TABLE
from slipway.inputs.contract import AnyInputContract
from slipway.kinds.registry import Task
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError, SchemaError

_PIXELS = "inputs.npy"
_LABELS = "labels.npy"
_REPACK = "Run `dvc repro --force precompute`."


@dataclass(frozen=True)
class PackPaths:
    """The folders of the stage `precompute`."""

    clean: Path  # written by `clean`
    packed: Path  # the packed store
    work: Path  # folder of interrupted runs


class Inputs(Protocol):
    """Rows that are read on access: a memory-mapped array, or JPEG images."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Any:
        """Return the row with a number, or the rows of a slice or an array, (B, ...)."""


class FileSpan(NamedTuple):
    """Consecutive bytes of a file that is mapped into memory from its beginning."""

    path: Path
    begin: int
    end: int
    mapping: mmap.mmap


class TargetScale(Contract):
    """Mean and standard deviation of a numeric target over the training split, in its unit."""

    mean: float
    std: float


class PackedSplitManifest(Contract):
    """The rows and files of one split."""

    rows: int
    shape: list[int]  # shape of a stored row; an image may be larger than the network's input
    files: dict[str, str]  # hex SHA-256 by name


class PackedManifest(Contract):
    """The content of `manifest.json`."""

    format_version: Literal[3]
    task: Task
    input: AnyInputContract
    classes: list[str]  # classes in the order of their indices; empty for a numeric target
    # Per channel over the training split, pixels scaled to [0, 1]; empty for tables, whose input
    # contract has them.
    mean: list[float]
    std: list[float]
    target_scale: TargetScale | None  # null for classes
    splits: dict[str, PackedSplitManifest]


@dataclass(frozen=True)
class PackedSplit:
    """The rows of one split, whose inputs are memory-mapped and read on access."""

    inputs: Inputs  # (N, ...) uint8 pixels or float32 columns
    # (N,) float64 class index, or the number itself; with several labels (N, K) uint8
    targets: NDArray[Any]
    ids: list[str]
    sources: list[str]
    weights: NDArray[np.float64]  # (N,) in the training loss
    leaked: NDArray[np.bool_]  # (N,) a duplicate or the row's group is in another split
    # (N, D) float32 of a frozen body, which training reads in place of `inputs`; None without one
    features: Inputs | None = None

    @property
    def read(self) -> Inputs:
        """The rows as training reads them: features of a frozen body, or else the inputs."""
        return self.inputs if self.features is None else self.features

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """The ids of the rows as (N,) uint64, the keys for `slipway.data.engine.randomness`."""
        return id_keys(self.ids)

    @cached_property
    def target_keys(self) -> NDArray[np.float64]:
        """The targets (N,); if rows have several labels, a number that identifies each set."""
        if self.targets.ndim == 1:
            return np.asarray(self.targets, np.float64)
        _, keys = np.unique(self.targets, axis=0, return_inverse=True)
        return np.asarray(keys.reshape(-1), np.float64)

    def rows_of(self, label: int) -> NDArray[np.int64]:
        """Return the rows that have the label, or the class, with the index `label`."""
        own = self.targets == label if self.targets.ndim == 1 else self.targets[:, label] > 0
        return np.flatnonzero(own)

    def __len__(self) -> int:
        return len(self.ids)


def write_labels(root: Path, targets: NDArray[Any]) -> None:
    """Write the labels (N, K) of a split's rows to a file; other targets are in `rows.parquet`."""
    if targets.ndim == 2:
        np.save(root / _LABELS, targets.astype(np.uint8), allow_pickle=False)


def write_split(root: Path, rows: pa.Table, shape: tuple[int, ...]) -> PackedSplitManifest:
    """Write the rows of a split beside its inputs, and compute the digests of all its files."""
    write_table(root / "rows.parquet", rows, PACKED_ROWS)
    names = (_PIXELS, JPEG, OFFSETS, "rows.parquet", _LABELS, TRANSFORM_TABLE)
    digests = {name: files.sha256_file(root / name) for name in names if (root / name).exists()}
    return PackedSplitManifest(rows=rows.num_rows, shape=list(shape), files=digests)


def write_manifest(root: Path, manifest: PackedManifest) -> None:
    """Write `manifest.json`. This comes last, after all splits are complete."""
    files.write_json(root / "manifest.json", manifest.model_dump(mode="json"))


def read_manifest(root: Path) -> PackedManifest:
    """Read the manifest of a packed store. Raises SchemaError if it is missing or invalid."""
    return read_record(PackedManifest, root / "manifest.json", "precompute")


def open_split(
    root: Path, manifest: PackedManifest, split: str, *, verify: bool = False
) -> PackedSplit:
    """Map one split into memory.

    With `verify`, raises IntegrityError if a file differs from its digest.
    """
    folder = root / split
    expected = manifest.splits[split]
    if verify:
        _verify(folder, expected)
    table = read_table(folder / "rows.parquet", PACKED_ROWS)
    inputs = open_inputs(folder, tuple(expected.shape))
    if inputs.shape != (expected.rows, *expected.shape) or table.num_rows != expected.rows:
        raise SchemaError(
            f"{folder} has inputs {inputs.shape} and {table.num_rows} rows, "
            f"expected {expected.rows} of {expected.shape}. {_REPACK}"
        )
    return PackedSplit(
        inputs=inputs,
        targets=_targets(folder, expected, table, len(manifest.classes)),
        weights=table["weight"].to_numpy(),
        leaked=table["leaked"].to_numpy(),
        ids=table["id"].to_pylist(),
        sources=table["source"].to_pylist(),
    )


def _targets(
    folder: Path, expected: PackedSplitManifest, table: pa.Table, num_classes: int
) -> NDArray[Any]:
    if _LABELS not in expected.files:
        return np.asarray(table["target"].to_numpy())
    labels = _mapped(folder / _LABELS)
    if labels.shape != (expected.rows, num_classes):
        raise SchemaError(
            f"{folder / _LABELS} has the shape {labels.shape}, expected "
            f"{(expected.rows, num_classes)}. {_REPACK}"
        )
    return labels


def open_inputs(folder: Path, row_shape: tuple[int, ...]) -> Inputs:
    """Map the inputs of a split into memory. Raises SchemaError if they are not readable."""
    if (folder / JPEG).exists():
        return JpegInputs(folder, row_shape)
    return _mapped(folder / _PIXELS)


def stored_bytes(inputs: Inputs) -> int:
    """Return the number of bytes that all rows of `inputs` occupy as stored."""
    if isinstance(inputs, JpegInputs):
        return inputs.num_bytes
    return int(len(inputs) * np.prod(inputs.shape[1:], dtype=np.int64) * inputs.dtype.itemsize)


def file_span(inputs: Inputs, begin: int, end: int) -> FileSpan | None:
    """Return the bytes that store the rows in [begin, end); None if they are not in a file."""
    if isinstance(inputs, JpegInputs):
        mapped, first, last = inputs.file_bytes(begin, end)
    elif isinstance(inputs, np.memmap):
        mapped, row_bytes = inputs, inputs.strides[0]
        first, last = (inputs.offset + row * row_bytes for row in (begin, end))
    else:
        return None
    mapping: Any = mapped.base
    if not isinstance(mapping, mmap.mmap):  # a part of a mapped array
        return None
    return FileSpan(Path(str(mapped.filename)), first, last, mapping)


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path} is not a readable array: {error}. {_REPACK}") from error
    return array


def _verify(folder: Path, expected: PackedSplitManifest) -> None:
    for name, sha256 in expected.files.items():
        found = files.sha256_file(folder / name)
        if found != sha256:
            raise IntegrityError(
                f"{folder / name} was altered: SHA-256 {found}, expected {sha256}. {_REPACK}"
            )
