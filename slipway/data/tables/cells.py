"""Typed cells of a raw column, computed once per distinct cell, and digests of rows.

A cell is good, missing, or bad (of another kind than its column). Missing are empty text, NA, N/A,
null, None, nan, and the words in `data.missing_values`, in upper or lower case. A row's digest
covers the values of its cells in every column; 1, 1.0 and "1" are equal. So it does not depend on
the inferred kinds, `data.missing_values`, the order of rows and columns, or the file format.
"""

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.label_sets import FALSE_WORDS, TRUE_WORDS
from slipway.data.engine.scratch import scratch_array, slices, take
from slipway.data.sources.raw_tables import EXACT_INTEGERS, RawColumn, cell_text
from slipway.data.sources.text_format import NOT_UTF8, USUAL_FORMAT
from slipway.data.tables.notation import (
    WrittenNumbers,
    plain_numbers,
    read_date_as,
    read_numbers,
)
from slipway.inputs.columns import MAX_CATEGORY_LENGTH, Kind, read_date

MISSING_WORDS = ("", "na", "n/a", "null", "none", "nan")
GOOD, MISSING, BAD = 0, 1, 2
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:.*)?$"
DIGEST_BYTES = 32  # size of a SHA-256
_CELL_BYTES = 16
_MERGED = 0.1  # fraction of the distinct cells; times in nanoseconds may lose their last digits
_DIGESTED_ROWS = 1 << 12  # rows digested at a time
_NUMBER_MARK, _TEXT_MARK = 1, 2


@dataclass(frozen=True)
class TypedColumn:
    """A column of N rows and U distinct raw cells, read as one kind of value.

    The arrays have U + 1 entries. The last one is for rows without a cell, whose code is -1.
    """

    raw: RawColumn
    kind: Kind
    # (U + 1,) float64 (booleans 0 and 1, dates days since 1970 UTC), NaN unless good; or text, ""
    # unless good.
    values: NDArray[np.float64] | NDArray[np.object_]
    states: NDArray[np.uint8]  # (U + 1,)

    @cached_property
    def unit(self) -> str:
        """The unit that each number in the file has, such as "%" or "$"; "" if there is none."""
        is_text = self.kind == "number" and self.raw.stored == "text"
        return _written_numbers(self.raw).unit if is_text else ""

    @cached_property
    def cell_states(self) -> NDArray[np.uint8]:
        """The state of the cell of each row, (N,): GOOD, MISSING or BAD."""
        return take(self.states, self.raw.codes)

    @cached_property
    def cells(self) -> NDArray[np.float64] | NDArray[np.object_]:
        """The typed value of each row, (N,)."""
        if self.values.dtype == np.float64:
            return take(self.values, self.raw.codes)
        return self.values[self.raw.codes]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """A key for each row's cell, (N,): equal for equal cells, and 0 unless the cell is good."""
        _, keys = np.unique(self.values[self.states == GOOD], return_inverse=True)
        by_value = np.zeros(len(self.values), np.int64)
        by_value[self.states == GOOD] = keys + 1
        return take(by_value, self.raw.codes)


def shown_cell(raw: RawColumn, row: int) -> str:
    """Return the raw cell of a row as a short text for reports."""
    code = raw.codes[row]
    return "nothing" if code < 0 else repr(raw.values[int(code)].as_py())[:82]


def typed_column(
    raw: RawColumn, kind: Kind, meant: Mapping[str, str] = MappingProxyType({})
) -> TypedColumn:
    """Return a raw column with its cells read as `kind`; `meant` maps spellings of categories."""
    values, states = _categories(raw, meant) if kind == "category" else _READERS[kind](raw)
    if values.dtype != np.float64:
        return TypedColumn(raw, kind, np.append(values, ""), np.append(states, np.uint8(MISSING)))
    numbers = scratch_array((len(values) + 1,), np.float64)
    numbers[:-1], numbers[-1] = values, math.nan
    return TypedColumn(raw, kind, numbers, np.append(states, np.uint8(MISSING)))


def is_missing(raw: RawColumn) -> NDArray[np.bool_]:
    """Return a mask (U,) of the distinct cells that stand for a missing value."""
    words = pa.array((*MISSING_WORDS, *raw.written.missing_values), pa.string())
    if raw.stored == "number":
        values = _floats(raw.values)
        return np.isnan(values) | np.isin(values, plain_numbers(words))
    if raw.stored == "text":
        return _flags(pc.is_in(pc.utf8_lower(raw.values), words))
    return np.zeros(len(raw.values), bool)


def _numbers(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    if raw.stored == "text":
        values = _written_numbers(raw).values
    else:
        values = _floats(raw.values.cast(pa.float64()))
    finite = np.isfinite(values)
    return np.where(finite, values + 0.0, np.nan), _states(missing, finite)  # + 0.0: there is no -0


def _written_numbers(raw: RawColumn) -> WrittenNumbers:
    present = pc.if_else(pa.array(~is_missing(raw)), raw.values, None)
    return read_numbers(present, raw.codes, raw.written.marks)


def _booleans(raw: RawColumn) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    missing = is_missing(raw)
    if raw.stored == "text":
        words = pc.utf8_lower(raw.values)
        true = _flags(pc.is_in(words, pa.array((*TRUE_WORDS, "1"))))
        false = _flags(pc.is_in(words, pa.array((*FALSE_WORDS, "0"))))
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
        if raw.written.date_format is not None:
            formatted = dates_as(raw, raw.written.date_format)
            # A column is in one format.
            if _num_rows(raw, formatted) > _num_rows(raw, values):
                values = formatted
    return values, _states(missing, ~np.isnan(values))


def dates_as(raw: RawColumn, date_format: str) -> NDArray[np.float64]:
    """Parse the distinct cells with the strptime format `date_format`.

    Returns days since 1970 UTC, (U,) float64, and NaN for cells that are not such dates.
    """
    values = np.full(len(raw.values), np.nan)
    for index, text in enumerate(raw.values.to_pylist()):
        with contextlib.suppress(ValueError, OverflowError):
            values[index] = read_date_as(text, date_format)
    return values


def _num_rows(raw: RawColumn, values: NDArray[np.float64]) -> int:
    return int((~np.isnan(np.append(values, np.nan)))[raw.codes].sum())


def _categories(
    raw: RawColumn, meant: Mapping[str, str]
) -> tuple[NDArray[np.object_], NDArray[np.uint8]]:
    found = [cell_text(value) for value in raw.values.to_pylist()]
    # As with `data.label_map`, a word for a missing value is a category if the map names it.
    missing = is_missing(raw) & ~np.array([text in meant for text in found], bool)
    texts = np.array([meant.get(text, text) for text in found], object)
    good = [len(text) <= MAX_CATEGORY_LENGTH and NOT_UTF8 not in text for text in texts]
    states = _states(missing, np.array(good, bool))
    return np.where(states == GOOD, texts, ""), states


_READERS = {"number": _numbers, "boolean": _booleans, "date": _dates}


def _states(missing: NDArray[np.bool_], good: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.where(missing, MISSING, np.where(good, GOOD, BAD)).astype(np.uint8)


def _floats(array: pa.Array) -> NDArray[np.float64]:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.float64)


def _flags(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)


def row_digests(
    columns: Sequence[RawColumn], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], int]:
    """Return a SHA-256 digest of each row over all `columns`.

    The result is digests (len(rows), 32) uint8, and the number of digested bytes per row.
    """
    ordered = sorted(columns, key=lambda column: column.name)
    fields = [_canonical(column) for column in ordered]
    width = _CELL_BYTES * len(fields) or 1
    digests = scratch_array((len(rows), DIGEST_BYTES), np.uint8)
    for part in slices(len(rows), _DIGESTED_ROWS):
        matrix = np.zeros((part.stop - part.start, width), np.uint8)
        for index, (field, column) in enumerate(zip(fields, ordered, strict=True)):
            cell = slice(index * _CELL_BYTES, (index + 1) * _CELL_BYTES)
            matrix[:, cell] = field[column.codes[rows[part]]]
        found = b"".join(hashlib.sha256(row.data).digest() for row in matrix)
        digests[part] = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
    return digests, width


def _canonical(raw: RawColumn) -> NDArray[np.uint8]:
    """Encode the distinct cells as (U + 1, 16) bytes; equal cells have equal bytes.

    Each code is a type byte, followed by the number or by a digest of the text. The last one stands
    for rows without a cell.
    """
    raw = replace(raw, written=USUAL_FORMAT)  # other params move no row to another split
    name = _digest(raw.name, size=7)
    cells = scratch_array((len(raw.values) + 1, _CELL_BYTES), np.uint8)
    cells[:] = 0
    cells[:, 1:8] = np.frombuffer(name, np.uint8)
    for part in slices(len(raw.values)):
        some = raw.values[part.start : part.stop]
        _encode_cells(cells[part], replace(raw, values=some), name)
    return cells


def _encode_cells(cells: NDArray[np.uint8], raw: RawColumn, name: bytes) -> None:
    """Write codes of the distinct cells of a column to `cells` (U, 16) bytes."""
    is_number = np.zeros(len(raw.values), bool)
    if raw.stored != "boolean":
        if raw.stored == "text":
            numbers = np.where(is_missing(raw), np.nan, plain_numbers(raw.values)) + 0.0
        else:
            numbers = _numbers(raw)[0]
        is_number = np.isfinite(numbers) & ~loses_digits(raw, numbers)
        cells[is_number, 0] = _NUMBER_MARK
        cells[is_number, 8:] = numbers[is_number].astype("<f8").view(np.uint8).reshape(-1, 8)
    for index in np.flatnonzero(~is_number & ~is_missing(raw)):
        text = cell_text(raw.values[int(index)].as_py())
        digest = bytes([_TEXT_MARK]) + _digest(text, _CELL_BYTES - 1, key=name)
        cells[index] = np.frombuffer(digest, np.uint8)


def loses_digits(raw: RawColumn, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask (U,) of integers that float64 cannot represent, such as ids beyond 2**53."""
    found = np.zeros(len(numbers), bool)
    if raw.stored != "text":
        return found
    for index in np.flatnonzero(np.abs(numbers) >= EXACT_INTEGERS):
        text = raw.values[int(index)].as_py()
        found[index] = text.lstrip("+-").isdecimal() and int(text) != int(numbers[index])
    return found


def merges_integers(raw: RawColumn) -> bool:
    """Return True if many integers of a column, such as ids beyond 2**53, are one float64."""
    typed = typed_column(raw, "number")
    numbers = typed.values[:-1].astype(np.float64)
    lost = numbers[loses_digits(raw, numbers)]
    return len(lost) - len(np.unique(lost)) > _MERGED * len(numbers)


def _digest(text: str, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size, key=key).digest()
