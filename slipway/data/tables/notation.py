"""Reads numbers and dates from text: units, thousands separators, and `data.date_format`.

The cells of a column share one unit: if most cells are percentages, a plain number is not valid,
because it may be a fraction. A comma separates thousands only if another cell of the column proves
that the point is the decimal mark.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.inputs.columns import days_since_1970

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_UNIT = r"[%\p{Sc}]"  # percent, or the sign of a currency
_WITH_UNIT = rf"^([+-]?\s*\p{{Sc}}\s*)?[+-]?[0-9.,]+(\s*{_UNIT})?$"
_THOUSANDS = r"^[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?$"
_DECIMAL_POINT = r"(,[0-9]{3}){2}|,[0-9]{3}\.|^[+-]?[0-9]*\.([0-9]{0,2}|[0-9]{4,})$"
_DECIMAL_COMMA = r"^[+-]?[0-9.]*,([0-9]{0,2}|[0-9]{4,})$"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class WrittenNumbers(NamedTuple):
    """The numbers that were read from the distinct cells of a text column."""

    values: NDArray[np.float64]  # (U,), NaN if the text is not a number
    unit: str  # "%", "$" or the like, which all of them have; "" for none


def read_numbers(text: pa.Array, codes: NDArray[np.int64]) -> WrittenNumbers:
    """Return the numbers in distinct cells (U,), null if missing; `codes` gives each row's cell."""
    plain = plain_numbers(text)
    if not pc.any(pc.and_(pa.array(np.isnan(plain)), pc.is_valid(text))).as_py():
        return WrittenNumbers(plain, "")
    one_unit = pc.less_equal(pc.count_substring_regex(text, _UNIT), 1)
    is_written = pc.and_(pc.match_substring_regex(text, _WITH_UNIT), one_unit)
    bare = pc.replace_substring_regex(text, rf"\s*{_UNIT}\s*", "")
    bare = pc.if_else(is_written, bare, None)
    if _any(bare, _DECIMAL_POINT) and not _any(bare, _DECIMAL_COMMA):
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
