"""Reads the annotation columns of a table: label or number, group, time, weight and split."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.label_sets import set_text
from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.label_sets import EXPECTED, meant_labels, read_labels
from slipway.data.engine.rows import SPLITS
from slipway.data.engine.scratch import each_true, scratch_array, slices, take
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.sources.text_format import NOT_UTF8
from slipway.data.splits.split_file import read_split_file
from slipway.data.tables.cells import BAD, GOOD, MISSING, is_missing, typed_column
from slipway.data.tables.column_types import marks_of
from slipway.data.tables.ledger import Ledger
from slipway.kinds.registry import kind_of, task_for
from slipway.kinds.targets import CLASS, NUMBER
from slipway.system.errors import DataError

Values = TypeVar("Values")
_MANY_CLASSES = 20
_MAX_DISTINCT_FRACTION = 0.5  # fraction of the rows that have a class; each class needs several
_SHOWN, _SHOWN_CHARACTERS = 3, 40


@dataclass(frozen=True)
class CellTexts:
    """The texts of N rows, indexed like an array, None for no text; rows take no memory."""

    texts: NDArray[np.object_]  # (U,)
    codes: NDArray[np.int64]  # (N,) index into `texts`; -1 is the last

    def __getitem__(self, rows: Any) -> Any:
        return self.texts[self.codes[rows]]


@dataclass(frozen=True)
class Annotations:
    """The annotations of N rows, each (N,), or None if absent; undefined for refused rows."""

    labels: CellTexts | None  # a class, or a set of labels
    targets: NDArray[np.float64] | None
    groups: CellTexts | None
    times: NDArray[np.float64] | None  # days since 1970 UTC, or the numbers of the column
    weights: NDArray[np.float64] | None
    given_splits: CellTexts | NDArray[np.object_] | None


def annotate(raw: RawTable, data: DataParams, clean: CleanParams, ledger: Ledger) -> Annotations:
    """Read the annotation columns, and refuse the rows that lack a required value."""
    kind = kind_of(data.task).target
    columns = [raw.columns[name] for name in data.target_columns]
    target = columns[0]
    for column in columns:
        if column.stored == "other":
            expected = "lists of labels, text or booleans" if kind.several else "text or numbers"
            raise DataError(
                f"data.target_column {column.name!r} has the type {column.arrow_type}, "
                f"expected {expected}."
            )

    def read(reader: Callable[[RawColumn, Ledger], Values], name: str | None) -> Values | None:
        return None if name is None else reader(raw.columns[name], ledger)

    split_file = read_split_file(data)
    labels = None
    if kind.several:
        labels = label_sets(columns, data, clean, ledger)
    elif kind.has_classes:
        labels = _labels(target, data, clean, ledger)
    return Annotations(
        labels=labels,
        targets=None if kind.has_classes else _targets(target, data, ledger),
        groups=read(_groups, data.group_column),
        times=read(_times, data.time_column),
        weights=read(_weights, data.weight_column),
        given_splits=read(_splits, data.split_column)
        if split_file is None
        else split_file.splits_in(raw, ledger.alive),
    )


def label_sets(
    columns: Sequence[RawColumn], data: DataParams, clean: CleanParams, ledger: Ledger
) -> CellTexts:
    """Return the label set of each row as text, from a column of lists or one column per label."""
    if isinstance(data.target_column, str):
        return _listed_labels(columns[0], data, clean, ledger)
    given = scratch_array((len(ledger.alive), len(columns)), np.bool_)
    for place, raw in enumerate(columns):
        typed = typed_column(raw, "boolean")
        expected = "true or false for the label"
        ledger.apply_to_cells(
            "refuse", raw, typed.cell_states == MISSING, "missing_label", expected
        )
        ledger.apply_to_cells("refuse", raw, typed.cell_states == BAD, "type_violation", expected)
        given[:, place] = typed.cells == 1
    names = np.array([raw.name for raw in columns], object)
    codes = scratch_array((len(given),), np.int64)
    known: dict[str, int] = {}
    for part in slices(len(given)):
        sets, rows = np.unique(given[part], axis=0, return_inverse=True)
        own = [known.setdefault(set_text(names[each]), len(known)) for each in sets]
        codes[part] = np.array(own)[rows.reshape(-1)]
    return CellTexts(np.array([*known], object), codes)


def _listed_labels(
    raw: RawColumn, data: DataParams, clean: CleanParams, ledger: Ledger
) -> CellTexts:
    known = frozenset([*(data.classes or []), *data.label_map])
    cells = _texts(raw, known)
    sets: NDArray[np.object_] = np.array([None] * len(cells), object)
    is_bad, is_unknown = np.zeros(len(cells), bool), np.zeros(len(cells), bool)
    corrections: dict[int, tuple[str, ...]] = {}
    for code, text in enumerate(cells):
        if text is None:
            continue
        try:
            labels, changes = meant_labels(read_labels(text, data.label_separator), data.label_map)
        except ValueError:
            is_bad[code] = True
            continue
        is_bad[code] = NOT_UTF8 in text
        sets[code] = set_text(labels)
        is_unknown[code] = data.classes is not None and not set(labels) <= set(data.classes)
        if changes:
            corrections[code] = changes
    ledger.apply_to_cells(
        "refuse", raw, take(_is_none(cells), raw.codes), "missing_label", EXPECTED
    )
    expected = f"a list of labels, or text with {data.label_separator!r} between them"
    ledger.apply_to_cells("refuse", raw, take(is_bad, raw.codes), "type_violation", expected)
    is_corrected = np.zeros(len(cells), bool)
    is_corrected[list(corrections)] = True
    for row in each_true(take(is_corrected, raw.codes)):
        for change in corrections[int(raw.codes[row])]:
            ledger.correct(row, change)
    expected = f"labels of data.classes: {', '.join(data.classes or ())}"
    action = clean.rules.unknown_label
    ledger.apply_to_cells(action, raw, take(is_unknown, raw.codes), "unknown_label", expected)
    return CellTexts(sets, raw.codes)


def _texts(raw: RawColumn, known: frozenset[str]) -> NDArray[np.object_]:
    """Return the distinct cells as text, (U + 1,), with None for missing cells.

    A cell such as "none" is not missing if it is one of the `known` labels.
    """
    texts = [label_of(value) for value in raw.values.to_pylist()]
    pairs = zip(texts, is_missing(raw), strict=True)
    found = [None if missing and text not in known else text for text, missing in pairs]
    return np.array([*found, None], object)


def _is_none(values: NDArray[np.object_]) -> NDArray[np.bool_]:
    return np.array([value is None for value in values], np.bool_)


def label_of(value: str | float | bool) -> str:
    """Return the class that a cell names; whole floats get no decimal point."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _labels(raw: RawColumn, data: DataParams, clean: CleanParams, ledger: Ledger) -> CellTexts:
    found = _texts(raw, frozenset([*(data.classes or []), *data.label_map]))
    _require_classes(raw, found, data)
    is_missing_label = take(_is_none(found), raw.codes)
    ledger.apply_to_cells("refuse", raw, is_missing_label, "missing_label", "a class")
    garbled = np.array([text is not None and NOT_UTF8 in text for text in found], np.bool_)
    expected = "a class in UTF-8 text"
    ledger.apply_to_cells("refuse", raw, take(garbled, raw.codes), "type_violation", expected)
    meant = np.array([data.label_map.get(text, text) for text in found], object)
    for row in each_true(take(np.asarray(found != meant, np.bool_), raw.codes)):
        code = raw.codes[row]
        ledger.correct(row, f"label: {found[code]} -> {meant[code]}")
    if data.classes is not None:
        expected = f"one of data.classes: {', '.join(data.classes)}"
        unknown = np.array([text is not None and text not in data.classes for text in meant])
        action = clean.rules.unknown_label
        ledger.apply_to_cells(action, raw, take(unknown, raw.codes), "unknown_label", expected)
    return CellTexts(meant, raw.codes)


def _require_classes(raw: RawColumn, found: NDArray[np.object_], data: DataParams) -> None:
    """Raise DataError if there are too many distinct classes for so few rows."""
    present = int(take(~_is_none(found), raw.codes).sum())
    distinct = len({text for text in found if text is not None})
    if distinct > max(_MANY_CLASSES, _MAX_DISTINCT_FRACTION * present):
        _refuse_dates(raw)
        raise DataError(
            f"data.target_column {raw.name!r} has {distinct} different values in {present} rows "
            f"({_examples(raw, ~_is_none(found)[:-1])}, ...), expected a few classes. "
            f"For numbers set data.task to {task_for(kind_of(data.task).input, NUMBER)}; "
            "a class needs rows in every split."
        )


def _refuse_dates(raw: RawColumn) -> None:
    """Raise DataError if most of the cells of a target are dates, which no task predicts."""
    good = typed_column(raw, "date").states[:-1] == GOOD
    if 2 * good.sum() > len(good):
        raise DataError(
            f"data.target_column {raw.name!r} holds dates such as {_examples(raw, good)}, expected "
            "classes or numbers. Add a column to the table, such as the month or the days since a "
            "date, and name it as the target."
        )


def _targets(raw: RawColumn, data: DataParams, ledger: Ledger) -> NDArray[np.float64]:
    typed = typed_column(raw, "number")
    bad = typed.states[:-1] == BAD
    if not (typed.states == GOOD).any() and bad.any():
        _refuse_dates(raw)
        of_classes = task_for(kind_of(data.task).input, CLASS)
        found = marks_of([raw], raw.written.marks)
        remedy = f"For numbers such as {found.shown} set {found.settings}"
        if not found.choices or found.choices[0] == raw.written.marks:
            remedy = "Numbers are written like -1234.5"
        raise DataError(
            f"data.target_column {raw.name!r} holds no number, but {_examples(raw, bad)}. "
            f"{remedy}; for classes set data.task to {of_classes}."
        )
    is_infinite = np.zeros(len(typed.states), bool)
    for index in np.flatnonzero(bad):
        is_infinite[index] = _is_infinite(raw.values[int(index)].as_py())
    missing = typed.cell_states == MISSING
    infinite = take(is_infinite, raw.codes)
    other = (typed.cell_states == BAD) & ~infinite
    ledger.apply_to_cells("refuse", raw, missing, "missing_target", "a number")
    ledger.apply_to_cells("refuse", raw, infinite, "non_finite_target", "a finite number")
    ledger.apply_to_cells("refuse", raw, other, "not_a_number", "a number")
    return np.asarray(typed.cells, np.float64)


def _examples(raw: RawColumn, wanted: NDArray[np.bool_]) -> str:
    values = raw.values.filter(wanted)[:_SHOWN].to_pylist()
    return ", ".join(repr(value)[:_SHOWN_CHARACTERS] for value in values)


def _is_infinite(value: str | float | bool) -> bool:
    try:
        return math.isinf(float(value))
    except ValueError:
        return False


def _groups(raw: RawColumn, ledger: Ledger) -> CellTexts:
    groups = _texts(raw, frozenset())
    is_missing_group = take(_is_none(groups), raw.codes)
    expected = "the name of a group"
    ledger.apply_to_cells("refuse", raw, is_missing_group, "missing_group", expected)
    return CellTexts(groups, raw.codes)


def _times(raw: RawColumn, ledger: Ledger) -> NDArray[np.float64]:
    """Return the time of each row, (N,) float64, and refuse rows without a usable time.

    Cells are read as dates if more of them are dates than numbers, or equally many and
    `data.date_format` is set; otherwise as numbers.
    """
    dates, numbers = typed_column(raw, "date"), typed_column(raw, "number")
    num_more = int((dates.cell_states == GOOD).sum()) - int((numbers.cell_states == GOOD).sum())
    has_dates = num_more > 0 or (num_more == 0 and raw.written.date_format is not None)
    typed = dates if has_dates else numbers
    missing, bad = typed.cell_states == MISSING, typed.cell_states == BAD
    expected = "a date as ISO 8601 text or in data.date_format" if has_dates else "a number"
    ledger.apply_to_cells("refuse", raw, missing, "missing_time", "a date or a number")
    ledger.apply_to_cells("refuse", raw, bad, "bad_time", expected)
    return np.asarray(typed.cells, np.float64)


def _weights(raw: RawColumn, ledger: Ledger) -> NDArray[np.float64]:
    typed = typed_column(raw, "number")
    weights = np.asarray(typed.cells, np.float64)
    bad = (typed.cell_states != GOOD) | (weights < 0)
    ledger.apply_to_cells("refuse", raw, bad, "bad_weight", "a number of at least 0")
    return weights


def _splits(raw: RawColumn, ledger: Ledger) -> CellTexts:
    named = np.array([text and text.lower() for text in _texts(raw, frozenset())], object)
    bad = take(~np.isin(named, SPLITS), raw.codes)
    ledger.apply_to_cells("refuse", raw, bad, "bad_split", " or ".join(SPLITS))
    return CellTexts(named, raw.codes)
