"""Defines the schemas of the tables between the data stages, and reads and writes these tables.

`rows.parquet` holds the kept samples, `quarantine.parquet` the refused ones, and `purged.parquet`
those that a split by time cannot use. No row disappears: kept + quarantined == read, and
split + purged == kept.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.system import files
from slipway.system.contract import Record, parse_record
from slipway.system.errors import SchemaError

SPLITS = ("train", "val", "test")
ID_DIGITS = 32  # a row's id begins with so many digits of its SHA-256 in hex, see `row_ids`
_GROUP_ROWS = 1 << 17  # rows of a Parquet file that are in memory while it is written
# The two hex digits of each byte.
_HEX_DIGITS = np.frombuffer(bytes(range(256)).hex().encode(), np.uint8).reshape(256, 2)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


ROWS = pa.schema(
    [
        # The first 32 hex digits of sha256, so independent of machines and file names. The second
        # of equal rows of a table has "-2" appended, the third "-3", and so on.
        _required("id", pa.string()),
        _required("source", pa.string()),  # path inside the data set, or row number
        pa.field("label", pa.string()),  # null for a numeric target
        pa.field("target", pa.float64()),  # null for classes
        # Samples of a group stay in one split. Null without data.group_column.
        pa.field("group", pa.string()),
        pa.field("time", pa.float64()),  # days since 1970 UTC; null without data.time_column
        pa.field("weight", pa.float64()),  # in the loss; null without data.weight_column
        # "train", "val" or "test" as the user says; null without data.split_column.
        pa.field("given_split", pa.string()),
        # Smallest id among the near duplicates of the row; null for a row without any.
        pa.field("cluster", pa.string()),
        pa.field("width", pa.int32()),  # width of the upright image; null for a row of a table
        pa.field("height", pa.int32()),
        _required("bytes", pa.int64()),
        _required("sha256", pa.string()),  # digest of the encoded image, or of a table's typed row
        _required("flags", pa.list_(pa.string())),  # rules that the row breaks and that only flag
        # Changes to the row: "label: Cat -> cat", "exif: turned by 90".
        _required("corrections", pa.list_(pa.string())),
    ]
)
SPLIT_ROWS = pa.schema(
    [
        *ROWS,
        _required("split", pa.string()),  # "train", "val" or "test"
        pa.field("fold", pa.int32()),  # numbered from 0; null for test rows, and without folds
        # A val or test row with a duplicate, or a row of its group, in another split.
        _required("leaked", pa.bool_()),
    ]
)
PURGED = pa.schema(
    [
        *ROWS,
        _required("split", pa.string()),  # split in which its time lies
        # The later split that its group or cluster reaches, the reason for leaving it out.
        _required("reaches", pa.string()),
    ]
)
QUARANTINE = pa.schema(
    [
        _required("source", pa.string()),
        _required("rule", pa.string()),
        _required("detail", pa.string()),
        # "error": not usable; "unlabelled": without a target; "duplicate": already present
        _required("severity", pa.string()),
    ]
)
PACKED_ROWS = pa.schema(
    [
        _required("id", pa.string()),
        _required("source", pa.string()),
        _required("target", pa.float64()),  # class index, or the number itself
        _required("weight", pa.float64()),  # in the loss; 1 without data.weight_column
        _required("leaked", pa.bool_()),  # the same as in SPLIT_ROWS
    ]
)


def hex_strings(digests: NDArray[np.uint8]) -> pa.Array:
    """Convert digests (N, B) uint8 to N hex strings, without making N Python objects."""
    num_rows, num_bytes = digests.shape
    offsets = np.arange(num_rows + 1, dtype=np.int32) * 2 * num_bytes
    digits = pa.py_buffer(_HEX_DIGITS[digests])
    return pa.StringArray.from_buffers(num_rows, pa.py_buffer(offsets), digits)


def row_ids(digests: NDArray[np.uint8], numbers: NDArray[np.int64] | None = None) -> pa.Array:
    """Return the ids of rows with these digests, (N, B) uint8.

    `numbers` (N,) counts equal rows from 1; None if all rows differ. The first of equal rows has
    the plain digest as its id, the third one `DIGEST-3`.
    """
    plain = hex_strings(digests[:, : ID_DIGITS // 2])
    if numbers is None or (numbers == 1).all():
        return plain
    texts = pa.array(numbers).cast(pa.string())
    numbered = pc.binary_join_element_wise(plain, texts, "-")
    return pc.if_else(pa.array(numbers > 1), numbered, plain)


def content_of(row_id: str) -> str:
    """Return the part of an id that equal rows share: the beginning of the content's digest."""
    return row_id[:ID_DIGITS]


def write_table(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write `table` atomically. Raises SchemaError if it does not have `schema`."""
    _check(path, table.schema, schema)
    with files.new_file(path) as file:
        pq.write_table(table, file, row_group_size=_GROUP_ROWS)


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table. Raises SchemaError if it is missing, unreadable or has another schema."""
    try:
        table = pq.read_table(path, partitioning=None)
    except FileNotFoundError:
        raise SchemaError(
            f"{path} is missing. Run the stage that writes it: `slipway run`."
        ) from None
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"{path} is not a readable Parquet file: {error}. "
            "Run the stage that writes it again: `slipway run`."
        ) from error
    _check(path, table.schema, schema)
    return table


def read_record(kind: type[Record], path: Path, stage: str) -> Record:
    """Read a JSON record that `stage` wrote. Raises SchemaError if it is missing or invalid."""
    try:
        payload = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise SchemaError(f"{path} is missing. Run `dvc repro {stage}`.") from None
    return parse_record(kind, path, payload, SchemaError, f"Run `dvc repro --force {stage}`.")


def _check(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if not found.equals(expected):
        raise SchemaError(
            f"{path} has the columns\n{found.to_string()}\nexpected\n{expected.to_string()}"
        )


def row_numbers(sources: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the row number at the start of each source, (N,), for sorting; -1 without a number."""
    found = pc.extract_regex(sources, r"^(?P<number>[0-9]{1,18})(?::|$)")
    return pc.struct_field(found, "number").cast(pa.int64()).fill_null(-1)
