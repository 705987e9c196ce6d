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

from slipway.data.engine.scratch import scratch_array, slices, take
from slipway.data.sources.raw_tables import EXACT_INTEGERS, NOT_UTF8, RawColumn
from slipway.inputs.columns import MAX_CATEGORY_LENGTH, Kind, read_date

MISSING_WORDS = ("", "na", "n/a", "null", "none", "nan")
TRUE_WORDS = ("true", "yes", "t", "y")
FALSE_WORDS = ("false", "no", "f", "n")
GOOD, MISSING, BAD = 0, 1, 2
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:.*)?$"
DIGEST_BYTES = 32  # SHA-256
_CELL_BYTES = 16
_DIGESTED_ROWS = 1 << 12  # at a time
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
        return take(self.states, self.raw.codes)

    @cached_property
    def cells(self) -> NDArray[np.float64] | NDArray[np.object_]:
        """(N,) the values of the rows."""
        return (
            take(self.values, self.raw.codes)
            if self.values.dtype == np.float64
            else self.values[self.raw.codes]
        )

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """(N,) equal for equal cells, 0 for those that are not good."""
        _, keys = np.unique(self.values[self.states == GOOD], return_inverse=True)
        by_value = np.zeros(len(self.values), np.int64)
        by_value[self.states == GOOD] = keys + 1
        return take(by_value, self.raw.codes)

    def shown(self, row: int) -> str:
        """Return the raw cell of a row, for a message."""
        return shown_cell(self.raw, row)


def shown_cell(raw: RawColumn, row: int) -> str:
    """Return the raw cell of a row as short text."""
    code = raw.codes[row]
    return "nothing" if code < 0 else repr(raw.values[int(code)].as_py())[:82]


def typed_column(raw: RawColumn, kind: Kind) -> TypedColumn:
    """Read the cells of a raw column as `kind`."""
    values, states = _READERS[kind](raw)
    if values.dtype != np.float64:
        return TypedColumn(raw, kind, np.append(values, ""), np.append(states, np.uint8(MISSING)))
    numbers = scratch_array((len(values) + 1,), np.float64)
    numbers[:-1], numbers[-1] = values, math.nan
    return TypedColumn(raw, kind, numbers, np.append(states, np.uint8(MISSING)))


def is_missing(raw: RawColumn) -> NDArray[np.bool_]:
    """(U,) True for distinct cells that mean a missing value."""
    if raw.stored == "number":
        return np.isnan(_floats(raw.values))
    if raw.stored == "text":
        return _flags(pc.is_in(pc.utf8_lower(raw.values), pa.array(MISSING_WORDS)))
    return np.zeros(len(raw.values), bool)


def _numbers(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    values = (
        _parsed(raw.values, missing)
        if raw.stored == "text"
        else _floats(raw.values.cast(pa.float64()))
    )
    finite = np.isfinite(values)
    return np.where(finite, values + 0.0, np.nan), _states(missing, finite)  # + 0.0: there is no -0


def _parsed(text: pa.Array, missing: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(U,) float64, NaN where the text is no number."""
    present = pc.if_else(pa.array(~missing), text, None)
    try:
        numbers = present.cast(pa.float64())
    except pa.ArrowInvalid:
        numbers = pc.if_else(pc.match_substring_regex(present, _NUMBER), present, None).cast(
            pa.float64()
        )
    return _floats(numbers.fill_null(math.nan))


def _booleans(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    if raw.stored == "text":
        words = pc.utf8_lower(raw.values)
        true, false = (
            _flags(pc.is_in(words, pa.array(known)))
            for known in ((*TRUE_WORDS, "1"), (*FALSE_WORDS, "0"))
        )
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
    states = _states(
        missing,
        np.array(
            [len(text) <= MAX_CATEGORY_LENGTH and NOT_UTF8 not in text for text in texts], bool
        ),
    )
    return np.where(states == GOOD, texts, ""), states


def _as_text(value: str | float | bool) -> str:
    """Return a cell as text; a whole float has no decimal point, as in a label."""
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


def row_digests(
    columns: Sequence[RawColumn], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], int]:
    """(len(rows), 32) the SHA-256 of each row over all `columns`, and the bytes digested per row."""
    ordered = sorted(columns, key=lambda column: column.name)
    fields = [_canonical(column) for column in ordered]
    width, digests = (
        _CELL_BYTES * len(fields) or 1,
        scratch_array((len(rows), DIGEST_BYTES), np.uint8),
    )
    for part in slices(len(rows), _DIGESTED_ROWS):
        cells = [
            field[column.codes[rows[part]]] for field, column in zip(fields, ordered, strict=True)
        ]
        matrix = (
            np.concatenate(cells, axis=1)
            if cells
            else np.zeros((part.stop - part.start, 1), np.uint8)
        )
        content = memoryview(matrix.tobytes())
        found = b"".join(
            [
                hashlib.sha256(content[begin : begin + width]).digest()
                for begin in range(0, len(content), width)
            ]
        )
        digests[part] = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
    return digests, width


def hex_strings(digests: NDArray[np.uint8]) -> pa.Array:
    """Convert (N, bytes) to N hex strings."""
    num_rows, width = digests.shape
    offsets = np.arange(num_rows + 1, dtype=np.int64) * 2 * width
    text = pa.py_buffer(digests.tobytes().hex().encode())
    return pa.Array.from_buffers(
        pa.large_string(), num_rows, [None, pa.py_buffer(offsets), text]
    ).cast(pa.string())


def _canonical(raw: RawColumn) -> NDArray[np.uint8]:
    """(U + 1, 16) equal for equal cells: a mark, then the number, or a digest of the text."""
    name = _digest(raw.name, size=7)
    cells = scratch_array((len(raw.values) + 1, _CELL_BYTES), np.uint8)
    cells[:] = 0
    cells[:, 1:8] = np.frombuffer(name, np.uint8)
    is_number = np.zeros(len(raw.values), bool)
    if raw.stored != "boolean":
        numbers, states = _numbers(raw)
        is_number = (states == GOOD) & ~_loses_digits(raw, numbers)
        cells[:-1][is_number, 0] = _NUMBER_MARK
        cells[:-1][is_number, 8:] = numbers[is_number].astype("<f8").view(np.uint8).reshape(-1, 8)
    for index in np.flatnonzero(~is_number & ~is_missing(raw)):
        text = _as_text(raw.values[int(index)].as_py())
        cells[index] = np.frombuffer(
            bytes([_TEXT_MARK]) + _digest(text, _CELL_BYTES - 1, key=name), np.uint8
        )
    return cells


def _loses_digits(raw: RawColumn, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(U,) whole numbers as text that float64 cannot hold, such as ids beyond 2**53."""
    found = np.zeros(len(numbers), bool)
    for index in np.flatnonzero(np.abs(numbers) >= EXACT_INTEGERS) if raw.stored == "text" else ():
        text = raw.values[int(index)].as_py()
        found[index] = text.lstrip("+-").isdecimal() and int(text) != int(numbers[index])
    return found


def _digest(text: str, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size, key=key).digest()
