"""Refuses a CSV whose rows all have another number of cells than its header names.

Such a file has one fault, in its header or in the program that wrote it, so the message names the
likely cause and a remedy. Single rows of a wrong width are the business of the rules for rows.
"""

import codecs
import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slipway.system.errors import DataError

_MOST_ROWS = 1_000  # rows that are compared with the header
_ENDS = ("\r\n", "\n")


class Header(NamedTuple):
    """The header of a CSV: its names, the number of its line from 1, and how cells are divided."""

    names: Sequence[str]
    line: int
    delimiter: str
    line_end: str  # of the file


def wrong_width(num_cells: int, num_columns: int) -> str:
    """Describe a row with too many or too few cells."""
    return f"{num_cells} cells, the header names {num_columns}"


def require_fitting_rows(path: Path, header: Header, rows: Iterable[Sequence[str]]) -> None:
    """Raise DataError if none of the first rows has as many cells as the header has names."""
    found = [row for row in islice(rows, _MOST_ROWS) if row]
    num_names = len(header.names)
    if not found or any(len(row) == num_names for row in found):
        return
    fault = wrong_width(len(found[0]), num_names)
    same = "" if len(found) == 1 else f", and none of the first {len(found):,} rows fits it"
    cause, remedy, script = _cause(header, found)
    command = ""
    if script and header.line_end in _ENDS and _is_plain(path):
        script = f"$'{script}'".replace("\t", r"\t") if "\t" in script else f"'{script}'"
        names = shlex.quote(str(path)), shlex.quote(f"{path.stem}_fixed{path.suffix}")
        command = f", for example so:\n  sed {script} {names[0]} > {names[1]}"
    raise DataError(
        f"{str(path)!r}: line {header.line + 1} has {fault}{same}. "
        f"{cause}. {remedy}{command or '.'}"
    )


def _cause(header: Header, rows: Sequence[Sequence[str]]) -> tuple[str, str, str]:
    """Return the likely cause, the remedy, and a script of sed that applies it, or ""."""
    line, mark, num_names = header.line, header.delimiter, len(header.names)
    widths = {len(row) for row in rows}
    shown = "tab" if mark == "\t" else repr(mark)
    before_return = header.line_end == "\r\n"
    if widths == {num_names + 1} and not any(row[-1].strip() for row in rows):
        return (
            f"Each row ends with a {shown}, and the header does not",
            "Add one to the end of the header",
            f"{line}s/.$/{mark}&/" if before_return else f"{line}s/$/{mark}/",
        )
    if widths == {num_names - 1} and not header.names[-1].strip():
        return (
            f"The header ends with a {shown}, and the rows do not",
            "Remove it from the header",
            rf"{line}s/{mark}\(.\)$/\1/" if before_return else f"{line}s/{mark}$//",
        )
    if widths == {num_names + 1} and len({row[0] for row in rows}) == len(rows):
        return (
            "Each row begins with its own name or number, for which the header has no name, as R's "
            "write.table writes it",
            "Write the table with row.names = FALSE, or name this column",
            f"{line}s/^/row{mark}/",
        )
    if num_names == 1 and len(widths) == 1:
        return (
            f"Line {line}, {header.names[0][:40]!r}, looks like a title above the header",
            "Remove it",
            f"1,{line}d",
        )
    return (
        f"Either the header lacks names, or cells contain a {shown}, such as a decimal comma",
        f"Name every column in the header, and put cells that contain a {shown} in quotes",
        "",
    )


def _is_plain(path: Path) -> bool:
    """Return True if sed can change the file: it exists, and no byte order mark precedes it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(4)
    marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return not start.startswith(marks) and b"\0" not in start
