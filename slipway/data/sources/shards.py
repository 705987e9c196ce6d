"""Finds the files of a table: one, or Parquet or CSV shards of the same columns in a folder.

The name of a shard may give the split of its rows, as the hub writes it:
`train-00000-of-00002.parquet`. Parquet files are also read here.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.data.engine.scratch import store_table
from slipway.data.sources.formats.csv_files import check_names, csv_names
from slipway.data.sources.shard_types import common_type, plain_type
from slipway.data.sources.text_format import TextFormat, is_list, list_texts
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
_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 12
_BUFFER_BYTES = 1 << 20  # read at once from a Parquet file, in place of whole row groups


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


def is_csv(path: Path) -> bool:
    """Return True if a file's name ends like that of a CSV file."""
    return path.suffix.lower() == ".csv"


def table_files(table: Path) -> list[Path]:
    """Return the files of a table in row order: the file itself, or the shards in its folder.

    The shards are the Parquet files, or the CSV files if there are none.
    """
    if not table.is_dir():
        return [table]
    files = [path for path in table.iterdir() if path.is_file() and not path.name.startswith(".")]
    shards = [path for path in files if is_parquet(path)] or [
        path for path in files if is_csv(path)
    ]
    splits = shard_splits(shards)

    def order(path: Path) -> tuple[int, str]:
        return (READ_ORDER.index(splits[path]) if path in splits else 0, path.name)

    return sorted(shards, key=order)


def check_shards(shards: Sequence[Path], encoding: str) -> None:
    """Raise DataError if the shards have different columns, or if some are missing.

    Columns may differ in type if there is a common one. `encoding` is that of CSV files.
    """
    schemas = _schemas(shards, encoding)
    first, expected = next(iter(schemas.items()))
    problems = []
    for shard, found in schemas.items():
        if difference := _difference(found, expected):
            problems.append(f"  {shard.name}: {difference}")
        else:
            expected = {
                name: common_type([kind, found[name]]) or kind for name, kind in expected.items()
            }
    if problems:
        raise DataError(
            f"data.path {str(first.parent)!r} holds {len(shards)} {_format(first)} files, expected "
            f"one, or shards with the columns of {first.name}, of the same or similar types:\n"
            + "\n".join(problems)
            + "\nPoint data.path at the one that is meant, or move the others out."
        )
    _check_shards_are_complete(shards)


def _format(shard: Path) -> str:
    return "CSV" if is_csv(shard) else "Parquet"


def _schemas(shards: Sequence[Path], encoding: str) -> dict[Path, dict[str, pa.DataType]]:
    """Return the columns of the shards that have rows; of all of them if none has."""
    if is_csv(shards[0]):
        return {shard: dict.fromkeys(csv_names(shard, encoding), pa.string()) for shard in shards}
    found = {shard: parquet_columns(shard) for shard in shards if has_rows(shard)}
    return found or {shard: parquet_columns(shard) for shard in shards}


def has_rows(path: Path) -> bool:
    """Return True if a Parquet file has rows; without, its types say nothing."""
    with parquet_errors(path):
        return bool(pq.read_metadata(path).num_rows)


def parquet_columns(path: Path) -> dict[str, pa.DataType]:
    """Return the type of each column of a Parquet file."""
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
        if name in expected and common_type([kind, expected[name]]) is None
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
            f"the {_format(shards[0])} files in {str(shards[0].parent)!r} name splits, but "
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


def listed(names: Sequence[str], num_names: int | None = None) -> str:
    """Return up to `MAX_SHOWN` names as one text, such as "a, b, c and 5 more".

    `num_names` is the number of all names, if `names` has only the first ones.
    """
    shown = ", ".join(names[:MAX_SHOWN])
    num_others = (len(names) if num_names is None else num_names) - MAX_SHOWN
    return f"{shown} and {num_others} more" if num_others > 0 else shown


def read_parquet(path: Path, wanted: Collection[str] | None, written: TextFormat) -> pa.Table:
    """Read the `wanted` columns of a file, in batches if it is large.

    Text of any Arrow type becomes `pa.string()`, and lists in columns that may hold them JSON text.
    """
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    names = [name for name in file.schema_arrow.names if wanted is None or name in wanted]
    check_names(path, names)
    metadata = file.metadata
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    num_bytes = sum(group.total_byte_size for group in groups)
    rows_of_a_block = _BLOCK_BYTES * metadata.num_rows // max(1, num_bytes)
    size = min(max(1, rows_of_a_block), _BLOCK_ROWS)
    fields = pa.schema([file.schema_arrow.field(name) for name in names])
    empty = pa.RecordBatch.from_pylist([], fields)
    schema, num_rows = _plain_cells(empty, written).schema, 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal num_rows
        for batch in file.iter_batches(size, columns=wanted and names, use_threads=False):
            batch.validate(full=True)  # a damaged file may contain invalid text
            num_rows += batch.num_rows
            yield _plain_cells(batch, written)

    is_large = num_bytes > _BLOCK_BYTES
    table = (store_table if is_large else pa.Table.from_batches)(batches(), schema)
    if num_rows != metadata.num_rows:  # pyarrow does not compare the numbers of rows
        declared = metadata.num_rows
        raise pa.ArrowInvalid(f"it has {num_rows} rows, but its metadata declares {declared}")
    return table


def _plain_cells(batch: pa.RecordBatch, written: TextFormat) -> pa.RecordBatch:
    """Convert text of any Arrow type to `pa.string()`, and lists to JSON text.

    Lists are converted only in columns that may hold them, see `TextFormat.takes_lists`.
    """
    names = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    return pa.record_batch(
        [_plain(cells, written.takes_lists(name)) for name, cells in columns], names
    )


def _plain(cells: pa.Array, takes_lists: bool) -> pa.Array:
    kind = plain_type(cells.type)
    if kind != cells.type:
        return cells.cast(kind)
    return list_texts(cells.to_pylist()) if takes_lists and is_list(kind) else cells
