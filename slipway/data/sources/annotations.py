"""What a row of a table says of its image: class or number, group, time, weight and split, each checked as it is read."""

import math
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, NamedTuple

from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.samples import GIVEN_SPLIT, Fault, spelled
from slipway.inputs.columns import days_since_1970, read_date
from slipway.kinds.registry import is_classification


class Annotation(NamedTuple):
    """The fields of a RawSample besides its image; `fault` is the first unusable column."""

    label: str | None = None
    target: float | None = None
    group: str | None = None
    time: float | None = None
    weight: float | None = None
    given_split: str | None = None
    corrections: tuple[str, ...] = ()
    fault: Fault | None = None


def annotate(cells: Mapping[str, Any], data: DataParams) -> Annotation:
    """Read the annotation columns of one row, as text (CSV) or typed (Parquet)."""
    label, target, corrections, fault = _target(cells[data.target_column], data)
    group, no_group = _group(cells, data)
    time, bad_time = _time(cells, data)
    weight, bad_weight = _weight(cells, data)
    given_split, bad_split = _split(cells, data)
    fault = fault or no_group or bad_time or bad_weight or bad_split
    return Annotation(label, target, group, time, weight, given_split, corrections, fault)


def _target(
    cell: Any, data: DataParams
) -> tuple[str | None, float | None, tuple[str, ...], Fault | None]:
    text = _text(cell)
    if is_classification(data.task):
        if text is None:
            return (
                None,
                None,
                (),
                Fault("missing_label", "the target column is empty, expected a class"),
            )
        return *_meant(text, data), None
    if text is None and not isinstance(cell, float):
        return (
            None,
            None,
            (),
            Fault("missing_target", "the target column is empty, expected a number"),
        )
    number, fault = _number(cell)
    if fault is not None:
        return None, None, (), Fault("not_a_number", f"the target is {text!r}, expected a number")
    if not math.isfinite(number):
        return (
            None,
            None,
            (),
            Fault("non_finite_target", f"the target is {number}, expected a finite number"),
        )
    return None, number, (), None


def _meant(text: str, data: DataParams) -> tuple[str, None, tuple[str, ...]]:
    label, corrections = spelled(text, data.label_map)
    return label, None, corrections


def _group(cells: Mapping[str, Any], data: DataParams) -> tuple[str | None, Fault | None]:
    if data.group_column is None:
        return None, None
    group = _text(cells[data.group_column])
    missing = Fault(
        "missing_group", f"the column {data.group_column!r} is empty, expected the name of a group"
    )
    return group, None if group is not None else missing


def _time(cells: Mapping[str, Any], data: DataParams) -> tuple[float | None, Fault | None]:
    if data.time_column is None:
        return None, None
    cell = cells[data.time_column]
    text = _text(cell)
    if text is None:
        return None, Fault(
            "missing_time", f"the column {data.time_column!r} is empty, expected a date or a number"
        )
    time = _moment(cell, text)
    if time is None or not math.isfinite(time):
        return None, Fault(
            "bad_time",
            f"the column {data.time_column!r} holds {text!r}, expected an ISO 8601 date or a finite number",
        )
    return time, None


def _moment(cell: Any, text: str) -> float | None:
    """Return days since 1970 UTC for a date, a number as it is, None for anything else."""
    if isinstance(cell, datetime):
        return days_since_1970(cell)
    number, fault = _number(cell) if not isinstance(cell, date) else (math.nan, Fault("", ""))
    if fault is None:
        return number
    try:
        return read_date(text)
    except ValueError:
        return None


def _weight(cells: Mapping[str, Any], data: DataParams) -> tuple[float | None, Fault | None]:
    if data.weight_column is None:
        return None, None
    weight, fault = _number(cells[data.weight_column])
    if fault is None and math.isfinite(weight) and weight >= 0:
        return weight, None
    found = _text(cells[data.weight_column])
    return None, Fault(
        "bad_weight",
        f"the column {data.weight_column!r} holds {found!r}, expected a finite number of at least 0",
    )


def _split(cells: Mapping[str, Any], data: DataParams) -> tuple[str | None, Fault | None]:
    if data.split_column is None:
        return None, None
    text = _text(cells[data.split_column])
    if text is not None and text.lower() in SPLITS:
        return text.lower(), None
    if data.split_column == GIVEN_SPLIT:
        return None, Fault(
            "bad_split", "the image lies in no split folder, expected it in one of them"
        )
    return None, Fault(
        "bad_split",
        f"the column {data.split_column!r} holds {text!r}, expected {', '.join(SPLITS)}",
    )


def _number(cell: Any) -> tuple[float, Fault | None]:
    try:
        return float(cell), None
    except (TypeError, ValueError, OverflowError):
        return math.nan, Fault("not_a_number", f"{cell!r} is no number")


def _text(cell: Any) -> str | None:
    """Return a cell as stripped text, None if empty; whole floats have no decimal point."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bytes):
        cell = cell.decode(errors="replace")
    return str(cell).strip() or None
