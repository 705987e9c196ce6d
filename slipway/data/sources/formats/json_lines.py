"""Reads files of JSON lines: one object per line, as records or as typed columns.

A file that holds one JSON array of objects is read like a file with a line for each of them.

A line that is no JSON object is reported and left out. Cells of different types become text.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import pyarrow as pa

from slipway.data.engine.scratch import store_table
from slipway.data.sources.text_format import POINT, NumberMarks, TextFormat, list_texts
from slipway.system.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
NOT_AN_OBJECT = "the line is not a JSON object of UTF-8 text"
_START_CHARACTERS = 1 << 12
_SPACE, _DECODER = re.compile(r"\s*"), json.JSONDecoder()
_BLOCK_LINES, _BLOCK_CHARACTERS = 1 << 12, 1 << 22  # parsed JSON in memory


def is_jsonl(path: Path) -> bool:
    """Return True if a file's name ends like that of a file of JSON lines."""
    return path.suffix.lower() in JSON_LINES


def json_columns(path: Path) -> list[str]:
    """Return every key in the objects of a file of JSON lines, in order of appearance."""
    return list(dict.fromkeys(name for record in json_records(path) for name in record or ()))


def json_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object on each line of a file that is not empty.

    Yields None for a line that is no JSON object, is nested too deeply, or contains text that is
    not UTF-8.
    """
    return itertools.chain.from_iterable(json_blocks(path))


def json_blocks(path: Path) -> Iterator[list[dict[str, Any] | None]]:
    """Yield lists of JSON objects, as `json_records` does one at a time."""
    block: list[dict[str, Any] | None] = []
    num_characters = 0
    for line in json_texts(path):
        block.append(json_record(line))
        num_characters += len(line)
        if len(block) == _BLOCK_LINES or num_characters >= _BLOCK_CHARACTERS:
            yield block
            block, num_characters = [], 0
    if block:
        yield block


def json_texts(path: Path) -> Iterator[str]:
    """Yield each line that is not empty, or each element of the one array as a line."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        is_array = holds_array(file.read(_START_CHARACTERS))
        file.seek(0)
        if is_array:
            yield from _elements(path, file)
        else:
            yield from (line for line in file if line.strip())


def holds_array(start: str) -> bool:
    """Return True if a text begins like one JSON array of objects, or is an empty array."""
    return re.match(r"\ufeff?\s*\[\s*(\{|\]\s*$)", start) is not None


def _elements(path: Path, file: IO[str]) -> Iterator[str]:
    """Yield the elements of an array. Of the file, only what is not parsed yet is in memory."""
    text, place, number = file.read(_START_CHARACTERS).lstrip(), 1, 0  # after its "["
    while True:
        found = _next_element(text, place, is_first=number == 0)
        if found is None:
            more = file.read(max(_BLOCK_CHARACTERS, len(text) - place))
            if not more:
                raise _damaged_array(path, number)
            text, place = text[place:] + more, 0
            continue
        begin, place = found
        if begin == place:
            break
        yield text[begin:place].replace("\n", " ")
        number += 1
    if (text[place + 1 :] + file.read()).strip():
        raise _damaged_array(path, number)


def _next_element(text: str, place: int, *, is_first: bool) -> tuple[int, int] | None:
    """Return where the next element begins and ends, twice the end of the array, or None."""
    begin = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it always matches
    if text.startswith("]", begin):
        return begin, begin
    if not is_first:
        if not text.startswith(",", begin):
            return None
        begin = _SPACE.match(text, begin + 1).end()  # type: ignore[union-attr]
    try:
        _, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return (begin, end) if end < len(text) else None


def _damaged_array(path: Path, number: int) -> DataError:
    return DataError(
        f"data.path {str(path)!r} is one JSON array, which is damaged after {number} elements. "
        "Expected objects between commas, then `]` and the end of the file: write it again, or "
        "write one object per line."
    )


def json_record(line: str) -> dict[str, Any] | None:
    """Return the JSON object on a line, or None if it is unusable as in `json_records`."""
    try:
        line.encode()  # fails if the bytes are not UTF-8
        record = json.loads(line)
        if "\\u" in line:  # an escape may be half a character, which UTF-8 cannot encode
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(
    path: Path, only: Collection[str] | None, written: TextFormat
) -> tuple[pa.Table, int, list[tuple[int, str]]]:
    """Read a file of JSON lines in two passes: first the types of all columns, then the cells.

    Returns the columns, the number of lines, and the number and text of each malformed line.
    """
    kinds: dict[str, dict[_JsonKind, None]] = {}  # in order of appearance
    malformed: list[tuple[int, str]] = []
    num_read = num_blocks = 0
    for block in json_blocks(path):
        rows = [record for record in block if record is not None]
        names = dict.fromkeys(name for row in rows for name in row if only is None or name in only)
        for name in names:
            cells = [row.get(name) for row in rows]
            kinds.setdefault(name, {})[_json_kind(cells, written.takes_lists(name))] = None
        faults = (place for place, record in enumerate(block) if record is None)
        malformed += [(num_read + place, NOT_AN_OBJECT) for place in faults]
        num_read, num_blocks = num_read + len(block), num_blocks + 1
    chosen = {name: _common_kind(found) for name, found in kinds.items()}
    while True:
        try:
            batches = _json_batches(path, chosen, written.marks)
            schema = next(batches).schema if num_blocks else pa.schema([])
            table = (pa.Table.from_batches if num_blocks < 2 else store_table)(batches, schema)
            return table, num_read, malformed
        except _UnlikeCellsError as error:
            chosen[str(error)] = "mixed"


class _UnlikeCellsError(Exception):
    """The cells of the column that this error names have different types."""


# "mixed": cells of different types; "lists": lists that are read as text
_JsonKind: TypeAlias = pa.DataType | Literal["mixed", "lists"]


def _json_kind(cells: list[Any], takes_lists: bool) -> _JsonKind:
    if takes_lists and any(isinstance(cell, list) for cell in cells):
        return "lists"
    try:
        return pa.array(cells).type
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        return "mixed"


def _common_kind(kinds: Collection[_JsonKind]) -> _JsonKind:
    if "lists" in kinds or "mixed" in kinds:
        return "lists" if "lists" in kinds else "mixed"
    schemas = [pa.schema([("cells", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("cells").type
    except pa.ArrowException:
        return "mixed"


def _json_batches(
    path: Path, kinds: Mapping[str, _JsonKind], marks: NumberMarks
) -> Iterator[pa.RecordBatch]:
    """Yield a batch without rows, then a batch for each block of rows.

    `kinds` gives the type of each column. Raises _UnlikeCellsError if a cell has another type.
    """
    for block in itertools.chain([[]], json_blocks(path)):
        rows = [record for record in block if record is not None]
        cells = [
            _json_cells(name, [row.get(name) for row in rows], kind, marks)
            for name, kind in kinds.items()
        ]
        yield pa.record_batch(cells, [*kinds])


def _json_cells(name: str, cells: list[Any], kind: _JsonKind, marks: NumberMarks) -> pa.Array:
    if kind == "lists":
        return list_texts(cells)
    if kind == "mixed":
        return mixed_texts(cells, marks)
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise _UnlikeCellsError(name) from error


def cells_of(cells: list[Any], marks: NumberMarks = POINT) -> pa.ChunkedArray:
    """Return cells of one type unchanged, and cells of mixed types as text."""
    try:
        return pa.chunked_array([pa.array(cells)])
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        return pa.chunked_array([mixed_texts(cells, marks)])


def mixed_texts(cells: Iterable[Any], marks: NumberMarks) -> pa.Array:
    """Return cells of mixed types as text; a number gets the marks of the numbers in text."""
    texts = [marks.number_text(cell) if isinstance(cell, float) else cell for cell in cells]
    return pa.array([None if text is None else str(text) for text in texts], pa.string())
