"""Yields the rows of text data sets as JSON objects, as clients of the service send them.

The id of each row is computed again from the raw file, so a changed file gives other ids.
"""

from collections.abc import Iterator

from slipway.config.sections import DataParams
from slipway.data.engine.rows import ID_DIGITS
from slipway.data.sources.raw_tables import RawColumn, cell_text
from slipway.data.tables.cells import row_digests
from slipway.data.tables.source import identified_columns, json_row, read_table_of, wanted_rows
from slipway.inputs.texts import TextContract
from slipway.system.errors import DataError

_BLOCK = 1 << 14  # distinct cells that are Python objects at a time


def text_cells(raw: RawColumn) -> Iterator[str]:
    """Yield the distinct cells of a column as text. Raises DataError if they are lists or bytes."""
    if raw.stored == "other":
        raise DataError(
            f"data.text_columns names {raw.name!r}, whose cells are {raw.arrow_type}, "
            "expected text. Save it as text, or name another column."
        )
    for begin in range(0, len(raw.values), _BLOCK):
        for cell in raw.values[begin : begin + _BLOCK].to_pylist():
            yield cell_text(cell)


def raw_rows(
    data: DataParams, contract: TextContract, wanted: set[str]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield source, id and JSON object of each `wanted` row, in the form in which clients send it.

    Raises IntegrityError if a column or a wanted row is missing.
    """
    raw = read_table_of(data)
    rows = wanted_rows(raw, data, contract.columns, wanted)
    digests, _ = row_digests(identified_columns(raw), rows)
    for row, digest in zip(rows.tolist(), digests, strict=True):
        cells = {name: _cell(raw.columns[name], row) for name in contract.columns}
        source = raw.source(int(raw.numbers[row]))
        yield source, digest.tobytes().hex()[:ID_DIGITS], json_row(cells)


def _cell(raw: RawColumn, row: int) -> str | None:
    code = int(raw.codes[row])
    return None if code < 0 else cell_text(raw.values[code].as_py())
