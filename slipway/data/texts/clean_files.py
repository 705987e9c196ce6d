"""Reads and writes the file of cleaned texts.

texts.parquet    the text columns of the kept rows, as in the raw data, under their ids
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from slipway.data.engine.rows import read_table, write_table
from slipway.data.tables.clean_files import ID_COLUMN

_TEXTS = "texts.parquet"


def text_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of `texts.parquet` for text columns of these names."""
    return pa.schema([(ID_COLUMN, pa.string()), *((name, pa.string()) for name in columns)])


def write_texts(folder: Path, texts: pa.Table, columns: Sequence[str]) -> None:
    """Write the texts of the kept rows to `folder`."""
    write_table(folder / _TEXTS, texts, text_schema(columns))


def read_texts(folder: Path, columns: Sequence[str]) -> pa.Table:
    """Read the texts. Raises SchemaError if the file is missing or has other columns."""
    return read_table(folder / _TEXTS, text_schema(columns))
