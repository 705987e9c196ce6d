"""The tables between the data stages: what their columns are, written and checked in one place.

`rows.parquet` holds the kept samples, `quarantine.parquet` the refused ones, `purged.parquet` those that a split in time cannot use.
Nothing disappears: kept + quarantined == read, split + purged == kept.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipway.data.engine.scratch import first_bytes
from slipway.system import files
from slipway.system.errors import SchemaError

SPLITS = ("train", "val", "test")
_GROUP_ROWS = 1 << 17  # of a Parquet file are in memory while it is written
_HEXADECIMAL = np.frombuffer(bytes(range(256)).hex().encode(), np.uint8).reshape(
    256, 2
)  # the two digits of each byte
ROWS = pa.schema(
    [
        pa.field(
            "id", pa.string(), nullable=False
        ),  # first 32 hex digits of sha256: stable across machines and names
        pa.field("source", pa.string(), nullable=False),  # path inside the data set, or row number
        pa.field("label", pa.string()),  # null for a numeric target
        pa.field("target", pa.float64()),  # null for classes
        pa.field(
            "group", pa.string()
        ),  # samples of one group stay in one split; null where data.group_column is null
        pa.field("time", pa.float64()),  # days since 1970 UTC; null where data.time_column is null
        pa.field(
            "weight", pa.float64()
        ),  # in the training loss; null where data.weight_column is null
        pa.field(
            "given_split", pa.string()
        ),  # "train", "val" or "test" by the user; null where data.split_column is null
        pa.field(
            "cluster", pa.string()
        ),  # near duplicates of each other: the smallest id among them; null for a row without any
        pa.field("width", pa.int32()),  # of an image, upright; null for a table's row
        pa.field("height", pa.int32()),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field(
            "sha256", pa.string(), nullable=False
        ),  # of the encoded image, or of a table's typed row
        pa.field(
            "flags", pa.list_(pa.string()), nullable=False
        ),  # names of the rules that it breaks and that only flag
        pa.field(
            "corrections", pa.list_(pa.string()), nullable=False
        ),  # what was changed: "label: Cat -> cat", "exif: turned by 90"
    ]
)
SPLIT_ROWS = pa.schema(
    [
        *ROWS,
        pa.field("split", pa.string(), nullable=False),  # "train", "val" or "test"
        pa.field(
            "fold", pa.int32()
        ),  # of a row that is not for testing, counted from 0; null without folds
        pa.field(
            "leaked", pa.bool_(), nullable=False
        ),  # a row of val or test with a twin, or its group, in another split
    ]
)
PURGED = pa.schema(
    [
        *ROWS,
        pa.field("split", pa.string(), nullable=False),  # where its time lies
        pa.field(
            "reaches", pa.string(), nullable=False
        ),  # the later split that its group or cluster reaches, so that the row is left out
    ]
)
QUARANTINE = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field(
            "severity", pa.string(), nullable=False
        ),  # "error": not readable or not usable; "duplicate": already there
    ]
)
PACKED_ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("target", pa.float64(), nullable=False),  # class index, or the number itself
        pa.field(
            "weight", pa.float64(), nullable=False
        ),  # in the training loss, 1 where data.weight_column is null
        pa.field("leaked", pa.bool_(), nullable=False),  # as in SPLIT_ROWS
    ]
)


def hexadecimal(digests: pa.ChunkedArray) -> pa.Array:
    """Return SHA-256 digests of 32 bytes as hex text, without a Python object for each."""
    offsets = np.arange(len(digests) + 1, dtype=np.int32) * 64
    return pa.StringArray.from_buffers(
        len(digests), pa.py_buffer(offsets), pa.py_buffer(_HEXADECIMAL[first_bytes(digests, 32)])
    )


def ids(digests: pa.ChunkedArray) -> pa.Array:
    """Return the id of each row from its SHA-256 of 32 bytes."""
    return pc.utf8_slice_codeunits(hexadecimal(digests), 0, 32)


def write_table(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write `table` atomically; SchemaError if it does not have `schema`."""
    _check(path, table.schema, schema)
    with files.new_file(path) as file:
        pq.write_table(table, file, row_group_size=_GROUP_ROWS)


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table; SchemaError if it is missing, unreadable or has another schema."""
    try:
        table = pq.read_table(path, partitioning=None)
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run the stage that writes it (dvc repro).") from None
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"{path} is not a readable Parquet file: {error}. Run the stage that writes it again (dvc repro)."
        ) from error
    _check(path, table.schema, schema)
    return table


def _check(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if not found.equals(expected):
        raise SchemaError(
            f"{path} has the columns\n{found.to_string()}\nexpected\n{expected.to_string()}"
        )
