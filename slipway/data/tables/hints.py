"""Finds cells of a table that look wrong, and settings of params.yaml that would correct them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.config.yaml_text import as_yaml
from slipway.data.rules.class_names import listed_variants, variants
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.sources.text_format import NOT_UTF8, NumberMarks, remedy
from slipway.data.tables.cells import (
    BAD,
    GOOD,
    MISSING,
    MISSING_WORDS,
    dates_as,
    is_missing,
    shown_cell,
    typed_column,
)
from slipway.data.tables.column_types import ColumnGuess, marks_of, rows_of_cells
from slipway.data.tables.notation import iso_date
from slipway.data.tables.source import table_of
from slipway.inputs.columns import Kind
from slipway.kinds.registry import kind_of

_KINDS: tuple[Kind, ...] = ("number", "date")
_MIN_FRACTION = 0.5  # least fraction of the present cells that have the kind
_MAX_SHOWN = 5
_MAX_TOKENS = 10  # different cells that may all mean a missing value
_MAX_CHARACTERS = 20
_MOST_GRADES, _RARE = 20, 0.05  # different numbers; fraction of the present cells
_MOST_CELLS = 2_000  # distinct cells that are tried as dates
_LOOKS_LIKE_A_DATE = r"^[0-9A-Za-z]{1,9}[-/. ,]+[0-9A-Za-z]{1,9}[-/. ,]+[0-9]{1,4}([ T].*)?$"
_DATE_FORMATS = [
    f"{day}{time}"
    for time in ("", " %H:%M", " %H:%M:%S")
    for day in (
        *("%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y"),
        *("%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%b %d, %Y"),
    )
]


def table_hints(raw: RawTable, guesses: Sequence[ColumnGuess], data: DataParams) -> list[str]:
    """Return hints on cells of a table that look wrong."""
    hints, words, formats = encoding_hint(raw, data), list(data.missing_values), data.date_format
    special = _special_kinds(data)
    for guess in [*guesses, *(ColumnGuess(name, kind, "") for name, kind in special.items())]:
        column = raw.columns[guess.name]
        if column.stored != "text" or guess.name in data.columns:
            continue
        counts, is_input = rows_of_cells(column), guess.name not in special
        if is_input or guess.kind != "category":
            found = _blocked(column, guess, counts, is_input)
            hints += [found.hint] if found.hint else []
            words += [word for word in found.words if word not in words]
            formats = formats or found.date_format
        hints += _codes_hint(column, guess, counts) if is_input else []
        hints += _spelling_hint(column, guess, counts, is_input)
    hints += _names_hint(raw, data)
    found_marks = _other_marks(raw, guesses, data)
    hints += [text for text, _ in found_marks]
    lines = "".join(setting for _, setting in found_marks)
    if words != data.missing_values:
        lines += f"\n  missing_values: {as_yaml(words)}"
    if formats != data.date_format:
        lines += f"\n  date_format: {as_yaml(formats)}"
    if lines:
        hints.append(f"if that is right, put this under data in params.yaml:{lines}")
    return hints


def _other_marks(
    raw: RawTable, guesses: Sequence[ColumnGuess], data: DataParams
) -> list[tuple[str, str]]:
    """Return a hint and lines of params.yaml if other marks fit the numbers of the table better."""
    names = [name for name, kind in _special_kinds(data).items() if kind == "number"]
    names += [guess.name for guess in guesses]
    given = {name: column.kind for name, column in data.columns.items()}
    chosen = [raw.columns[name] for name in names if given.get(name, "number") == "number"]
    present = NumberMarks(data.decimal, data.thousands)
    found = marks_of(chosen, present)
    if len(found.choices) != 1 or found.choices[0] == present:
        return []
    (marks,) = found.choices
    if not any(_reads_more(column, marks) for column in chosen if column.stored == "text"):
        return []
    return [
        (
            f"numbers such as {found.shown} have other marks than data.decimal and data.thousands",
            f"\n  decimal: {as_yaml(marks.decimal)}\n  thousands: {as_yaml(marks.thousands)}",
        )
    ]


def _reads_more(column: RawColumn, marks: NumberMarks) -> bool:
    """Return True if more cells of a column are numbers with these marks than with its own."""
    other = replace(column, written=column.written._replace(marks=marks))
    num_good = [(typed_column(each, "number").states == GOOD).sum() for each in (column, other)]
    return bool(num_good[1] > num_good[0])


def _special_kinds(data: DataParams) -> dict[str, Kind]:
    """Return the kinds of the columns for time, group and numeric target, by name of the column."""
    target = None if kind_of(data.task).target.has_classes else data.target_columns[0]
    kinds: dict[str | None, Kind]
    kinds = {data.time_column: "date", data.group_column: "category", target: "number"}
    return {name: kind for name, kind in kinds.items() if name is not None}


def written_as(
    raw: RawTable, guesses: Sequence[ColumnGuess], data: DataParams
) -> tuple[list[str], dict[str, str]]:
    """Return `missing_values`, extended, and the format of dates of each column that needs one."""
    words, formats = list(data.missing_values), {}
    for guess in guesses:
        column = raw.columns[guess.name]
        if column.stored == "text" and guess.name not in data.columns:
            found = _blocked(column, guess, rows_of_cells(column), True)
            words += [word for word in found.words if word not in words]
            if found.date_format is not None:
                formats[guess.name] = found.date_format
    return words, formats


def missing_names(raw: RawColumn, known: Collection[str] = ()) -> dict[str, int]:
    """Return the rows of each label such as NA that counts as missing.

    Leaves out the labels that are `known`, and the user's own words for missing values.
    """
    if raw.stored != "text":
        return {}
    counts = np.where(is_missing(raw), rows_of_cells(raw), 0)
    found = {raw.values[int(code)].as_py(): int(counts[code]) for code in np.flatnonzero(counts)}
    usual = {*MISSING_WORDS} - {"", *raw.written.missing_values}
    return {n: rows for n, rows in found.items() if n.lower() in usual and n not in known}


def _names_hint(raw: RawTable, data: DataParams) -> list[str]:
    """Return a hint on labels such as NA, with the map that makes classes of them."""
    if not kind_of(data.task).target.has_classes or not isinstance(data.target_column, str):
        return []
    known = {*data.label_map, *(data.classes or ())}
    found = missing_names(raw.columns[data.target_column], known)
    if not found:
        return []
    shown = ", ".join(f"{name!r} ({rows} rows)" for name, rows in found.items())
    kept = {**data.label_map, **{name: name for name in found}}
    return [
        f"labels that count as missing: {shown}. If they are classes, put this under data in "
        f"params.yaml:\n  label_map: {as_yaml(kept)}"
    ]


def encoding_hint(raw: RawTable, data: DataParams) -> list[str]:
    """Return a hint with the number of cells that are not in `data.encoding`, and the first one."""
    num_cells, first = 0, []
    for column in raw.columns.values():
        if column.stored == "text" and pc.any(found := pc.match_substring(column.values, NOT_UTF8)):
            rows = np.flatnonzero(np.append(found, False)[column.codes])
            num_cells += len(rows)
            first.append((int(rows[0]), column))
    if not first:
        return []
    row, column = min(first, key=lambda found: found[0])
    table = table_of(data, raw.source(int(raw.numbers[row])))
    return [
        f"{num_cells} cells are not {data.encoding.upper()}, the first in row {raw.numbers[row]}, "
        f"column {column.name!r}: {shown_cell(column, row)}. {remedy(table)}"
    ]


class _Blocked(NamedTuple):
    """The cells that prevent a column from being numbers or dates."""

    hint: str = ""
    words: Sequence[str] = ()  # cells that may stand for a missing value
    date_format: str | None = None


def _blocked(
    raw: RawColumn, guess: ColumnGuess, counts: NDArray[np.int64], is_input: bool
) -> _Blocked:
    if guess.kind == "boolean":
        return _Blocked()
    states = {kind: typed_column(raw, kind).states[:-1] for kind in _KINDS}
    present = int(counts[states["number"] != MISSING].sum())
    kind = max(_KINDS, key=lambda kind: int(counts[states[kind] == GOOD].sum()))
    num_good = int(counts[states[kind] == GOOD].sum())
    if num_good < _MIN_FRACTION * present:
        return _other_dates(raw, states["date"] == BAD, counts, present)
    bad = np.flatnonzero(states[kind] == BAD)
    if not len(bad):
        return _Blocked()
    bad = bad[np.argsort(-counts[bad], kind="stable")]
    cells = [(str(raw.values[int(index)]), int(counts[index])) for index in bad[:_MAX_TOKENS]]
    shown = [f"{cell[:_MAX_CHARACTERS]!r} ({num})" for cell, num in cells[:_MAX_SHOWN]]
    rest = f" and {len(bad) - _MAX_SHOWN} more" if len(bad) > _MAX_SHOWN else ""
    are_grades = int((states[kind] == GOOD).sum()) <= _MOST_GRADES
    words = [
        cell
        for cell, num in cells
        if len(cell) <= _MAX_CHARACTERS and not any(map(str.isdigit, cell))
        # Beside a few numbers, a letter that is not rare is another grade.
        if not (are_grades and cell.isalpha() and num > _RARE * present)
    ]
    text = (
        f"column {raw.name!r}, {'no input' if guess.kind == 'ignore' else f'a {guess.kind}'}: "
        f"{num_good} of {present} cells are {kind}s. The others are {', '.join(shown)}{rest}"
    )
    if not is_input:  # such a row is refused, whatever the cell means
        return _Blocked(text)
    if len(bad) > len(words) and guess.kind != kind:
        text += (
            ". To read it all the same, correct them, or put this under data.columns in "
            f"params.yaml, with clean.rules.type_violation: flag\n  {_entry(raw.name, kind)}"
        )
    return _Blocked(text, words if len(bad) <= _MAX_TOKENS else ())


def _entry(name: str, kind: Kind, **changes: object) -> str:
    """Return the lines of `data.columns` that set the kind of a column."""
    entry = {"kind": kind, "min": None, "max": None, "required": False} | changes
    return as_yaml({name: entry})[1:-1]


def _other_dates(
    raw: RawColumn, is_bad: NDArray[np.bool_], counts: NDArray[np.int64], present: int
) -> _Blocked:
    """Return the format in which most of the cells are dates, or None."""
    is_like = pc.match_substring_regex(raw.values, _LOOKS_LIKE_A_DATE)
    likely = is_bad & is_like.to_numpy(zero_copy_only=False)
    if counts[likely].sum() < _MIN_FRACTION * present:
        return _Blocked()
    places = np.flatnonzero(likely)[:_MOST_CELLS]
    tried = replace(raw, values=raw.values.take(pa.array(places)))
    num_rows = {
        name: int(counts[places][~np.isnan(dates_as(tried, name))].sum()) for name in _DATE_FORMATS
    }
    most = max(num_rows.values())
    if not most:
        return _Blocked()
    best = [name for name, num in num_rows.items() if num == most]
    example = raw.values[int(places[0])].as_py()
    doubt = f" They fit {' and '.join(best)} alike: choose the right one." if best[1:] else ""
    least = "at least " if len(places) == _MOST_CELLS else ""
    text = (
        f"column {raw.name!r}: {least}{most} of {present} cells are dates such as {example!r}."
        f"{doubt}"
    )
    return _Blocked(text, date_format=best[0])


def _codes_hint(raw: RawColumn, guess: ColumnGuess, counts: NDArray[np.int64]) -> list[str]:
    """Return a hint on a column of numbers with leading zeros, which are probably codes."""
    if guess.kind != "number":
        return []
    found = pc.match_substring_regex(raw.values, "^0[0-9]+$").to_numpy(zero_copy_only=False)
    if not found.any():
        return []
    example = raw.values[int(np.argmax(found))].as_py()
    return [
        f"column {raw.name!r}: {counts[found].sum()} cells have leading zeros, which a number "
        f"loses: {example!r} is {int(example)}. For codes, put this under data.columns in "
        f"params.yaml:\n  {_entry(raw.name, 'category')}"
    ]


def _spelling_hint(
    raw: RawColumn, guess: ColumnGuess, counts: NDArray[np.int64], is_input: bool
) -> list[str]:
    if guess.kind != "category":
        return []
    num_rows: Counter[str] = Counter()
    for value, count in zip(raw.values.to_pylist(), counts.tolist(), strict=True):
        num_rows[value] += count
    found = variants(num_rows)
    if not found:
        return []
    shown = listed_variants(found, num_rows)
    text = f"column {raw.name!r} has values that differ only in spelling: {shown}"
    if is_input:
        entry = _entry(raw.name, "category", map=found)
        text += f". If they are one, put this under data.columns in params.yaml:\n  {entry}"
    return [text]


def written_notes(raw: Mapping[str, RawColumn], guesses: Sequence[ColumnGuess]) -> dict[str, str]:
    """Return a note for each column that clients must send in another notation than the file's."""
    notes = {}
    for guess in guesses:
        column = raw[guess.name]
        if guess.kind == "number" and (unit := typed_column(column, "number").unit):
            notes[guess.name] = f"numbers with {unit}; the service takes them without, as 12.5"
        if guess.kind == "date" and column.written.date_format is not None:
            typed = typed_column(column, "date")
            if not (typed.states == GOOD).any():  # the findings say so
                continue
            code = int(np.argmax(typed.states == GOOD))
            text, iso = column.values[code].as_py(), iso_date(float(typed.values[code]))
            if not text.startswith(iso[:10]):
                notes[guess.name] = f"dates as {text!r}; the service takes ISO 8601, as {iso!r}"
    return notes
