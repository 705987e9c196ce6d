"""The notation of a table's text: encoding, missing values, dates, and the marks of numbers."""

import codecs
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from slipway.config.sections import DataParams
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError

NOT_UTF8 = "\ufffd"  # stands in a cell for bytes that are not of the file's encoding
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # this mark begins with that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_START_BYTES = 1000


class NumberMarks(NamedTuple):
    """The marks in the numbers of a table: `data.decimal` and `data.thousands`."""

    decimal: str = "."
    thousands: str | None = None

    def number_text(self, value: float) -> str:
        """Return a number as a cell with these marks, without separators of thousands."""
        return repr(value).replace(".", self.decimal)


POINT = NumberMarks()


class TextFormat(NamedTuple):
    """The keys of the section `data` that describe the notation of cells."""

    encoding: str = "utf-8"
    missing_values: tuple[str, ...] = ()
    date_format: str | None = None
    # Lists in these columns are read as the text of JSON lists; None: in every column.
    list_columns: frozenset[str] | None = frozenset()
    marks: NumberMarks = POINT
    sheet: str | None = None  # of a workbook, if it has it; else the first

    @classmethod
    def of(cls, data: DataParams) -> Self:
        """Return the notation that the params describe."""
        words = [word.strip().lower() for word in data.missing_values]
        several = kind_of(data.task).target.several
        lists = frozenset(data.target_columns if several else ())
        marks = NumberMarks(data.decimal, data.thousands)
        return cls(data.encoding, tuple(words), data.date_format, lists, marks)

    def takes_lists(self, column: str) -> bool:
        """Return True if the lists in a column should be read as text."""
        return self.list_columns is None or column in self.list_columns


USUAL_FORMAT = TextFormat()


def is_list(kind: pa.DataType) -> bool:
    """Return True for the Arrow types of lists."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def without_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of lists to JSON text; return any other column unchanged."""
    return pa.chunked_array([list_texts(column.to_pylist())]) if is_list(column.type) else column


def list_texts(cells: Sequence[Any]) -> pa.Array:
    """Return each list as JSON text, and each other cell as plain text."""
    texts = [
        json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in cells
    ]
    return pa.array([cell if cell is None else str(cell) for cell in texts], pa.string())


def is_utf8(encoding: str) -> bool:
    """Return True if `encoding` is a name of UTF-8."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def as_utf8(path: Path, payload: bytes, encoding: str) -> bytes:
    """Return the payload as UTF-8 without a BOM; NOT_UTF8 replaces each invalid byte.

    Raises DataError if the file is certain to have another encoding.
    """
    return b"".join(utf8_blocks(path, [payload], encoding))


def utf8_blocks(path: Path, blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the content of a file block by block, converted as by `as_utf8`.

    Raises DataError, at the latest after the last block, if the file is certain to have another
    encoding.
    """
    of_utf8 = is_utf8(encoding)
    decoder = codecs.getincrementaldecoder("utf-8-sig" if of_utf8 else encoding)("replace")
    strict = codecs.getincrementaldecoder("utf-8")()
    is_ascii = is_first = True
    is_valid = not of_utf8  # valid text could be UTF-8 in place of `encoding`
    for block in itertools.chain(blocks, [b""]):
        if of_utf8 and is_first and (wide := _wide_encoding(block)):
            raise DataError(f"data.path {str(path)!r} is not UTF-8. {remedy(path, wide)}")
        if is_valid:
            is_ascii = is_ascii and block.isascii()
            try:
                strict.decode(block, final=not block)
            except UnicodeDecodeError:
                is_valid = False
        text = decoder.decode(block, final=not block)
        if is_first and not of_utf8:
            text = text.removeprefix("\ufeff")
        is_first = is_first and not text
        yield text.encode(errors="replace")
    if is_valid and not is_ascii:
        raise DataError(
            f"data.encoding is {encoding!r}, but {str(path)!r} is UTF-8. "
            "Set data.encoding to utf-8."
        )


def remedy(path: Path | str, encoding: str = "windows-1252") -> str:
    """Return advice for the user on a file that is not UTF-8."""
    name = shlex.quote(str(path))
    return (
        f"If it is {encoding}, set data.encoding to {encoding}, or convert it: "
        f"iconv -f {encoding.upper()} -t UTF-8 {name} > utf8{Path(path).suffix}"
    )


def _wide_encoding(payload: bytes) -> str | None:
    """Return "UTF-16" or "UTF-32" if the payload has its byte-order mark or its many zero bytes."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if payload.startswith(mark):
            return encoding
    start = payload[:_START_BYTES]
    if start.count(0) <= len(start) / 4:
        return None
    return "utf-16-be" if start.startswith(b"\0") else "utf-16-le"
