"""Converts table rows from Python callers: dicts as the service accepts them, or whole tables.

Cells of a DataFrame or a file are read by the same code as for training, so text such as "1,200" or
"yes" means the same. Unlike in dicts, columns that the model does not use are ignored in tables.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.sources.formats.json_lines import mixed_texts
from slipway.data.sources.raw_tables import stored_column
from slipway.data.sources.text_format import POINT, USUAL_FORMAT, NumberMarks, TextFormat
from slipway.data.tables.cells import BAD, MISSING, TypedColumn, typed_column
from slipway.data.tables.source import is_out_of_range
from slipway.inference.json_rows import plain_cell, plain_row
from slipway.inputs.columns import (
    Column,
    ColumnContract,
    encode,
    encode_rows,
    expected_number,
    read_cell,
    read_row,
)
from slipway.system.errors import CellError, DataError, nearest

_BLOCK_ROWS = 1 << 13  # of a table, read at once
_EXPECTED = "a dict of columns, a DataFrame, a pyarrow table, or a list of dicts"


@dataclass(frozen=True)
class ReadRows:
    """The rows of a table as network inputs, and the faults of rows that break the contract."""

    inputs: NDArray[Any]  # (good, ...)
    positions: NDArray[np.int64]  # (good,) of these rows in the table
    faults: dict[int, CellError]  # the first fault of each other row, by position


def read_table(table: pa.Table, contract: ColumnContract, written: TextFormat) -> ReadRows:
    """Read the columns of the contract from a table.

    Raises DataError if a column is missing or of an unknown type.
    """
    require_columns(table.column_names, [column.name for column in contract.columns])
    faults: dict[int, CellError] = {}
    cells: dict[str, NDArray[Any]] = {}
    for column in contract.columns:
        raw = replace(stored_column(column.name, chunked(table[column.name])), written=written)
        if raw.stored == "other":
            raise DataError(f"the table has {raw.unreadable}.")
        typed = typed_column(raw, column.kind, column.map)
        cells[column.name] = typed.cells
        for row in np.flatnonzero(_is_refused(typed, column)).tolist():
            faults.setdefault(row, _fault(typed, column, row))
    good = np.setdiff1d(np.arange(table.num_rows), list(faults)).astype(np.int64)
    try:
        return ReadRows(_encoded(cells, good, contract), good, faults)
    except CellError:  # names no row
        for row in good.tolist():
            try:
                _encoded(cells, np.array([row]), contract)
            except CellError as error:
                faults[row] = error.with_traceback(None)
    good = np.setdiff1d(good, list(faults))
    return ReadRows(_encoded(cells, good, contract), good, faults)


def as_in_training(contract: ColumnContract, written: TextFormat) -> TextFormat:
    """Return the notation with the marks of numbers that the training data has."""
    return written._replace(marks=NumberMarks(contract.decimal, contract.thousands))


def require_columns(names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise DataError if a table lacks `wanted` columns; the error suggests similar names."""
    missing = []
    for name in wanted:
        if name not in names:
            close = nearest(name, names)
            missing.append(f"{name!r}{f' (there is {close[0]!r})' if close else ''}")
    if missing:
        raise DataError(
            f"the table has no column {', '.join(missing)}. Rename or add it; leave cells empty "
            "where the value is missing."
        )


def chunked(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray:
    """Return a pyarrow column as a chunked array, whether or not it is one already."""
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


def _encoded(
    cells: Mapping[str, NDArray[Any]], rows: NDArray[np.int64], contract: ColumnContract
) -> NDArray[np.float32]:
    return encode({name: column[rows] for name, column in cells.items()}, contract)


def _is_refused(typed: TypedColumn, column: Column) -> NDArray[np.bool_]:
    """Return a mask (N,) of the cells that the column does not allow."""
    is_missing = typed.cell_states == MISSING
    refused = typed.cell_states == BAD
    if _has_other_unit(typed, column):
        refused = ~is_missing
    if column.required or not column.takes_missing:
        refused = refused | is_missing
    if column.kind == "category":
        if not column.takes_missing:
            refused = refused | ~(is_missing | np.isin(typed.cells, column.categories))
    else:
        refused = refused | is_out_of_range(column, typed.cells)
    return np.asarray(refused)


def _has_other_unit(typed: TypedColumn, column: Column) -> bool:
    """Return True if the numbers have another unit than in training; without one they are right."""
    return column.unit is not None and typed.unit not in ("", column.unit)


def _fault(typed: TypedColumn, column: Column, row: int) -> CellError:
    """Return the fault of the refused cell in a row, with the same message as the service's."""
    state, value = typed.cell_states[row], typed.cells[row]
    if state == BAD or (state != MISSING and _has_other_unit(typed, column)):
        value = typed.raw.values[int(typed.raw.codes[row])].as_py()
        marks = typed.raw.written.marks
        if column.unit or (column.kind == "number" and marks != POINT):
            usual = f"{marks.number_text(float(column.example()))} {column.unit or ''}".strip()
            detail = f"found {str(value)[:80]!r}, expected {expected_number(column)} as {usual!r}"
            return CellError("type_violation", column.name, detail)
    elif column.kind == "boolean":
        value = bool(value)
    try:
        read_cell(None if state == MISSING else value, column)
    except CellError as error:
        return error.with_traceback(None)
    detail = f"found {str(value)[:80]!r}, which is not a {column.kind} here"
    return CellError("type_violation", column.name, detail)


class RowReader:
    """Converts rows of one contract to network inputs."""

    def __init__(self, contract: ColumnContract) -> None:
        self._contract = contract
        self._written = as_in_training(contract, USUAL_FORMAT)

    def read(self, given: object, batch_size: int) -> tuple[Iterator[NDArray[Any]], bool]:
        """Return batches of at most `batch_size` inputs, and True unless `given` is one dict.

        A CellError names the column, and the position of a bad row.
        """
        table = table_of(given, self._written.marks)
        given = given if table is None else table
        return batches_of(
            given, batch_size, (Mapping,), self._encode, self._table_batches, _EXPECTED
        )

    def close(self) -> None:
        """Do nothing: this reader has no threads."""

    def _encode(self, rows: Sequence[object], first: int | None) -> NDArray[np.float32]:
        """Encode rows of a list from position `first` on; None for a row that is no list."""
        cells = []
        for position, row in enumerate(rows, start=first or 0):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"row {position} is {type(row).__name__}, expected a dict of columns."
                )
            try:
                cells.append(read_row(plain_row(row), self._contract))
                # By itself, so that the error for a number that is too large names its row.
                encode_rows(cells[-1:], self._contract)
            except CellError as error:
                raise (error if first is None else at_row(position, error)) from None
        return encode_rows(cells, self._contract)

    def _table_batches(self, table: pa.Table, batch_size: int) -> Iterator[NDArray[Any]]:
        block_rows = max(1, _BLOCK_ROWS // batch_size) * batch_size
        for begin in range(0, table.num_rows, block_rows):
            rows = read_table(table.slice(begin, block_rows), self._contract, self._written)
            for position, fault in sorted(rows.faults.items()):
                raise at_row(begin + position, fault)
            for start in range(0, len(rows.inputs), batch_size):
                yield rows.inputs[start : start + batch_size]


def batches_of(
    given: object,
    batch_size: int,
    item: tuple[type, ...],
    encode: Callable[[Sequence[object], int | None], NDArray[Any]],
    table_batches: Callable[[pa.Table, int], Iterator[NDArray[Any]]],
    expected: str,
) -> tuple[Iterator[NDArray[Any]], bool]:
    """Return batches of the rows or texts that a caller gives, and True unless it is one `item`.

    `encode` also takes the position of its first item in the list. Raises DataError if `given` is
    not `expected`.
    """
    table = table_of(given)
    if table is not None:
        return table_batches(table, batch_size), True
    if isinstance(given, item):
        return iter([encode([given], None)]), False
    if not isinstance(given, (list, tuple)):
        raise DataError(f"found {type(given).__name__}, expected {expected}.")
    begins = range(0, len(given), batch_size)
    return (encode(given[begin : begin + batch_size], begin) for begin in begins), True


def at_row(position: int, error: CellError) -> CellError:
    """Return a copy of a cell's error that names the position of its row."""
    return CellError(error.rule, f"rows[{position}].{error.column}", error.detail)


def table_of(given: object, marks: NumberMarks = POINT) -> pa.Table | None:
    """Return a DataFrame or a pyarrow table as a pyarrow table; None for anything else.

    Numbers among text get these marks.
    """
    pandas = sys.modules.get("pandas")  # a DataFrame exists only if its caller imported pandas
    if pandas is None or not isinstance(given, pandas.DataFrame):
        return given if isinstance(given, pa.Table) else None
    if not given.columns.is_unique:
        twice = sorted(set(given.columns[given.columns.duplicated()].astype(str)))
        raise DataError(
            f"the DataFrame has the column {', '.join(twice)} more than once. Rename or drop one."
        )
    return pa.table({str(name): _series(column, marks) for name, column in given.items()})


def _series(column: Any, marks: NumberMarks) -> pa.Array:
    """Convert a column of a DataFrame; cells of mixed types become text, as in training."""
    try:
        return pa.Array.from_pandas(column)
    except (pa.ArrowException, OverflowError):
        return mixed_texts((plain_cell(cell) for cell in column), marks)
