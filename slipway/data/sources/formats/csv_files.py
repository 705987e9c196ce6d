"""Reads CSV files: finds the header, and parses the rows as columns of text.

Lines before the header are skipped. A row with too many or too few cells is reported and left out;
a file that is unreadable as a whole raises DataError.

All readers of CSV files find the header here. They differ in what they need of the rows:

* `read_csv` has a whole table in columns, which is stored in files if it is large;
* slipway/inference/sources.py streams a table of any size, and puts null where a row is malformed;
* slipway/data/sources/image_tables.py streams a few cells of each row, in Python;
* slipway/data/erasure/rows.py needs the exact text of each row, to write it again.

The first two parse with `open_rows`, the others with Python's `csv`.
"""

import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv

from slipway.data.engine.scratch import store_bytes, store_table
from slipway.data.sources.formats.csv_widths import Header, require_fitting_rows, wrong_width
from slipway.data.sources.text_format import NOT_UTF8, as_utf8, remedy, utf8_blocks
from slipway.system.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
START_CHARACTERS = 1 << 20  # number of characters in which a header is searched
_BLOCK_BYTES = 1 << 22
_MAX_BLOCK_BYTES = (1 << 31) - 1
_SEPARATOR = re.compile(r'"?sep=([^\w\s"]|\t)"?', re.IGNORECASE)  # the line that Excel reads


class CsvStart(NamedTuple):
    """The position of a CSV file's header, and the delimiter."""

    num_lines: int  # lines before the header: a `sep=` line, comments, empty lines
    num_bytes: int  # bytes of these lines as UTF-8
    delimiter: str


class CsvForm(NamedTuple):
    """The columns of a CSV, and how its cells are divided."""

    names: list[str]
    delimiter: str
    has_quotes: bool  # a cell may then contain line breaks


def find_csv_start(text: str) -> CsvStart:
    """Return the position and delimiter of the header, given the first characters of a CSV file.

    A line that starts with `#` is a comment, unless the rest of it has as many columns as the next
    line: then it is the header. A comment may repeat the names of the header below it.
    """
    delimiter, num_bytes = "", 0
    lines = list(io.StringIO(text[:START_CHARACTERS], newline=""))
    for number, line in enumerate(lines):
        separator = _SEPARATOR.fullmatch(line.strip(" \r\n"))
        if separator and not delimiter:
            delimiter = separator[1]
        elif line.strip() and not _is_comment(line, lines[number + 1 :], delimiter):
            return CsvStart(number, num_bytes, delimiter or _delimiter(line))
        num_bytes += len(line.encode(errors="surrogatepass"))
    return CsvStart(0, 0, delimiter or ",")


def _is_comment(line: str, following: Sequence[str], delimiter: str) -> bool:
    if not line.startswith("#"):
        return False
    mark = delimiter or _delimiter(line)
    after = next((text for text in following if text.strip() and text[0] != "#"), "")
    names, cells = _cells(line.lstrip("# "), mark), _cells(after, mark)
    return len(names) < 2 or len(names) != len(cells) or names == cells


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:  # a cell beyond the limit of csv
        return []


def _delimiter(line: str) -> str:
    return next((mark for mark in DELIMITERS if mark in line), ",")


def csv_header(path: Path, payload: bytes, encoding: str) -> tuple[CsvStart, list[str]]:
    """Find a CSV's header in its first bytes; return its position and the names of the columns.

    Raises DataError if there is no header.
    """
    start = find_csv_start(payload[:START_CHARACTERS].decode(errors="replace"))
    lines = io.TextIOWrapper(io.BytesIO(payload), encoding="utf-8", newline="")
    lines.seek(start.num_bytes)
    reader = csv.reader(lines, delimiter=start.delimiter)
    try:
        names = next(row for row in reader if row)
    except (csv.Error, StopIteration) as error:
        raise _unreadable_csv(path, error) from error
    if any(NOT_UTF8 in name for name in names):
        raise DataError(
            f"data.path {str(path)!r} has a header that is not {encoding.upper()}: "
            f"{', '.join(names)[:200]}. {remedy(path)}"
        )
    line_end = "\r\n" if b"\r\n" in payload else "\n"
    header = Header(names, start.num_lines + reader.line_num, start.delimiter, line_end)
    is_cut = len(payload) >= START_CHARACTERS or payload.count(b'"') % 2 == 1
    require_fitting_rows(path, header, _readable_rows(reader, is_cut=is_cut))
    check_names(path, [name.strip() for name in names])
    return start, names


def _readable_rows(reader: Iterator[list[str]], *, is_cut: bool) -> Iterator[list[str]]:
    """Yield the rows up to one that `csv` cannot read, without the last one if it `is_cut`."""
    waiting: list[str] = []
    with contextlib.suppress(csv.Error):
        for row in reader:
            yield waiting
            waiting = row
        if not is_cut:
            yield waiting


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise DataError if two columns of a file have one name."""
    twice = [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{str(path)!r} has the column {', '.join(twice)}, expected each name once. "
            "Rename or remove the others."
        )


def csv_names(path: Path, encoding: str) -> list[str]:
    """Return the names of a CSV file's columns in order. Raises DataError if it has no header."""
    return [name.strip() for name in csv_header(path, csv_start(path, encoding), encoding)[1]]


def csv_types(path: Path, encoding: str, decimal: str) -> dict[str, pa.DataType]:
    """Return the types that pyarrow sees in the first lines of a CSV file, by name of the column.

    `decimal` is the decimal mark of numbers.
    """
    payload = csv_start(path, encoding)
    start, names = csv_header(path, payload, encoding)
    rows = pyarrow.csv.read_csv(
        io.BytesIO(payload[start.num_bytes :]),
        pyarrow.csv.ReadOptions(use_threads=False, block_size=len(payload)),
        pyarrow.csv.ParseOptions(
            delimiter=start.delimiter,
            newlines_in_values=True,
            invalid_row_handler=lambda _: "skip",
        ),
        pyarrow.csv.ConvertOptions(check_utf8=False, decimal_point=decimal),
    )
    return dict(zip((name.strip() for name in names), rows.schema.types, strict=True))


def csv_start(path: Path, encoding: str) -> bytes:
    """Return the first lines of a CSV file as UTF-8. Raises DataError if it is blank."""
    start = next(_file_blocks(path))
    if len(start) >= _BLOCK_BYTES:  # the last line may be incomplete
        start = start[: start.rfind(b"\n") + 1] or start
    return as_utf8(path, start, encoding)


def read_csv(path: Path, encoding: str) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Read a CSV file as columns of text, in files if it is large, and list its malformed rows.

    A malformed row has too few or too many cells; it is listed by its number and what was found.
    Raises DataError if the file cannot be read as a whole.
    """
    num_quotes, last = 0, b""

    def blocks() -> Iterator[bytes]:
        nonlocal num_quotes, last
        for block in utf8_blocks(path, _file_blocks(path), encoding):
            num_quotes += block.count(b'"')
            last = block[-1:] or last
            yield block
        if last != b"\n":
            yield b"\n"

    content = store_bytes(blocks())
    start = content[:_BLOCK_BYTES].to_pybytes()
    if content.size > len(start):  # the last line may be incomplete
        start = start[: start.rfind(b"\n") + 1] or content.to_pybytes()
    (_, begin, delimiter), names = csv_header(path, start, encoding)
    num_quotes -= start[:begin].count(b'"')
    if num_quotes % 2:  # an open quotation would silently swallow every row that follows
        raise DataError(
            f"data.path {str(path)!r} has a quotation mark that is not closed. "
            "Double each quotation mark inside a quoted cell."
        )
    parse = partial(_parse, content[begin:], CsvForm(names, delimiter, num_quotes > 0))
    try:
        try:
            return parse(_BLOCK_BYTES)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            return parse(_MAX_BLOCK_BYTES)  # a row is longer than a block
    except pa.ArrowInvalid as error:
        raise _unreadable_csv(path, error) from error


def open_rows(
    source: Any,
    form: CsvForm,
    block_bytes: int,
    report: Callable[[int, str], None],
    encoding: str = "utf8",
    *,
    check_utf8: bool = True,
) -> Any:
    """Open a CSV at its header, as pyarrow's reader of batches of text.

    `report` receives the number and the fault of each malformed row, which is left out.
    """

    def skip(row: Any) -> str:  # the header is row 1, empty lines are not counted
        report(row.number - 2, wrong_width(row.actual_columns, row.expected_columns))
        return "skip"

    return pyarrow.csv.open_csv(
        source,
        # Only with a single thread does the reader know the number of a malformed row.
        pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes, encoding=encoding),
        pyarrow.csv.ParseOptions(
            delimiter=form.delimiter, newlines_in_values=form.has_quotes, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(form.names, pa.string()),
            check_utf8=check_utf8,
            strings_can_be_null=False,
        ),
    )


def _parse(
    content: pa.Buffer, form: CsvForm, max_block_bytes: int
) -> tuple[pa.Table, list[tuple[int, str]]]:
    malformed: list[tuple[int, str]] = []
    reader = open_rows(
        pa.BufferReader(content),
        form,
        min(max_block_bytes, content.size),
        lambda number, fault: malformed.append((number, fault)),
        check_utf8=False,
    )
    is_large = content.size > _BLOCK_BYTES
    table = store_table(reader, reader.schema) if is_large else reader.read_all()
    return table.rename_columns([name.strip() for name in form.names]), malformed


def _file_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks. Raises DataError if it is blank or cannot be read."""
    is_blank = True
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                is_blank = is_blank and block.isspace()
                if is_blank and len(block) < _BLOCK_BYTES:
                    break
                yield block
    except OSError as error:
        raise DataError(
            f"data.path {str(path)!r} cannot be read: {error.strerror}. Copy the file again."
        ) from error
    if is_blank:
        raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")


def _unreadable_csv(path: Path, error: Exception | str) -> DataError:
    return DataError(
        f"data.path {str(path)!r} is not a readable CSV: {error}. "
        "Expected UTF-8 text, a header, and quotes that close."
    )
