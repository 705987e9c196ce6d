"""Tables of several Parquet files: a folder whose shards have one schema, as the Hugging Face hub writes them.

The names of the shards may say which split their rows belong to: `train-00000-of-00002.parquet`.
"""

import re
from collections.abc import Mapping, Sequence
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
_PARQUET = (".parquet", ".pq")
_READ_ORDER = ("test", "val", "train")  # of equal rows the first is kept: test stays whole
_MAX_SHOWN = 5


def named_split(name: str) -> str | None:
    """Return the split that a folder is named after, in any case, or None."""
    return _SPLIT_OF.get(name.casefold())


def is_parquet(path: Path) -> bool:
    """True for a Parquet file, by its ending."""
    return path.suffix.lower() in _PARQUET


def table_files(table: Path) -> list[Path]:
    """Return the files of a table in row order: itself, or the shards in its folder."""
    if not table.is_dir():
        return [table]
    shards = [
        path
        for path in table.iterdir()
        if path.is_file() and is_parquet(path) and not path.name.startswith(".")
    ]
    splits = shard_splits(shards)
    return sorted(
        shards,
        key=lambda path: (_READ_ORDER.index(splits[path]) if path in splits else 0, path.name),
    )


def check_shards(shards: Sequence[Path]) -> None:
    """DataError if shards differ in their columns or are missing."""
    schemas = {shard: _columns(shard) for shard in shards}
    first, expected = next(iter(schemas.items()))
    problems = [
        f"  {shard.name}: {_difference(found, expected)}"
        for shard, found in schemas.items()
        if found != expected
    ]
    if problems:
        raise DataError(
            f"data.path {str(first.parent)!r} holds {len(shards)} Parquet files, expected one, or shards with the columns and types of "
            f"{first.name}:\n"
            + "\n".join(problems)
            + "\nPoint data.path at the one that is meant, or move the others out."
        )
    _check_shards_are_complete(shards)


def _columns(path: Path) -> dict[str, pa.DataType]:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        text = str(error).rstrip(".")
        raise DataError(
            f"data.path {str(path)!r} is not a readable Parquet file: {text}. Write or copy the file again."
        ) from error
    return {field.name: field.type for field in schema}


def _difference(found: Mapping[str, pa.DataType], expected: Mapping[str, pa.DataType]) -> str:
    lacking = [name for name in expected if name not in found]
    further = [name for name in found if name not in expected]
    other = [
        f"{name} is {kind}, not {expected[name]}"
        for name, kind in found.items()
        if expected.get(name, kind) != kind
    ]
    parts = (
        [f"lacks {listed(lacking)}"] * bool(lacking)
        + [f"also has {listed(further)}"] * bool(further)
        + other[:_MAX_SHOWN]
    )
    return "; ".join(parts)


def shard_splits(shards: Sequence[Path]) -> dict[Path, str]:
    """Return the split in each shard's name, if at least two splits are named; else nothing."""
    said = {shard: split for shard in shards if (split := _split_of_shard(shard))}
    return said if len(set(said.values())) >= 2 else {}


def check_shard_splits(shards: Sequence[Path], splits: Mapping[Path, str]) -> None:
    """DataError if only some shards name a split, or none is for training."""
    others = [shard.name for shard in shards if shard not in splits]
    problems = [f"{listed(others)} name no split, expected train, val or test"] if others else []
    problems += [] if "train" in splits.values() else ["none of them is for training"]
    if problems:
        raise DataError(
            f"the Parquet files in {str(shards[0].parent)!r} name splits, but {' and '.join(problems)}. Move files out of the folder, "
            "or set data.split_folders to pool: the rows of all files are then one set, which Slipway splits."
        )


def _check_shards_are_complete(shards: Sequence[Path]) -> None:
    """DataError if the names of the shards ("train-00000-of-00002") show that some are missing."""
    series: dict[tuple[str, int], set[int]] = {}
    for shard in shards:
        match = _SHARD.fullmatch(shard.stem.casefold())
        if match and match["index"]:
            series.setdefault((match["name"], int(match["count"])), set()).add(int(match["index"]))
    missing = [
        f"{name}-{index:05d}-of-{count:05d}"
        for (name, count), found in series.items()
        for index in sorted(set(range(min(count, len(found) + _MAX_SHOWN + 1))) - found)
    ]
    if missing:
        raise DataError(
            f"{str(shards[0].parent)!r} lacks the shards {listed(missing)}, which the names of the others promise. "
            "Copy them there, or rename the others if this is all."
        )


def _split_of_shard(shard: Path) -> str | None:
    match = _SHARD.fullmatch(shard.stem.casefold())
    return named_split(match["name"]) if match else None


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:_MAX_SHOWN]) + (
        f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    )
