"""Converts table rows to network inputs, for training and serving alike.

A column contract is fitted on the training split and stored in the bundle: kinds, bounds,
categories, means, scales and replacements for missing values. `read_row` checks the cells of a row
against the contract, and refuses one with the name of the broken rule. `encode` turns typed columns
into one float32 matrix.

Values unlike the data, such as a new category or a missing value in a complete column, are refused
and never guessed. One case is different: validation or test rows lack values or have new
categories, but training rows do not. The network then could not learn an indicator for them, so
such values are replaced by the median or the most frequent category of the training rows.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.inputs.contract import InputContract
from slipway.system.contract import Contract
from slipway.system.errors import BundleError, CellError

Kind = Literal["number", "category", "boolean", "date"]
MAX_CATEGORY_LENGTH = 256
_SECONDS_PER_DAY = 86400
_EPOCH = datetime(1970, 1, 1)  # in UTC, as are dates without a zone
_SHOWN_CATEGORIES = 8
_BLOCK_ROWS = 1 << 14
_EXPONENT_FROM = 1e9  # from this number on, examples show whole numbers in short form too


class ColumnType(Contract):
    """The type and the bounds of a column, inferred or set by the user."""

    name: str
    kind: Kind
    required: bool  # a missing value is refused
    min: float | None  # smaller numbers are refused
    max: float | None
    # "%" or the sign of a currency, which the numbers of the data have; "" for none. Absent from
    # older bundles. JSON has numbers without it.
    unit: str | None = None
    # Spellings of a category: {found: meant}, for files and requests. Absent from older bundles.
    map: dict[str, str] = Field(default_factory=dict)


class Column(ColumnType):
    """A column of the contract, with the statistics that were fitted on the training split."""

    # Training rows have missing or unknown values: they are allowed and have an indicator.
    has_missing: bool
    categories: list[str]  # categories by code - 1; code 0 is missing or unknown
    mean: float  # dates: days since 1970 UTC; booleans: 0 and 1; 0 for categories
    std: float  # above 0; 1 for categories
    fill: float  # the median, which replaces missing values; 0 for categories
    quantiles: list[float]  # increasing; of numbers and dates, for networks that bin their inputs
    # Only rows outside the training split have missing or unknown values: these become `fill`, or
    # code 1.
    imputed: bool = False

    @property
    def takes_missing(self) -> bool:
        """True if missing values and unknown categories are allowed."""
        return self.has_missing or self.imputed

    @property
    def is_required(self) -> bool:
        """True if the user requires the column, or the training data never lacked it."""
        return self.required or not self.takes_missing

    @property
    def has_times(self) -> bool:
        """True if the first or the last date of the training rows has a time of day."""
        # Quantiles between the two are interpolated, so they have one even among whole days.
        return self.kind == "date" and not all(
            day.is_integer() for day in (*self.quantiles[:1], *self.quantiles[-1:])
        )

    @cached_property
    def codes(self) -> dict[str, int]:
        """The integer code of each category, from 1. Code 0 stands for missing or unknown."""
        return {category: position for position, category in enumerate(self.categories, start=1)}

    def describe(self) -> dict[str, Any]:
        """Return the column's name, kind, categories or bounds, and if it is required, as JSON."""
        described = {"name": self.name, "kind": self.kind, "required": self.is_required}
        if self.kind == "category":
            return described | {
                "categories": self.categories,
                "other_categories": "missing" if self.takes_missing else "refused",
            }
        if self.kind == "number":
            with_unit = {"unit": self.unit} if self.unit else {}
            return described | {"min": self.min, "max": self.max} | with_unit
        if self.kind == "date":
            return described | {"has_times": self.has_times}
        return described

    def example(self) -> Any:
        """Return a typical value: the median of a number, the most frequent category."""
        if self.kind == "category":
            return self.categories[0] if self.categories else None
        if self.kind == "boolean":
            return self.fill >= 0.5
        if self.kind == "date":
            if self.has_times:
                return (_EPOCH + timedelta(minutes=round(self.fill * 1440))).isoformat()
            return (_EPOCH + timedelta(days=round(self.fill))).date().isoformat()
        if self.fill.is_integer() and abs(self.fill) < _EXPONENT_FROM:
            return int(self.fill)
        # Few digits, as people write them, unless rounding leaves the bounds.
        short = float(f"{self.fill:.6g}")
        is_too_low = self.min is not None and short < self.min
        is_too_high = self.max is not None and short > self.max
        return self.fill if is_too_low or is_too_high else short


@dataclass(frozen=True)
class ColumnLayout:
    """The parameters of a contract as arrays, so that numpy encodes all columns in a few calls."""

    names: list[str]  # names of the columns of numbers, booleans and dates
    fills: NDArray[np.float64]  # (numeric,) like the next two
    means: NDArray[np.float64]
    stds: NDArray[np.float64]
    indicated: NDArray[np.intp]  # positions in `names`
    categorical: list[Column]


class ColumnContract(InputContract):
    """Input of a table network: (rows, width) float32.

    First the standardised value of each number, boolean and date, in the order of `columns`; then
    for each of these with `has_missing` an indicator, 1 if missing; then the code of each category,
    an integer from 0 to len(categories).
    """

    kind: Literal["columns"]
    columns: list[Column]
    # Other columns of the training table except the target: rows may have them, with any value.
    ignored: list[str] = Field(default_factory=list)  # absent from older bundles
    # Rows of the training data as JSON, for explanations; the first is the most typical one. Empty
    # before the export, with `export.background_rows: 0`, and in older bundles.
    background: list[dict[str, Any]] = Field(default_factory=list)
    # The marks of numbers in text (`data.decimal`, `data.thousands`), which files and tables of
    # callers have as well. Absent from older bundles. JSON has numbers.
    decimal: str = "."
    thousands: str | None = None

    @cached_property
    def accepted(self) -> frozenset[str]:
        """Names of the columns that a row may have, including those that training ignored."""
        return frozenset([*(column.name for column in self.columns), *self.ignored])

    @property
    def numeric(self) -> list[Column]:
        """The columns of numbers, booleans and dates, in the order of the network's input."""
        return [column for column in self.columns if column.kind != "category"]

    @property
    def indicated(self) -> list[Column]:
        """The columns of `numeric` that have an indicator of missing values, in the same order."""
        return [column for column in self.numeric if column.has_missing]

    @property
    def categorical(self) -> list[Column]:
        """The columns of categories, in the order of the network's input."""
        return [column for column in self.columns if column.kind == "category"]

    @property
    def shape(self) -> tuple[int]:
        """The shape of one row: (width,)."""
        return (len(self.layout.names) + len(self.layout.indicated) + len(self.layout.categorical),)

    @cached_property
    def layout(self) -> ColumnLayout:
        numeric = self.numeric
        return ColumnLayout(
            names=[column.name for column in numeric],
            fills=np.array([column.fill for column in numeric], np.float64),
            means=np.array([column.mean for column in numeric], np.float64),
            stds=np.array([column.std for column in numeric], np.float64),
            indicated=np.flatnonzero([column.has_missing for column in numeric]),
            categorical=self.categorical,
        )

    @property
    def dtype(self) -> type[np.float32]:
        return np.float32

    def require_usable(self) -> None:
        """Raise BundleError if there is no column, or two of the same name."""
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise BundleError(
                f"the bundle's columns are {names}, expected one or more different names. "
                "Run `dvc repro export`."
            )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "columns": [column.describe() for column in self.columns],
            "ignored": self.ignored,
            "example": self.example_row(),
            "background_rows": len(self.background),
        }

    def example_row(self) -> dict[str, Any]:
        """Return a typical row of the training data, or else one of typical values, as JSON."""
        if self.background:
            return self.background[0]
        return {column.name: column.example() for column in self.columns}

    def example_rows(self, num_rows: int) -> NDArray[np.float32]:
        """Return made-up encoded rows (num_rows, width) float32, within one standard deviation."""
        rows = np.arange(num_rows)[:, np.newaxis]
        values = (rows + np.arange(len(self.numeric))) % 7 / 3 - 1
        indicators = (rows + np.arange(len(self.indicated))) % 2
        # Code 0, missing or unknown, comes only where the network learnt it.
        first = np.array(
            [0 if column.has_missing else 1 for column in self.categorical], dtype=np.int64
        )
        last = np.array([len(column.categories) for column in self.categorical], dtype=np.int64)
        codes = first + rows % (last - first + 1)
        return np.concatenate([values, indicators, codes], axis=1).astype(self.dtype)


def positions_of(contract: ColumnContract) -> list[list[int]]:
    """Return the positions of each column's values in the encoded row.

    A number, boolean or date has one for its value and perhaps one for its indicator; a category
    has one for its code.
    """
    names, indicated = contract.layout.names, [column.name for column in contract.indicated]
    categories = [column.name for column in contract.categorical]
    positions = []
    for column in contract.columns:
        if column.kind == "category":
            positions.append([len(names) + len(indicated) + categories.index(column.name)])
        else:
            places = [names.index(column.name)]
            if column.name in indicated:
                places.append(len(names) + indicated.index(column.name))
            positions.append(places)
    return positions


Cell = float | str | None  # a category as text, anything else as a number; None is missing


def read_row(row: Mapping[str, Any], contract: ColumnContract) -> dict[str, Cell]:
    """Read the cells of one JSON object, typed by the contract.

    Categories are strings, dates ISO 8601 strings; null or an absent key is a missing value. Raises
    CellError with the column and the broken rule.
    Columns that training ignored are ignored here too.
    """
    for name in row:
        if name not in contract.accepted:
            hint = _hint(name, {column.name for column in contract.columns})
            raise CellError(
                "unknown_column", str(name)[:80], f"there is no such column{hint}"[:1000]
            )
    return {column.name: read_cell(row.get(column.name), column) for column in contract.columns}


def read_cell(value: Any, column: Column) -> Cell:
    """Read one JSON value as a typed cell. Raises CellError if the column does not allow it."""
    if value is None or (isinstance(value, str) and not value.strip()):
        if column.required or not column.takes_missing:
            raise CellError(
                "missing_value", column.name, f"a value is missing, expected {_expected(column)}"
            )
        return None
    cell = _typed(value, column)
    if isinstance(cell, str):
        if cell not in column.codes and not column.takes_missing:
            raise CellError(
                "unknown_category",
                column.name,
                f"found {cell[:80]!r}, expected {_expected(column)}",
            )
        return cell
    if (column.min is not None and cell < column.min) or (
        column.max is not None and cell > column.max
    ):
        raise CellError(
            "out_of_range", column.name, f"found {cell:g}, expected {_expected(column)}"
        )
    return cell


def encode(
    columns: Mapping[str, Sequence[Cell] | NDArray[Any]], contract: ColumnContract
) -> NDArray[np.float32]:
    """Encode columns as (rows, width) float32.

    Each column is a list of cells, or a float64 array with NaN for missing. Raises CellError if a
    standardised value exceeds the range of float32.
    """
    num_rows = len(columns[contract.columns[0].name]) if contract.columns else 0
    encoded = np.empty((num_rows, *contract.shape), np.float32)
    for begin in range(0, num_rows, _BLOCK_ROWS):  # float64 intermediates of all rows need memory
        block = slice(begin, begin + _BLOCK_ROWS)
        # None becomes NaN.
        numbers = [np.array(columns[name][block], np.float64) for name in contract.layout.names]
        codes = [
            _codes(columns[column.name][block], column) for column in contract.layout.categorical
        ]
        _fill(encoded[block], numbers, codes, contract.layout)
    return encoded


def encode_rows(
    rows: Sequence[Mapping[str, Cell]], contract: ColumnContract
) -> NDArray[np.float32]:
    """Encode rows read by `read_row` as (rows, width) float32."""
    encoded = np.empty((len(rows), *contract.shape), np.float32)
    numbers = [[row[name] for row in rows] for name in contract.layout.names]
    codes = [
        _codes([row[column.name] for row in rows], column) for column in contract.layout.categorical
    ]
    _fill(encoded, numbers, codes, contract.layout)
    return encoded


def _hint(name: str, known: set[str]) -> str:
    """Return a hint for an unknown column: a known name that differs only in case, or all names.

    Does not search for similar names, because long names from callers would make that slow.
    """
    for column in sorted(known):
        if len(name) <= MAX_CATEGORY_LENGTH and column.strip().lower() == name.strip().lower():
            return f"; did you mean {column!r}?"
    return f", expected {', '.join(sorted(known))}"


def _fill(
    encoded: NDArray[np.float32],
    numbers: Sequence[Sequence[Cell] | NDArray[np.float64]],
    codes: Sequence[NDArray[np.float32]],
    layout: ColumnLayout,
) -> None:
    """Write standardised values, indicators and category codes into `encoded` (rows, width).

    `numbers` has a sequence of cells for each numeric column, with None or NaN for missing. `codes`
    has an array (rows,) for each category column. Raises CellError if a value overflows float32.
    """
    end = len(numbers)
    matrix = np.array(numbers, np.float64).reshape(end, len(encoded)).T  # (rows, numeric)
    missing = np.isnan(matrix)
    with np.errstate(over="ignore"):
        encoded[:, :end] = (np.where(missing, layout.fills, matrix) - layout.means) / layout.stds
    finite = np.isfinite(encoded[:, :end])
    if not finite.all():
        first = int(np.argmin(finite.all(axis=0)))
        raise CellError(
            "out_of_range",
            layout.names[first],
            "a number is too large to be standardised in 32 bits",
        )
    encoded[:, end : end + len(layout.indicated)] = missing[:, layout.indicated]
    for position, column in enumerate(codes, start=end + len(layout.indicated)):
        encoded[:, position] = column


def days_since_1970(moment: datetime) -> float:
    """Return the days from 1970-01-01 UTC to `moment`, which is in UTC if it has no time zone."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() / _SECONDS_PER_DAY


def read_date(text: str) -> float:
    """Return days since 1970 UTC from ISO 8601 text. Raises ValueError for other text."""
    return days_since_1970(datetime.fromisoformat(text.strip()))


def _codes(cells: Sequence[Cell] | NDArray[Any], column: Column) -> NDArray[np.float32]:
    unknown = 0 if column.has_missing else 1  # 1: an imputed column
    codes = [unknown if cell is None else column.codes.get(str(cell), unknown) for cell in cells]
    return np.array(codes, dtype=np.float32)


def _typed(value: Any, column: Column) -> float | str:
    typed = _value_of(value, column.kind)
    if isinstance(typed, str):
        typed = column.map.get(typed, typed)
    if typed is None:
        found = f"found {_shown(value, column)}, expected {_expected(column)}"
        raise CellError("type_violation", column.name, found)
    return typed


def _value_of(value: Any, kind: Kind) -> float | str | None:
    """Return a cell as text or as a finite number; None if it is not of the column's kind."""
    if kind == "category" and isinstance(value, str):
        text = value.strip()
        return text if len(text) <= MAX_CATEGORY_LENGTH else None
    if kind == "boolean" and isinstance(value, bool):
        return float(value)
    if kind == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        number = _float(value)
        return number if math.isfinite(number) else None
    if kind == "date" and isinstance(value, (str, date)):
        try:
            return read_date(value if isinstance(value, str) else value.isoformat())
        except (ValueError, OverflowError):
            return None
    return None


def _shown(value: Any, column: Column) -> str:
    """Return a refused cell for an error, with a hint if it almost fits."""
    if not isinstance(value, str):
        return str(value)[:80]
    shown = repr(value[:80])
    if _would_fit(value, column):
        shown = f"the text {shown}"  # quotes are easily overlooked
    if column.kind == "number" and _has_unit(value):
        shown += ", which has a unit"
    return shown


def _would_fit(text: str, column: Column) -> bool:
    """Return True if a text spells a number or boolean that the column would allow."""
    if column.kind == "boolean":
        return text.strip().lower() in ("true", "false")
    try:
        return (
            column.kind == "number"
            and len(text) <= MAX_CATEGORY_LENGTH
            and math.isfinite(float(text))
        )
    except ValueError:
        return False


def _has_unit(text: str) -> bool:
    return any(mark == "%" or unicodedata.category(mark) == "Sc" for mark in text[:80])


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _expected(column: Column) -> str:
    if column.kind == "category":
        shown = ", ".join(column.categories[:_SHOWN_CATEGORIES])
        more = ", ..." if len(column.categories) > _SHOWN_CATEGORIES else ""
        return f"one of {len(column.categories)} categories: {shown}{more}"
    if column.kind == "boolean":
        return "true or false"
    if column.kind == "date":
        return "a date as ISO 8601 text, such as 2026-11-20 or 2026-11-20T12:00:00Z"
    return expected_number(column)


def expected_number(column: ColumnType) -> str:
    """Describe the numbers that the bounds of a column allow, for a message."""
    bounds = [f"at least {column.min:g}"] if column.min is not None else []
    bounds += [f"at most {column.max:g}"] if column.max is not None else []
    return " ".join(["a finite number", " and ".join(bounds)]).strip()
