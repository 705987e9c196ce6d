"""Converts texts from Python callers: strings, dicts as the service accepts them, or tables."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.sources.raw_tables import cell_text, stored_column
from slipway.inference.json_rows import plain_row
from slipway.inference.rows import ReadRows, at_row, batches_of, chunked, require_columns
from slipway.inputs.texts import TextContract, encode_texts, read_text, text_faults
from slipway.system.errors import CellError, DataError

_EXPECTED = "a text, a dict of columns, a DataFrame, a pyarrow table, or a list of texts or dicts"


def read_text_table(table: pa.Table, contract: TextContract) -> ReadRows:
    """Read the text columns of the contract from a table.

    Raises DataError if a column is missing or of an unknown type.
    """
    require_columns(table.column_names, contract.columns)
    columns = {name: _cells(name, chunked(table[name])) for name in contract.columns}
    faults: dict[int, CellError] = {}
    texts = []
    for position in range(table.num_rows):
        row = {name: cells[position] for name, cells in columns.items()}
        for fault in islice(text_faults(row, contract), 1):
            faults[position] = fault
        if position not in faults:
            texts.append(read_text(row, contract))
    good = np.setdiff1d(np.arange(table.num_rows), list(faults)).astype(np.int64)
    return ReadRows(encode_texts(texts, contract), good, faults)


def _cells(name: str, column: pa.ChunkedArray) -> list[str | None]:
    """Return the cells of a column as text, read as by the stages; None for an empty cell."""
    raw = stored_column(name, column)
    if raw.stored == "other":
        raise DataError(f"the table has {raw.unreadable}.")
    texts = [*map(cell_text, raw.values.to_pylist()), None]
    return [texts[code] for code in raw.codes]


class TextReader:
    """Converts texts of one contract to network inputs."""

    def __init__(self, contract: TextContract) -> None:
        self._contract = contract

    def read(self, given: object, batch_size: int) -> tuple[Iterator[NDArray[Any]], bool]:
        """Return batches of at most `batch_size` inputs, and True unless `given` is one text.

        A CellError names the column, and the position of a bad row.
        """
        return batches_of(
            given, batch_size, (str, Mapping), self._encode, self._table_batches, _EXPECTED
        )

    def close(self) -> None:
        """Do nothing: this reader has no threads."""

    def _encode(self, items: Sequence[object], first: int | None) -> NDArray[Any]:
        texts = [
            self._text(item, None if first is None else first + number)
            for number, item in enumerate(items)
        ]
        return encode_texts(texts, self._contract)

    def _text(self, row: object, position: int | None) -> str:
        """Read the text of one string or dict. `position` is its place in a list, for errors."""
        names = self._contract.columns
        if isinstance(row, str) and len(names) == 1:
            row = {names[0]: row}
        if not isinstance(row, Mapping):
            place = "the item" if position is None else f"row {position}"
            expected = "a text or a dict" if len(names) == 1 else f"a dict with {', '.join(names)}"
            raise DataError(f"{place} is {type(row).__name__}, expected {expected}.")
        try:
            return read_text(plain_row(row), self._contract)
        except CellError as error:
            raise (error if position is None else at_row(position, error)) from None

    def _table_batches(self, table: pa.Table, batch_size: int) -> Iterator[NDArray[Any]]:
        for begin in range(0, table.num_rows, batch_size):
            rows = read_text_table(table.slice(begin, batch_size), self._contract)
            for position, fault in sorted(rows.faults.items()):
                raise at_row(begin + position, fault)
            yield rows.inputs
