"""What a row of a table says besides its inputs: its class or number, group, time, weight and split."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.raw_tables import NOT_UTF8, RawColumn, RawTable
from slipway.data.tables.cells import (
    BAD,
    GOOD,
    MISSING,
    TypedColumn,
    is_missing,
    shown_cell,
    typed_column,
)
from slipway.data.tables.ledger import BadCell, Ledger
from slipway.kinds.registry import is_classification
from slipway.system.errors import DataError

_MANY_CLASSES = 20
_MAX_DISTINCT_SHARE = 0.5  # of the rows that have a class; each class needs several
_SHOWN, _SHOWN_CHARACTERS = 3, 40


@dataclass(frozen=True)
class Annotations:
    """Each (N,), None where the params name no such column. What a refused row has in it is of no meaning."""

    labels: NDArray[np.object_] | None  # text
    targets: NDArray[np.float64] | None
    groups: NDArray[np.object_] | None
    times: NDArray[np.float64] | None  # days since 1970 UTC, or the numbers of the column
    weights: NDArray[np.float64] | None
    given_splits: NDArray[np.object_] | None


def annotate(raw: RawTable, data: DataParams, clean: CleanParams, ledger: Ledger) -> Annotations:
    """Read the columns that are no inputs, and refuse rows that lack a required value."""
    target = raw.columns[data.target_column]
    if target.stored == "other":
        raise DataError(
            f"data.target_column {target.name!r} has the type {target.arrow_type}, expected text or numbers."
        )
    is_class = is_classification(data.task)
    return Annotations(
        labels=_labels(target, data, clean, ledger) if is_class else None,
        targets=None if is_class else _targets(target, ledger),
        groups=_groups(raw.columns[data.group_column], ledger)
        if data.group_column is not None
        else None,
        times=_times(raw.columns[data.time_column], ledger)
        if data.time_column is not None
        else None,
        weights=_weights(raw.columns[data.weight_column], ledger)
        if data.weight_column is not None
        else None,
        given_splits=_splits(raw.columns[data.split_column], ledger)
        if data.split_column is not None
        else None,
    )


def _cells(raw: RawColumn, rows: NDArray[np.bool_], rule: str, expected: str) -> Iterator[BadCell]:
    return (
        BadCell(int(row), raw.name, rule, shown_cell(raw, int(row)), expected)
        for row in np.flatnonzero(rows)
    )


def _texts(raw: RawColumn, known: frozenset[str]) -> NDArray[np.object_]:
    """(U + 1,) text, None if missing; `known` labels are never missing, not even "none"."""
    texts = [label_of(value) for value in raw.values.to_pylist()]
    missing = is_missing(raw)
    return np.array(
        [
            None if gone and text not in known else text
            for text, gone in zip(texts, missing, strict=True)
        ]
        + [None],
        object,
    )


def _is_none(values: NDArray[np.object_]) -> NDArray[np.bool_]:
    return np.array([value is None for value in values], np.bool_)


def label_of(value: str | float | bool) -> str:
    """Return the class that a cell names."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _labels(
    raw: RawColumn, data: DataParams, clean: CleanParams, ledger: Ledger
) -> NDArray[np.object_]:
    found = _texts(raw, frozenset([*(data.classes or []), *data.label_map]))
    _require_classes(raw, found)
    ledger.apply_to_cells(
        "refuse", _cells(raw, _is_none(found)[raw.codes], "missing_label", "a class")
    )
    garbled = np.array([text is not None and NOT_UTF8 in text for text in found], np.bool_)
    ledger.apply_to_cells(
        "refuse", _cells(raw, garbled[raw.codes], "type_violation", "a class in UTF-8 text")
    )
    meant = np.array([data.label_map.get(text, text) for text in found], object)
    for row in np.flatnonzero((found != meant)[raw.codes]):
        code = raw.codes[row]
        ledger.correct(int(row), f"label: {found[code]} -> {meant[code]}")
    if data.classes is not None:
        expected = f"one of data.classes: {', '.join(data.classes)}"
        unknown = np.array([text is not None and text not in data.classes for text in meant])
        ledger.apply_to_cells(
            clean.rules.unknown_label, _cells(raw, unknown[raw.codes], "unknown_label", expected)
        )
    return meant[raw.codes]


def _require_classes(raw: RawColumn, found: NDArray[np.object_]) -> None:
    """DataError if most rows have a class of their own."""
    present = int((~_is_none(found))[raw.codes].sum())
    distinct = len({text for text in found if text is not None})
    if distinct > max(_MANY_CLASSES, _MAX_DISTINCT_SHARE * present):
        raise DataError(
            f"data.target_column {raw.name!r} has {distinct} different values in {present} rows "
            f"({_examples(raw, ~_is_none(found)[:-1])}, ...), expected a few classes. "
            "For numbers set data.task to table_regression; a class needs rows in every split."
        )


def _targets(raw: RawColumn, ledger: Ledger) -> NDArray[np.float64]:
    typed = typed_column(raw, "number")
    if not (typed.states == GOOD).any() and (typed.states == BAD).any():
        raise DataError(
            f"data.target_column {raw.name!r} holds no number, but {_examples(raw, typed.states[:-1] == BAD)}. "
            "Numbers are written like -1234.5; for classes set data.task to table_classification."
        )
    ledger.apply_to_cells(
        "refuse", _cells(raw, typed.cell_states == MISSING, "missing_target", "a number")
    )
    infinite = np.array(
        [_is_infinite(value) for value in raw.values.filter(typed.states[:-1] == BAD).to_pylist()],
        bool,
    )
    beyond = np.zeros(len(typed.states), bool)
    beyond[np.flatnonzero(typed.states == BAD)[infinite]] = True
    ledger.apply_to_cells(
        "refuse", _cells(raw, beyond[raw.codes], "non_finite_target", "a finite number")
    )
    ledger.apply_to_cells(
        "refuse",
        _cells(raw, ((typed.states == BAD) & ~beyond)[raw.codes], "not_a_number", "a number"),
    )
    return typed.cells.astype(np.float64)


def _examples(raw: RawColumn, wanted: NDArray[np.bool_]) -> str:
    return ", ".join(
        repr(value)[:_SHOWN_CHARACTERS] for value in raw.values.filter(wanted)[:_SHOWN].to_pylist()
    )


def _is_infinite(value: str | float | bool) -> bool:
    try:
        return math.isinf(float(value))
    except ValueError:
        return False


def _groups(raw: RawColumn, ledger: Ledger) -> NDArray[np.object_]:
    groups = _texts(raw, frozenset())[raw.codes]
    ledger.apply_to_cells(
        "refuse", _cells(raw, _is_none(groups), "missing_group", "the name of a group")
    )
    return groups


def _times(raw: RawColumn, ledger: Ledger) -> NDArray[np.float64]:
    typed = _time_column(raw)
    ledger.apply_to_cells(
        "refuse", _cells(raw, typed.cell_states == MISSING, "missing_time", "a date or a number")
    )
    expected = "a number" if typed.kind == "number" else "a date as ISO 8601 text"
    ledger.apply_to_cells("refuse", _cells(raw, typed.cell_states == BAD, "bad_time", expected))
    return typed.cells.astype(np.float64)


def _time_column(raw: RawColumn) -> TypedColumn:
    """Read times as dates if more cells are dates than numbers."""
    dates, numbers = typed_column(raw, "date"), typed_column(raw, "number")
    return (
        dates
        if (dates.cell_states == GOOD).sum() > (numbers.cell_states == GOOD).sum()
        else numbers
    )


def _weights(raw: RawColumn, ledger: Ledger) -> NDArray[np.float64]:
    typed = typed_column(raw, "number")
    weights = typed.cells.astype(np.float64)
    bad = (typed.cell_states != GOOD) | (weights < 0)
    ledger.apply_to_cells("refuse", _cells(raw, bad, "bad_weight", "a number of at least 0"))
    return weights


def _splits(raw: RawColumn, ledger: Ledger) -> NDArray[np.object_]:
    named = np.array([text and text.lower() for text in _texts(raw, frozenset())], object)
    splits = named[raw.codes]
    ledger.apply_to_cells(
        "refuse", _cells(raw, ~np.isin(named, SPLITS)[raw.codes], "bad_split", " or ".join(SPLITS))
    )
    return splits
