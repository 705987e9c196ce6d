"""Determines the kind of each column: from `data.columns`, or else from the cells.

A column of numbers with a few other cells is a column of numbers with type violations; the same
holds for dates. Columns that teach a network nothing general (ids, free text, row counters) are not
inputs; each has a reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import ColumnParams
from slipway.config.yaml_text import yaml_comment, yaml_entry
from slipway.data.engine.label_sets import FALSE_WORDS, TRUE_WORDS
from slipway.data.sources.raw_tables import RawColumn, is_row_index
from slipway.data.sources.text_format import NOT_UTF8, POINT, NumberMarks
from slipway.data.tables.cells import BAD, GOOD, is_missing, merges_integers, typed_column
from slipway.data.tables.notation import FoundMarks, find_marks
from slipway.inputs.columns import MAX_CATEGORY_LENGTH, ColumnType, Kind
from slipway.system.errors import linked

# Fraction of the present cells that are numbers (or dates) in a column of that kind.
_USUAL_FRACTION = 0.95
_MAX_FEW = 20  # distinct texts that may be categories in any table
_MAX_DISTINCT_FRACTION = 0.5  # fraction of present cells; more distinct texts are ids or free text
_MIN_COUNTED = 20  # with fewer rows, 0, 1, 2, ... may be a coincidence


@dataclass(frozen=True)
class ColumnGuess:
    """The kind of a column, given by the user or inferred; `reason` says why it is ignored."""

    name: str
    kind: Kind | Literal["ignore"]
    reason: str


def column_types(
    raw: Mapping[str, RawColumn], given: Mapping[str, ColumnParams]
) -> list[ColumnGuess]:
    """Return the kind of each column in order: from the user's `data.columns`, or inferred."""
    guesses = []
    for name, column in raw.items():
        kind = given[name].kind if name in given else None
        reason = "data.columns says so" if kind == "ignore" else ""
        guesses.append(infer(column) if kind is None else ColumnGuess(name, kind, reason))
    return guesses


def column_type(
    guess: ColumnGuess, given: ColumnParams | None, with_bounds: bool = True
) -> ColumnType:
    """Return the type of an input column; `with_bounds` keeps the user's bounds."""
    if guess.kind == "ignore":
        raise AssertionError(f"{guess.name!r} is not an input")
    return ColumnType(
        name=guess.name,
        kind=guess.kind,
        required=given is not None and given.required,
        min=given.min if given and with_bounds else None,
        max=given.max if given and with_bounds else None,
        map=given.map if given else {},
    )


def infer(raw: RawColumn) -> ColumnGuess:
    """Infer the kind of a column from its distinct cells."""
    counts = rows_of_cells(raw)
    present = int(counts[~is_missing(raw)].sum())
    if raw.stored == "other" and raw.arrow_type != "null":
        return ColumnGuess(raw.name, "ignore", f"its type {raw.arrow_type} is not supported")
    if not present:
        return ColumnGuess(raw.name, "ignore", "it is empty: no row has a value")
    if is_row_index(raw.name):
        reason = "its name is that of a row index, added by the program that wrote the file"
        return ColumnGuess(raw.name, "ignore", reason)
    if raw.stored == "boolean":
        return ColumnGuess(raw.name, "boolean", "")
    if raw.stored == "number":
        return _number(raw)
    return _infer_text(raw, counts, present)


def _infer_text(raw: RawColumn, counts: NDArray[np.int64], present: int) -> ColumnGuess:
    missing = is_missing(raw)
    words = pa.array((*TRUE_WORDS, *FALSE_WORDS))
    is_word = pc.is_in(pc.utf8_lower(raw.values), words).to_numpy(zero_copy_only=False)
    is_digit = pc.is_in(raw.values, pa.array(("0", "1"))).to_numpy(zero_copy_only=False)
    if (is_word | is_digit | missing).all() and (is_word.any() or missing.all()):
        return ColumnGuess(raw.name, "boolean", "")
    are_dates = _fraction(raw, "date", counts, present) >= _USUAL_FRACTION
    # Digits alone may be dates in a format that the user names, such as %Y%m%d.
    is_format_named = raw.written.date_format is not None
    are_numbers = _fraction(raw, "number", counts, present) >= _USUAL_FRACTION
    are_ids = are_numbers and merges_integers(raw)
    if are_numbers and not are_ids and not (are_dates and is_format_named):
        return _number(raw)
    if are_dates:
        return ColumnGuess(raw.name, "date", "")
    if not are_ids and (reason := _other_marks(raw, counts, present)):
        return ColumnGuess(raw.name, "ignore", reason)
    bad = typed_column(raw, "category").states[:-1] == BAD
    garbled = pc.match_substring(raw.values, NOT_UTF8).to_numpy(zero_copy_only=False)
    if (num := counts[garbled].sum()) > (1 - _USUAL_FRACTION) * present:
        reason = f"{num} of {present} cells are not in the encoding of data.encoding"
        return ColumnGuess(raw.name, "ignore", reason)
    long = counts[bad & ~garbled].sum()
    if long > (1 - _USUAL_FRACTION) * present:
        reason = f"free text: {long} cells have more than {MAX_CATEGORY_LENGTH} characters"
        return ColumnGuess(raw.name, "ignore", reason)
    distinct = int((~missing).sum())
    if distinct > max(_MAX_FEW, _MAX_DISTINCT_FRACTION * present):
        reason = f"ids or free text: {distinct} different values in {present} cells"
        return ColumnGuess(raw.name, "ignore", reason)
    return ColumnGuess(raw.name, "category", "")


def _other_marks(raw: RawColumn, counts: NDArray[np.int64], present: int) -> str:
    """Return the reason why a column of numbers with other marks is no input; "" for any other."""
    found = marks_of([raw], raw.written.marks)
    if not found.choices or found.choices[0] == raw.written.marks:
        return ""
    other = replace(raw, written=raw.written._replace(marks=found.choices[0]))
    if _fraction(other, "number", counts, present) < _USUAL_FRACTION:
        return ""
    return (
        f"its cells look like numbers such as {found.shown}: set {found.settings}, "
        "which holds for all columns"
    )


def marks_of(columns: Iterable[RawColumn], present: NumberMarks = POINT) -> FoundMarks:
    """Find the marks of the numbers in the text columns; the `present` ones, if none fit better."""
    texts = [column for column in columns if column.stored == "text"]
    return find_marks(
        (
            (
                column.values,
                np.where(is_missing(column), 0, rows_of_cells(column)),
            )
            for column in texts
        ),
        present,
    )


def rows_of_cells(raw: RawColumn) -> NDArray[np.int64]:
    """Return the number of rows of each distinct cell, (U,)."""
    return np.bincount(raw.codes + 1, minlength=len(raw.values) + 1)[1:]


def _fraction(raw: RawColumn, kind: Kind, counts: NDArray[np.int64], present: int) -> float:
    good = typed_column(raw, kind).states[:-1] == GOOD
    return float(counts[good].sum()) / present


def _number(raw: RawColumn) -> ColumnGuess:
    if counts_rows(raw):
        cells = typed_column(raw, "number").cells
        reason = f"it counts the rows from {cells[0]:g} to {cells[-1]:g}"
        return ColumnGuess(raw.name, "ignore", reason)
    return ColumnGuess(raw.name, "number", "")


def counts_rows(raw: RawColumn) -> bool:
    """Return True if the cells are enough integers that increase by one from row to row."""
    if raw.stored not in ("number", "text") or len(raw.codes) < _MIN_COUNTED:
        return False
    return bool((np.diff(typed_column(raw, "number").cells.astype(np.float64)) == 1).all())


def columns_yaml(types: Iterable[ColumnType], ignored: Mapping[str, str]) -> str:
    """Return the text of `reports/columns.yaml`, for the user to edit and copy to params.yaml."""
    lines = [
        "# The kind of each column. Correct it and put it under data.columns in params.yaml; "
        + linked("see docs/reference/tables.md.")
    ]
    lines += [_entry(column.name, column.model_dump(exclude={"name"})) for column in types]
    for name, reason in ignored.items():
        fields: dict[str, object] = {"kind": "ignore", "min": None, "max": None, "required": False}
        lines.append(_entry(name, fields) + yaml_comment(reason))
    if len(lines) == 1:
        lines.append("{}")
    return "\n".join(lines) + "\n"


def _entry(name: str, fields: dict[str, object]) -> str:
    ordered = {key: fields[key] for key in ("kind", "min", "max", "required")}
    return yaml_entry(name, ordered | ({"map": fields["map"]} if fields.get("map") else {}))
