"""Finds the header of a CSV file: the lines before it, and the delimiter of its columns."""

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

DELIMITERS = (",", ";", "\t", "|")
START_CHARACTERS = 1 << 20  # number of characters in which a header is searched
_SEPARATOR = re.compile(r'"?sep=([^\w\s"]|\t)"?', re.IGNORECASE)  # the line that Excel reads


class CsvStart(NamedTuple):
    """The position of a CSV file's header, and the delimiter."""

    num_lines: int  # lines before the header: a `sep=` line, comments, empty lines
    num_bytes: int  # bytes of these lines as UTF-8
    delimiter: str


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
