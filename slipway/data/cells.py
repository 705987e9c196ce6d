"""From the distinct cells of a raw column to typed ones, and to the digest of a row.

A cell is good, missing, or bad: of another kind than its column's. Text that means missing: nothing, NA, N/A, null, None, nan,
in any case. The digest of a row is of its cells by value (1, 1.0 and "1" are equal) in every column, so that it depends neither on the
inferred kinds nor on the order of rows and columns, nor on the format of the file.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway import files
from slipway.columns import MAX_TEXT, Kind, read_date
from slipway.data.raw_tables import RawColumn

MISSING_WORDS = ("", "na", "n/a", "null", "none", "nan")
TRUE_WORDS = ("true", "yes", "t", "y")
FALSE_WORDS = ("false", "no", "f", "n")
GOOD, MISSING, BAD = 0, 1, 2
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:.*)?$"
_CELL_BYTES = 16
_NUMBER_MARK, _TEXT_MARK = 1, 2


@dataclass(frozen=True)
class TypedColumn:
    """One column of N rows and U distinct raw cells. The last entry of each array is for rows without a cell, whose code is -1.

    `values` (U + 1,): float64 (booleans 0 and 1, dates days since 1970 UTC), NaN unless good; or text, "" unless good.
    """

    raw: RawColumn
    kind: Kind
    values: NDArray[np.float64] | NDArray[np.object_]
    states: NDArray[np.uint8]  # (U + 1,)

    @cached_property
    def cell_states(self) -> NDArray[np.uint8]:
        """(N,) GOOD, MISSING or BAD."""
        return self.states[self.raw.codes]

    @cached_property
    def cells(self) -> NDArray[np.float64] | NDArray[np.object_]:
        """(N,) the values of the rows."""
        return self.values[self.raw.codes]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """(N,) equal for equal cells, 0 for those that are not good."""
        _, keys = np.unique(self.values[self.states == GOOD], return_inverse=True)
        by_value = np.zeros(len(self.values), np.int64)
        by_value[self.states == GOOD] = keys + 1
        return by_value[self.raw.codes]

    def shown(self, row: int) -> str:
        """The raw cell of a row, for a message."""
        return shown_cell(self.raw, row)


def shown_cell(raw: RawColumn, row: int) -> str:
    """The raw cell of a row as a short text."""
    code = raw.codes[row]
    return "nothing" if code < 0 else repr(raw.values[int(code)].as_py())[:82]


def typed_column(raw: RawColumn, kind: Kind) -> TypedColumn:
    """Read the cells of a raw column as `kind`."""
    values, states = _READERS[kind](raw)
    gone = np.array([math.nan]) if values.dtype == np.float64 else np.array([""], object)
    return TypedColumn(raw, kind, np.concatenate([values, gone]), np.append(states, np.uint8(MISSING)))


def is_missing(raw: RawColumn) -> NDArray[np.bool_]:
    """(U,) which distinct cells mean that there is none."""
    if raw.stored == "number":
        return np.isnan(_floats(raw.values))
    if raw.stored == "text":
        return _flags(pc.is_in(pc.utf8_lower(raw.values), pa.array(MISSING_WORDS)))
    return np.zeros(len(raw.values), bool)


def _numbers(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    values = _parsed(raw.values, missing) if raw.stored == "text" else _floats(raw.values.cast(pa.float64()))
    finite = np.isfinite(values)
    return np.where(finite, values + 0.0, np.nan), _states(missing, finite)  # + 0.0: there is no -0


def _parsed(text: pa.Array, missing: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(U,) float64, NaN where the text is no number."""
    present = pc.if_else(pa.array(~missing), text, None)
    try:
        numbers = present.cast(pa.float64())
    except pa.ArrowInvalid:
        numbers = pc.if_else(pc.match_substring_regex(present, _NUMBER), present, None).cast(pa.float64())
    return _floats(numbers.fill_null(math.nan))


def _booleans(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    if raw.stored == "text":
        words = pc.utf8_lower(raw.values)
        true, false = (_flags(pc.is_in(words, pa.array(known))) for known in ((*TRUE_WORDS, "1"), (*FALSE_WORDS, "0")))
    else:
        numbers = _floats(raw.values.cast(pa.float64()))
        true, false = numbers == 1, numbers == 0
    return np.where(true, 1.0, np.where(false, 0.0, np.nan)), _states(missing, true | false)


def _dates(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    values = np.full(len(raw.values), np.nan)
    if raw.stored == "text":
        for index in np.flatnonzero(_flags(pc.match_substring_regex(raw.values, _DATE))):
            try:
                values[index] = read_date(raw.values[int(index)].as_py())
            except (ValueError, OverflowError):  # the 31st of February
                continue
    return values, _states(missing, ~np.isnan(values))


def _categories(raw: RawColumn) -> tuple[NDArray[np.object_], NDArray[np.uint8]]:
    missing = is_missing(raw)
    texts = np.array([_as_text(value) for value in raw.values.to_pylist()], object)
    states = _states(missing, np.array([len(text) <= MAX_TEXT for text in texts], bool))
    return np.where(states == GOOD, texts, ""), states


def _as_text(value: str | float | bool) -> str:
    """A whole float is written as an integer, as in a label."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


_READERS = {"number": _numbers, "boolean": _booleans, "date": _dates, "category": _categories}


def _states(missing: NDArray[np.bool_], good: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.where(missing, MISSING, np.where(good, GOOD, BAD)).astype(np.uint8)


def _floats(array: pa.Array) -> NDArray[np.float64]:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.float64)


def _flags(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)


def row_digests(columns: Sequence[RawColumn], rows: NDArray[np.int64]) -> tuple[list[str], int]:
    """The hex SHA-256 of each of the rows by their cells in all `columns`, and how many bytes were digested for each."""
    ordered = sorted(columns, key=lambda column: column.name)
    header = hashlib.sha256(files.canonical_json([column.name for column in ordered]).encode())
    fields = [_canonical(column)[column.codes[rows]] for column in ordered]
    matrix = np.concatenate(fields, axis=1) if fields else np.empty((len(rows), 0), np.uint8)
    width, content = matrix.shape[1], memoryview(matrix.tobytes())
    digests = []
    for begin in range(0, len(rows) * width, width or 1):
        digest = header.copy()
        digest.update(content[begin : begin + width])
        digests.append(digest.hexdigest())
    return digests, width


def _canonical(raw: RawColumn) -> NDArray[np.uint8]:
    """(U + 1, 16) the same for equal cells: a number's float64, a text's digest, or zeros where there is none."""
    cells = np.zeros((len(raw.values) + 1, _CELL_BYTES), np.uint8)
    numbers, states = _numbers(raw)
    if raw.stored != "boolean":
        cells[:-1][states == GOOD, 0] = _NUMBER_MARK
        cells[:-1, 8:][states == GOOD] = numbers[states == GOOD].astype("<f8").view(np.uint8).reshape(-1, 8)
    others = np.flatnonzero(states == BAD) if raw.stored != "boolean" else range(len(raw.values))
    for index in others:
        text = _as_text(raw.values[int(index)].as_py())
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=_CELL_BYTES - 1).digest()
        cells[index] = np.frombuffer(bytes([_TEXT_MARK]) + digest, np.uint8)
    return cells
