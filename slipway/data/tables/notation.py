"""Reads numbers and dates from text: units, the marks of a number, and `data.date_format`.

`data.decimal` and `data.thousands` name the marks of all numbers in a table; a cell with other
marks is not a number. If both have their usual values, a comma separates thousands only if another
cell of the column proves that the point is the decimal mark. The cells of a column share one unit:
if most cells are percentages, a plain number is not valid, because it may be a fraction.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.yaml_text import as_yaml
from slipway.data.sources.text_format import POINT, NumberMarks
from slipway.inputs.columns import days_since_1970

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_SPACE = r"[\s\x{a0}\x{2009}\x{202f}]"  # also those that do not break a line
# The sign of a currency, or its code in ISO 4217.
_CURRENCY = (
    r"(?:\p{Sc}|AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HUF|INR|JPY|KRW|MXN|NOK|PLN|SEK|TRY|USD|ZAR)"
)
_UNIT = rf"(?:%|{_CURRENCY})"
_WITH_UNIT = (
    rf"^([+-]?{_SPACE}*{_CURRENCY}{_SPACE}*)?[+-]?[0-9.,]"
    rf"([0-9.,'’\s\x{{a0}}\x{{2009}}\x{{202f}}]*[0-9.,])?([eE][+-]?[0-9]+)?({_SPACE}*{_UNIT})?$"
)
# How accounts write a number below zero: (1,234.50), 1,234.50- or with the sign U+2212.
_NEGATIVE = (
    rf"^(?:\({_SPACE}*([^-()]+?){_SPACE}*\)|"
    rf"([^-()]*[0-9.,]){_SPACE}*[-\x{{2212}}]({_SPACE}*{_UNIT})?)$"
)
_THOUSANDS = r"^[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?$"
_DECIMAL_POINT = r"(,[0-9]{3}){2}|,[0-9]{3}\.|^[+-]?[0-9]*\.([0-9]{0,2}|[0-9]{4,})$"
_DECIMAL_COMMA = r"^[+-]?[0-9.]*,([0-9]{0,2}|[0-9]{4,})$"
# How each mark looks in a file.
_MARKS = {".": r"\.", ",": ",", "'": "['’]", " ": r"[ \x{a0}\x{2009}\x{202f}]"}
# The marks that tables are known to have, the usual ones first.
_KNOWN_MARKS = (
    *(POINT, NumberMarks(",", None), NumberMarks(".", ","), NumberMarks(",", ".")),
    *(NumberMarks(".", "'"), NumberMarks(".", " "), NumberMarks(",", " "), NumberMarks(",", "'")),
)
_MOST_CELLS = 20_000  # distinct cells of a column that are tried with each of them
_LEAST_NUMBERS = 0.5  # fraction of a column's cells; with fewer numbers it says nothing on marks
_LEAST_THOUSANDS = 3  # distinct cells such as 1.234
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class WrittenNumbers(NamedTuple):
    """The numbers that were read from the distinct cells of a text column."""

    values: NDArray[np.float64]  # (U,), NaN if the text is not a number
    unit: str  # "%", "$" or the like, which all of them have; "" for none


def read_numbers(
    text: pa.Array, codes: NDArray[np.int64], marks: NumberMarks = POINT
) -> WrittenNumbers:
    """Return the numbers in distinct cells (U,), null if missing; `codes` gives each row's cell."""
    plain = plain_numbers(text) if marks.decimal == "." else np.full(len(text), np.nan)
    if not pc.any(pc.and_(pa.array(np.isnan(plain)), pc.is_valid(text))).as_py():
        return WrittenNumbers(plain, "")
    bare = _without_units(text)
    if marks != POINT:
        bare = _with_point(bare, marks)
    elif _any(bare, _DECIMAL_POINT) and not _any(bare, _DECIMAL_COMMA):
        has_thousands = pc.match_substring_regex(bare, _THOUSANDS)
        bare = pc.if_else(has_thousands, pc.replace_substring(bare, ",", ""), bare)
    bare = pc.if_else(pc.match_substring_regex(bare, _NUMBER), bare, None)
    found = np.where(np.isnan(plain), _floats(bare.cast(pa.float64())), plain)
    units = pc.struct_field(pc.extract_regex(text, f"(?P<unit>{_UNIT})"), "unit").fill_null("")
    encoded = units.dictionary_encode()
    names, unit_codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    counts = np.bincount(codes + 1, minlength=len(text) + 1)[1:] * ~np.isnan(found)
    num_rows = dict(zip(names, np.bincount(unit_codes, counts, len(names)).tolist(), strict=True))
    unit = max(sorted({"", *names}), key=lambda name: num_rows.get(name, 0))
    is_other = unit_codes != (names.index(unit) if unit in names else -1)
    return WrittenNumbers(np.where(is_other, np.nan, found), unit)


def _without_units(text: pa.Array) -> pa.Array:
    """Return the cells that may be numbers without their unit, and null for any other.

    A number below zero, in any of the ways to write it, begins with its sign.
    """
    is_amount = pc.match_substring_regex(text, rf"[.,'’]|{_UNIT}")  # 2020- and (1) are none
    text = pc.if_else(is_amount, pc.replace_substring_regex(text, _NEGATIVE, r"-\1\2\3"), text)
    text = pc.replace_substring(text, "\u2212", "-")
    one_unit = pc.less_equal(pc.count_substring_regex(text, _UNIT), 1)
    is_written = pc.and_(pc.match_substring_regex(text, _WITH_UNIT), one_unit)
    bare = pc.replace_substring_regex(text, rf"{_SPACE}*{_UNIT}{_SPACE}*", "")
    return pc.if_else(is_written, bare, None)


def _with_point(bare: pa.Array, marks: NumberMarks) -> pa.Array:
    """Return numbers with these marks as -1234.5, and null for any other text."""
    decimal, whole = _MARKS[marks.decimal], "[0-9]+"
    if marks.thousands is not None:
        whole += f"|[1-9][0-9]{{0,2}}({_MARKS[marks.thousands]}[0-9]{{3}})+"
    number = f"^[+-]?(({whole})({decimal}[0-9]*)?|{decimal}[0-9]+)([eE][+-]?[0-9]+)?$"
    pointed = bare
    if marks.thousands is not None:
        pointed = pc.replace_substring_regex(pointed, _MARKS[marks.thousands], "")
    pointed = pc.replace_substring(pointed, marks.decimal, ".")
    return pc.if_else(pc.match_substring_regex(bare, number), pointed, None)


class FoundMarks(NamedTuple):
    """The marks with which most cells of some columns are numbers."""

    # The marks that fit best: one, or several that read different numbers. Empty without numbers.
    choices: Sequence[NumberMarks]
    example: str  # a cell that is a number with these marks, but not with the present ones

    @property
    def settings(self) -> str:
        """The settings of params.yaml that give the marks, in words; all of them in case of doubt.

        For example: data.decimal to ',' and data.thousands to '.'.
        """
        return " or ".join(
            f"data.decimal to {as_yaml(marks.decimal)} and "
            f"data.thousands to {as_yaml(marks.thousands)}"
            for marks in self.choices
        )

    @property
    def shown(self) -> str:
        """The example, with its possible readings if there are several."""
        cell, codes = pa.array([self.example]), np.zeros(1, np.int64)
        values = [read_numbers(cell, codes, marks).values[0] for marks in self.choices]
        doubt = f", which may be {' or '.join(f'{value:g}' for value in values)}"
        return f"{self.example!r}{doubt if values[1:] else ''}"


NO_NUMBERS = FoundMarks((), "")


def find_marks(
    columns: Iterable[tuple[pa.Array, NDArray[np.int64]]], present: NumberMarks = POINT
) -> FoundMarks:
    """Find the marks of numbers from the distinct cells of text columns and their rows (U,).

    The `present` marks stay if none fit better: 1.234 stays 1.234 while no column contradicts.
    """
    known = [present, *(marks for marks in _KNOWN_MARKS if marks != present)]
    totals, readings, example = np.zeros(len(known)), [], ""
    for text, counts in columns:
        tried = np.unique(np.linspace(0, len(text) - 1, min(_MOST_CELLS, len(text))).astype(int))
        cells, counts = text.take(pa.array(tried)), counts[tried]
        bare = _without_units(cells)
        values = np.array([_floats(_with_point(bare, one).cast(pa.float64())) for one in known])
        scores = (counts * ~np.isnan(values)).sum(axis=1)
        if not scores.max() or scores.max() < _LEAST_NUMBERS * counts.sum():
            continue
        totals += scores / counts.sum()
        readings.append((cells, values))
        odd = np.isnan(values[0]) & ~np.isnan(values[scores.argmax()])
        if odd.any():
            example = example or cells[int(np.argmax(odd))].as_py()
    if not readings:
        return NO_NUMBERS
    best = np.flatnonzero(totals > totals.max() - 1e-9).tolist()
    choices = best[:1]
    for place in best[1:]:
        differs = all(
            any(_differ(values[[place, one]]).any() for _, values in readings) for one in choices
        )
        if differs and (best[0] != 0 or _may_be_thousands(readings, place)):
            choices.append(place)
    if best[0] == 0 and choices[1:]:
        odd_cells = (cells.filter(pa.array(_differ(values[choices]))) for cells, values in readings)
        example = next(found[0].as_py() for found in odd_cells if len(found))
    return FoundMarks([known[place] for place in choices], example)


def _differ(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask (U,) of the cells that two notations (2, U) read as different numbers."""
    one, other = values
    return np.asarray(~((one == other) | (np.isnan(one) & np.isnan(other))), np.bool_)


def _may_be_thousands(readings: Sequence[tuple[pa.Array, NDArray[np.float64]]], place: int) -> bool:
    """Return True if the marks at `place` would find thousands where the present ones see a point.

    All numbers from 1000 on then have the mark, as in 987, 1.234 and 12.500, and all others lack
    it. Where every cell has three digits after the point, both readings are possible.
    """
    columns = [values[[0, place]] for _, values in readings]
    found = [(np.abs(values[0][~_differ(values)]), _differ(values).sum()) for values in columns]
    return all(
        not num or (num >= _LEAST_THOUSANDS and not (small >= 1000).any()) for small, num in found
    )


def plain_numbers(text: pa.Array) -> NDArray[np.float64]:
    """Parse numbers without unit and thousands separators.

    Returns (U,) float64, with NaN for any other text.
    """
    try:
        return _floats(text.cast(pa.float64()))
    except pa.ArrowInvalid:
        is_plain = pc.match_substring_regex(text, _NUMBER)
        return _floats(pc.if_else(is_plain, text, None).cast(pa.float64()))


def read_date_as(text: str, date_format: str) -> float:
    """Return a date, given as text in a strptime format, as days since 1970 UTC.

    Raises ValueError if the text does not have the format.
    """
    return days_since_1970(datetime.strptime(text, date_format))


def iso_date(days: float) -> str:
    """Return days since 1970 UTC as ISO 8601 text; midnight is written as the date only."""
    moment = _EPOCH + timedelta(days=days)
    return moment.isoformat().removesuffix("T00:00:00+00:00")


def _any(text: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(text, pattern)).as_py())


def _floats(numbers: pa.Array) -> NDArray[np.float64]:
    return np.asarray(numbers.fill_null(np.nan).to_numpy(zero_copy_only=False), np.float64)
