"""Writes the values that a user's transform found on each image to `transform.parquet`.

The file lies beside the pixels of a split.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.inputs.user_function import Values
from slipway.system import files
from slipway.system.errors import DataError

TRANSFORM_TABLE = "transform.parquet"
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def write_transform_table(
    store: Path, ids: Mapping[str, pa.ChunkedArray], values: Mapping[str, list[Values]]
) -> None:
    """Write a table for each split: the row id, and a column for every name in any split.

    A value that an image lacks is null. Raises DataError, which names every column with values of
    different types.
    """
    schema = _schema([found for split in values.values() for found in split])
    for split, found in values.items():
        columns = {name: [row.get(name) for row in found] for name in schema.names[1:]}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": ids[split], **columns}, schema=schema), sink)
        files.write_bytes(store / split / TRANSFORM_TABLE, sink.getvalue().to_pybytes())


def _schema(values: list[Values]) -> pa.Schema:
    found: dict[str, set[type]] = {}
    for row in values:
        for name, value in row.items():
            found.setdefault(name, set()).add(type(value))
    problems = [
        f"  {name}: {', '.join(sorted(kind.__name__ for kind in kinds))}"
        for name, kinds in found.items()
        if _type(kinds) is None
    ]
    problems += ["  id: the name is taken"] if "id" in found else []
    if problems:
        raise DataError(
            "precompute.transform gives values of different types under one name:\n"
            + "\n".join(problems)
            + "\nFix the function."
        )
    columns = [pa.field(name, _type(kinds)) for name, kinds in sorted(found.items())]
    return pa.schema([pa.field("id", pa.string(), nullable=False), *columns])


def _type(kinds: set[type]) -> pa.DataType | None:
    if kinds == {int, float}:
        return pa.float64()
    return _TYPES[next(iter(kinds))] if len(kinds) == 1 else None
