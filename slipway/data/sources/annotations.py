"""Reads the annotations of a row of an image table: label or number, group, time, weight, split."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime
from typing import Any, NamedTuple, TypeVar

from slipway.artifacts.label_sets import set_text
from slipway.config.sections import DataParams
from slipway.data.engine.label_sets import (
    EXPECTED,
    is_given,
    meant_labels,
    read_labels,
)
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.samples import GIVEN_SPLIT, Fault, spelled
from slipway.inputs.columns import days_since_1970, read_date
from slipway.kinds.registry import kind_of

Value = TypeVar("Value")
_NOT_A_NUMBER = (TypeError, ValueError, OverflowError)


class Annotation(NamedTuple):
    """The fields of a RawSample apart from its image; `fault` reports the first unusable column."""

    label: str | None = None
    target: float | None = None
    group: str | None = None
    time: float | None = None
    weight: float | None = None
    given_split: str | None = None
    corrections: tuple[str, ...] = ()
    fault: Fault | None = None


class _UnusableCellError(Exception):
    def __init__(self, rule: str, detail: str) -> None:
        self.fault = Fault(rule, detail)


def annotate(cells: Mapping[str, Any], data: DataParams) -> Annotation:
    """Return the annotations of a row from its cells, which are text (CSV) or typed (Parquet)."""
    faults: list[Fault] = []

    def read(reader: Callable[[str, Any], Value], column: str | None) -> Value | None:
        if column is None:
            return None
        try:
            return reader(column, cells[column])
        except _UnusableCellError as error:
            faults.append(error.fault)
            return None

    kind = kind_of(data.task).target
    corrections: tuple[str, ...] = ()
    label = target = None
    if kind.several:
        try:
            label, corrections = _label_set(cells, data)
        except _UnusableCellError as error:
            faults.append(error.fault)
    elif kind.has_classes:
        label = read(_label, data.target_columns[0])
    else:
        target = read(_target, data.target_columns[0])
    group = read(_group, data.group_column)
    time = read(_time, data.time_column)
    weight = read(_weight, data.weight_column)
    given_split = read(_split, data.split_column)
    if label is not None and not kind.several:
        label, corrections = spelled(label, data.label_map)
    fault = faults[0] if faults else None
    return Annotation(label, target, group, time, weight, given_split, corrections, fault)


def _label(column: str, cell: Any) -> str:
    return _require(cell, "missing_label", "the target column is empty, expected a class")


def _label_set(cells: Mapping[str, Any], data: DataParams) -> tuple[str, tuple[str, ...]]:
    """Return the row's label set as text, and the corrections that were made."""
    if isinstance(data.target_column, str):
        cell = cells[data.target_column]
        if not isinstance(cell, list):
            detail = f"the target column is empty, expected {EXPECTED}"
            cell = _require(cell, "missing_label", detail)
        try:
            labels, corrections = meant_labels(
                read_labels(cell, data.label_separator), data.label_map
            )
        except ValueError as error:
            detail = f"the target column holds {error}, expected {EXPECTED}"
            raise _UnusableCellError("missing_label", detail) from None
        return set_text(labels), corrections
    given = []
    for column in data.target_column:
        detail = f"the column {column!r} is empty, expected true or false for the label"
        text = _require(cells[column], "missing_label", detail)
        try:
            given += [column] if is_given(text) else []
        except ValueError as error:
            detail = f"the column {column!r} holds {error}, expected true or false"
            raise _UnusableCellError("missing_label", detail) from None
    return set_text(given), ()


def _target(column: str, cell: Any) -> float:
    if not isinstance(cell, float):
        _require(cell, "missing_target", "the target column is empty, expected a number")
    try:
        number = float(cell)
    except _NOT_A_NUMBER:
        detail = f"the target is {annotation_text(cell)!r}, expected a number"
        raise _UnusableCellError("not_a_number", detail) from None
    if not math.isfinite(number):
        detail = f"the target is {number}, expected a finite number"
        raise _UnusableCellError("non_finite_target", detail)
    return number


def _group(column: str, cell: Any) -> str:
    detail = f"the column {column!r} is empty, expected the name of a group"
    return _require(cell, "missing_group", detail)


def _time(column: str, cell: Any) -> float:
    detail = f"the column {column!r} is empty, expected a date or a number"
    text = _require(cell, "missing_time", detail)
    time = _moment(cell, text)
    if not math.isfinite(time):
        raise _UnusableCellError(
            "bad_time",
            f"the column {column!r} holds {text!r}, expected an ISO 8601 date or a finite number",
        )
    return time


def _moment(cell: Any, text: str) -> float:
    """Return a date as days since 1970 UTC and a number unchanged; NaN for anything else."""
    if isinstance(cell, datetime):
        return days_since_1970(cell)
    if not isinstance(cell, date):
        with suppress(*_NOT_A_NUMBER):
            return float(cell)
    try:
        return read_date(text)
    except ValueError:
        return math.nan


def _weight(column: str, cell: Any) -> float:
    weight = math.nan
    with suppress(*_NOT_A_NUMBER):
        weight = float(cell)
    if math.isfinite(weight) and weight >= 0:
        return weight
    raise _UnusableCellError(
        "bad_weight",
        f"the column {column!r} holds {annotation_text(cell)!r}, expected a finite number of at "
        "least 0",
    )


def _split(column: str, cell: Any) -> str:
    text = annotation_text(cell)
    if text is not None and text.lower() in SPLITS:
        return text.lower()
    if column == GIVEN_SPLIT:
        detail = "the image lies in no split folder, expected it in one of them"
    else:
        detail = f"the column {column!r} holds {text!r}, expected {', '.join(SPLITS)}"
    raise _UnusableCellError("bad_split", detail)


def _require(cell: Any, rule: str, detail: str) -> str:
    text = annotation_text(cell)
    if text is None:
        raise _UnusableCellError(rule, detail)
    return text


def annotation_text(cell: Any) -> str | None:
    """Return a cell as stripped text; None if it is empty. Whole floats get no decimal point."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bytes):
        cell = cell.decode(errors="replace")
    return str(cell).strip() or None
