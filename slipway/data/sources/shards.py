"""Finds Parquet files and folders of shards with one schema, as the Hugging Face hub writes them.

The name of a shard may give the split of its rows: `train-00000-of-00002.parquet`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.system.errors import DataError

_SPLIT_OF = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    "test": "test",
    "testing": "test",
}
_SHARD = re.compile(r"(?P<name>[a-z]+)([-_]?\d+|-(?P<index>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?)?")
PARQUET = (".parquet", ".pq")
# Every error that pyarrow raises for damaged files.
_PARQUET_FAULTS = (
    pa.ArrowException,
    OSError,
    UnicodeDecodeError,
    MemoryError,
    OverflowError,
    ValueError,
)
READ_ORDER = ("test", "val", "train")  # the first of equal rows is kept, so test stays complete
MAX_SHOWN = 5


def named_split(name: str) -> str | None:
    """Return the split that a folder is named after, in any case, or None."""
    return _SPLIT_OF.get(name.casefold())


def is_parquet(path: Path) -> bool:
    """Return True if a file's name ends like that of a Parquet file."""
    return path.suffix.lower() in PARQUET


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Convert any error in reading a Parquet file to a DataError that names the file."""
    try:
        yield
    except _PARQUET_FAULTS as error:
        text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(
            f"data.path {str(path)!r} is not a readable Parquet file: {text}. "
            "Write or copy the file again."
        ) from error


def table_files(table: Path) -> list[Path]:
    """Return the files of a table in row order: the file itself, or the shards in its folder."""
    if not table.is_dir():
        return [table]
    files = (path for path in table.iterdir() if path.is_file() and is_parquet(path))
    shards = [path for path in files if not path.name.startswith(".")]
    splits = shard_splits(shards)

    def order(path: Path) -> tuple[int, str]:
        return (READ_ORDER.index(splits[path]) if path in splits else 0, path.name)

    return sorted(shards, key=order)


def check_shards(shards: Sequence[Path]) -> None:
    """Raise DataError if the shards have different columns, or if some are missing."""
    schemas = {shard: _columns(shard) for shard in shards}
    first, expected = next(iter(schemas.items()))
    problems = [
        f"  {shard.name}: {_difference(found, expected)}"
        for shard, found in schemas.items()
        if found != expected
    ]
    if problems:
        raise DataError(
            f"data.path {str(first.parent)!r} holds {len(shards)} Parquet files, expected one, "
            f"or shards with the columns and types of {first.name}:\n"
            + "\n".join(problems)
            + "\nPoint data.path at the one that is meant, or move the others out."
        )
    _check_shards_are_complete(shards)


def _columns(path: Path) -> dict[str, pa.DataType]:
    with parquet_errors(path):
        return {field.name: field.type for field in pq.read_schema(path)}


def _difference(found: Mapping[str, pa.DataType], expected: Mapping[str, pa.DataType]) -> str:
    parts = []
    if lacking := [name for name in expected if name not in found]:
        parts.append(f"lacks {listed(lacking)}")
    if further := [name for name in found if name not in expected]:
        parts.append(f"also has {listed(further)}")
    other = [
        f"{name} is {kind}, not {expected[name]}"
        for name, kind in found.items()
        if expected.get(name, kind) != kind
    ]
    return "; ".join(parts + other[:MAX_SHOWN])


def shard_splits(shards: Sequence[Path]) -> dict[Path, str]:
    """Return the split that each shard's name gives, if the names give at least two splits.

    Otherwise the result is empty.
    """
    splits = {shard: split for shard in shards if (split := _split_of_shard(shard))}
    return splits if len(set(splits.values())) >= 2 else {}


def check_shard_splits(shards: Sequence[Path], splits: Mapping[Path, str]) -> None:
    """Raise DataError if only some shards name a split, or if none is for training."""
    problems = []
    if others := [shard.name for shard in shards if shard not in splits]:
        problems.append(f"{listed(others)} name no split, expected train, val or test")
    if "train" not in splits.values():
        problems.append("none of them is for training")
    if problems:
        raise DataError(
            f"the Parquet files in {str(shards[0].parent)!r} name splits, but "
            f"{' and '.join(problems)}. Move files out of the folder, or set data.split_folders to "
            "pool: the rows of all files are then one set, which Slipway splits."
        )


def _check_shards_are_complete(shards: Sequence[Path]) -> None:
    """Raise DataError if the names of the shards show that some are missing.

    A name such as "train-00000-of-00002" gives the number of shards.
    """
    series: dict[tuple[str, int], set[int]] = {}
    for shard in shards:
        match = _SHARD.fullmatch(shard.stem.casefold())
        if match and match["index"]:
            series.setdefault((match["name"], int(match["count"])), set()).add(int(match["index"]))
    missing = [
        f"{name}-{index:05d}-of-{count:05d}"
        for (name, count), found in series.items()
        for index in sorted(set(range(min(count, len(found) + MAX_SHOWN + 1))) - found)
    ]
    if missing:
        raise DataError(
            f"{str(shards[0].parent)!r} lacks the shards {listed(missing)}, which the names of the "
            "others imply. Copy them there, or rename the others if the data is complete without "
            "them."
        )


def _split_of_shard(shard: Path) -> str | None:
    match = _SHARD.fullmatch(shard.stem.casefold())
    return named_split(match["name"]) if match else None


def listed(names: Sequence[str]) -> str:
    """Return up to `MAX_SHOWN` names as one text, such as "a, b, c and 5 more"."""
    shown = ", ".join(names[:MAX_SHOWN])
    num_others = len(names) - MAX_SHOWN
    return f"{shown} and {num_others} more" if num_others > 0 else shown
