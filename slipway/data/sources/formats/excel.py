"""Converts a sheet of an Excel workbook (.xlsx) to JSON lines, which are read as a table.

Dates become ISO 8601 text; errors such as #N/A become missing values. A formula has the value that
Excel stored with it; those without one are counted.
"""

import contextlib
import json
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway.data.sources.archive_members import too_large
from slipway.system.errors import DataError, UnavailableError

SHEET = "sheet.jsonl"  # the file into which a sheet is written
MOST_ROWS = 1 << 20  # most rows of a sheet of Excel
_LEAST_COLUMNS = 2  # of a table: an input and a target
_BLOCK_BYTES = 1 << 20
_ERRORS = frozenset(("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A"))


class NoTableError(DataError):
    """The first sheet of a workbook is no table, and there are `others`."""

    def __init__(self, path: Path, first: str, others: list[str], reason: str) -> None:
        super().__init__(
            f"data.path {str(path)!r}: the first sheet, {first!r}, is no table ({reason}). The "
            f"workbook also has {', '.join(map(repr, others))}: set data.sheet to the one that "
            f"holds the table, for `slipway init` with --sheet {shlex.quote(others[0])}."
        )
        self.first, self.others = first, others


def write_sheet(path: Path, target: Path, max_bytes: int, sheet: str | None = None) -> list[str]:
    """Write a sheet of the workbook `path`, by default the first, to a file of JSON lines.

    Returns remarks for the user: which sheets are not read, and which formulas have no values.
    Raises DataError if the sheet is not a table, or if the output exceeds `max_bytes`. Even a small
    workbook can exceed it, because many cells may share one long text.
    """
    with _opened(path, data_only=True) as book:
        titles: list[str] = [one.title for one in book.worksheets]
        if sheet is not None and sheet not in titles:
            raise DataError(
                f"data.sheet is {sheet!r}, but {str(path)!r} has the sheets "
                f"{', '.join(map(repr, titles))}. Set it to one of them."
            )
        title = titles[0] if sheet is None else sheet
        others = [name for name in titles if name != title]
        try:
            num_columns, num_rows = _write(path, book[title], target, max_bytes)
        except _NotATableError as error:
            if sheet is None and others:
                raise NoTableError(path, title, others, str(error)) from error
            raise DataError(f"data.path {str(path)!r}: {error}") from error
    if sheet is None and others and (num_columns < _LEAST_COLUMNS or not num_rows):
        raise NoTableError(path, title, others, f"{num_columns} columns, {num_rows} rows")
    remarks = [f"column {name!r} has {unstored}" for name, unstored in _unstored(path, title)]
    if sheet is None and others:
        listed = ", ".join(map(repr, others))
        remarks.append(
            f"{path.name}: reads the first of {len(titles)} sheets, {title!r}; data.sheet chooses "
            f"another: {listed}"
        )
    return remarks


def sheet_names(path: Path) -> list[str]:
    """Return the names of a workbook's sheets. Raises DataError if it cannot be read."""
    with _opened(path, data_only=True) as book:
        return [sheet.title for sheet in book.worksheets]


class _NotATableError(Exception):
    """The rows of a sheet are not those of a table; the message says why."""


def required_openpyxl() -> Any:
    """Return the package that reads and writes workbooks; UnavailableError if it is missing."""
    try:
        import openpyxl
    except ImportError:
        raise UnavailableError(
            "an .xlsx requires openpyxl, which is not installed. Run `make install`, "
            "or save the sheet as .csv."
        ) from None
    return openpyxl


@contextlib.contextmanager
def _opened(path: Path, *, data_only: bool) -> Iterator[Any]:
    """Open a workbook; whatever a damaged part of the file leads to becomes a DataError."""
    openpyxl = required_openpyxl()
    try:
        with path.open("rb") as content:  # openpyxl does not close a file that it cannot read
            yield openpyxl.load_workbook(content, read_only=True, data_only=data_only)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"data.path {str(path)!r} is not a readable Excel workbook: {error}. "
            "Save it again as .xlsx or .csv."
        ) from error


def _rows(sheet: Any) -> Iterator[tuple[Any, ...]]:
    sheet.reset_dimensions()  # some writers store wrong dimensions
    rows: Iterator[tuple[Any, ...]] = sheet.iter_rows(values_only=True)
    return rows


def _write(path: Path, sheet: Any, target: Path, max_bytes: int) -> tuple[int, int]:
    """Write the records of a sheet; return the numbers of columns and of rows."""
    num_columns = num_rows = 0
    with target.open("wb") as file:
        for record in _records(_rows(sheet)):
            line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            if file.tell() + len(line) > max_bytes:
                raise too_large(path, max_bytes)
            file.write(line.encode())
            num_columns, num_rows = len(record), num_rows + 1
    return num_columns, num_rows


def _unstored(path: Path, title: str) -> list[tuple[str, str]]:
    """Return the columns with formulas that have no stored value, and how many."""
    with zipfile.ZipFile(path) as parts:
        sheets = [name for name in parts.namelist() if name.startswith("xl/worksheets/")]
        if not any(_has_formula(parts, name) for name in sheets):
            return []
    counts: Counter[int] = Counter()
    names: list[str] = []
    with _opened(path, data_only=True) as values, _opened(path, data_only=False) as formulas:
        for found, written in zip(_rows(values[title]), _rows(formulas[title]), strict=False):
            if not names:
                names = ["" if cell is None else str(cell).strip() for cell in found]
                names = names if any(names) else []
                continue
            counts.update(
                place
                for place, (value, formula) in enumerate(zip(found, written, strict=False))
                if value is None and formula is not None
            )
    return [
        (
            names[place],
            f"{count} formulas without stored values, which count as missing: open the workbook in "
            "Excel or LibreOffice and save it there",
        )
        for place, count in sorted(counts.items())
        if place < len(names)
    ]


def _has_formula(parts: zipfile.ZipFile, name: str) -> bool:
    with parts.open(name) as content:
        before = b""
        while block := content.read(_BLOCK_BYTES):
            if re.search(rb"<f[ >/]", before + block):
                return True
            before = block[-3:]
    return False


def _records(rows: Iterator[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    names: list[str] = []
    for number, row in enumerate(rows, 1):
        if number > MOST_ROWS:
            raise _NotATableError(f"it has more than {MOST_ROWS} rows. Save it as .csv.")
        cells = [_cell(value) for value in row]
        filled = [index for index, cell in enumerate(cells) if cell is not None]
        if not filled:
            continue
        if not names:
            names = _names(number, cells[: filled[-1] + 1])
            continue
        if filled[-1] >= len(names):
            raise _NotATableError(
                f"row {number} has {filled[-1] + 1} cells, the first row "
                f"{len(names)}. Expected the names of all columns in the first row: delete titles "
                "above it, and notes beside the table."
            )
        yield dict.fromkeys(names) | dict(zip(names, cells, strict=False))
    if not names:
        raise _NotATableError("it is empty, expected a header and rows.")


def _names(number: int, cells: list[Any]) -> list[str]:
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    wrong = [repr(name) for name, count in Counter(names).items() if count > 1 or not name]
    if wrong:
        raise _NotATableError(
            f"the header in row {number} has empty or repeated names "
            f"({', '.join(wrong)}), expected a different name for each column."
        )
    return names


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    return None if text in _ERRORS or not text.strip() else text
