"""Converts the first sheet of an Excel workbook (.xlsx) to JSON lines, which are read as a table.

Dates become ISO 8601 text; errors such as #N/A become missing values. A formula has the value that
Excel stored with it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway.data.sources.archive_members import too_large
from slipway.system.errors import DataError, UnavailableError

ENDING = ".xlsx"
_MOST_ROWS = 1 << 20  # most rows of a sheet of Excel
_ERRORS = frozenset(("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A"))


def write_sheet(path: Path, target: Path, max_bytes: int) -> None:
    """Write the first sheet of the workbook `path` to the file `target` as JSON lines.

    Raises DataError if the sheet is not a table, or if the output exceeds `max_bytes`. Even a small
    workbook can exceed it, because many cells may share one long text.
    """
    try:
        import openpyxl
    except ImportError:
        raise UnavailableError(
            "reading .xlsx requires openpyxl, which is not installed. Run `make install`, "
            "or save the sheet as .csv."
        ) from None
    try:
        # Opened here, because openpyxl does not close a file that it cannot read.
        with path.open("rb") as content, target.open("wb") as file:
            book = openpyxl.load_workbook(content, read_only=True, data_only=True)
            sheet = book.worksheets[0]
            sheet.reset_dimensions()  # some writers store wrong dimensions
            for record in _records(path, sheet.iter_rows(values_only=True)):
                line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
                if file.tell() + len(line) > max_bytes:
                    raise too_large(path, max_bytes)
                file.write(line.encode())
    except (DataError, MemoryError):
        raise
    except Exception as error:  # openpyxl raises whatever a damaged part of the file leads to
        raise DataError(
            f"data.path {str(path)!r} is not a readable Excel workbook: {error}. "
            "Save it again as .xlsx or .csv."
        ) from error
    if len(book.worksheets) > 1:
        print(f"{path}: reads the first of {len(book.worksheets)} sheets, {sheet.title!r}")


def _records(path: Path, rows: Iterator[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    names: list[str] = []
    for number, row in enumerate(rows, 1):
        if number > _MOST_ROWS:
            raise DataError(
                f"data.path {str(path)!r} has more than {_MOST_ROWS} rows. Save it as .csv."
            )
        cells = [_cell(value) for value in row]
        filled = [index for index, cell in enumerate(cells) if cell is not None]
        if not filled:
            continue
        if not names:
            names = _names(path, number, cells[: filled[-1] + 1])
            continue
        if filled[-1] >= len(names):
            raise DataError(
                f"data.path {str(path)!r}: row {number} has {filled[-1] + 1} cells, the first row "
                f"{len(names)}. Expected the names of all columns in the first row: delete titles "
                "above it, and notes beside the table."
            )
        yield dict.fromkeys(names) | dict(zip(names, cells, strict=False))
    if not names:
        raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")


def _names(path: Path, number: int, cells: list[Any]) -> list[str]:
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    wrong = [repr(name) for name, count in Counter(names).items() if count > 1 or not name]
    if wrong:
        raise DataError(
            f"data.path {str(path)!r}: the header in row {number} has empty or repeated names "
            f"({', '.join(wrong)}), expected a different name for each column."
        )
    return names


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    return None if text in _ERRORS or not text.strip() else text
