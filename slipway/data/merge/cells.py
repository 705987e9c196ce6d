"""Converts cells of base and new rows to one form, in which labels and inputs are comparable."""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from slipway.artifacts.label_sets import labels_in, set_text
from slipway.config.sections import DataParams
from slipway.data.engine.label_sets import (
    FALSE_WORDS,
    TRUE_WORDS,
    is_given,
    meant_labels,
    read_labels,
)
from slipway.data.merge.new_rows import Label
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.sources.samples import spelled
from slipway.data.sources.text_format import POINT
from slipway.data.tables.cells import (
    GOOD,
    MISSING,
    row_digests,
    typed_column,
)
from slipway.data.tables.column_types import column_types
from slipway.data.tables.targets import label_of
from slipway.kinds.registry import kind_of

_ARROW = {"text": pa.string(), "number": pa.float64(), "boolean": pa.bool_()}
_NOTATION = re.compile(r"[^\s\w.+-]")  # a unit or thousands separators, not "1e-5" or "N/A"
_BOOLEANS = {
    **dict.fromkeys((*TRUE_WORDS, "1"), "true"),
    **dict.fromkeys((*FALSE_WORDS, "0"), "false"),
}


def cells_of(column: RawColumn) -> pa.Array:
    """Return the cells of a raw column, (N,); null for a missing cell."""
    cells = column.values.take(pa.array(column.codes, mask=column.codes < 0))
    return cells if column.stored == "other" else cells.cast(_ARROW[column.stored])


def labels_of(cells: Any, data: DataParams) -> list[Label]:
    """Return labels after `data.label_map`, or numbers of a numeric target.

    Missing or unreadable ones are None. If a row may have several labels, they are returned as the
    text of their set.
    """
    if kind_of(data.task).target.several:
        return [_listed(cell, data) for cell in cells.to_pylist()]
    if not kind_of(data.task).target.has_classes:
        return [_number(cell) for cell in cells.to_pylist()]
    texts = [None if cell is None else label_of(cell).strip() for cell in cells.to_pylist()]
    return [spelled(text, data.label_map)[0] if text else None for text in texts]


def _listed(cell: Any, data: DataParams) -> str | None:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    try:
        labels, _ = meant_labels(read_labels(cell, data.label_separator), data.label_map)
    except ValueError:
        return None
    return set_text(labels)


def flagged_labels(columns: Mapping[str, Any]) -> list[Label]:
    """Return the label set of each row as text, given one true/false column for each label.

    A row with a missing or unreadable cell gets None.
    """
    rows = zip(*(cells.to_pylist() for cells in columns.values()), strict=True)
    return [_flagged(dict(zip(columns, row, strict=True))) for row in rows]


def _flagged(row: Mapping[str, Any]) -> str | None:
    try:
        return set_text([name for name, cell in row.items() if is_given(cell)])
    except (TypeError, ValueError):
        return None


def table_labels(table: RawTable, data: DataParams) -> list[Label]:
    """Return the label of each row of a table, read from the target's columns."""
    columns = {name: table.columns[name] for name in data.target_columns}
    if isinstance(data.target_column, list):
        return flagged_labels({name: cells_of(column) for name, column in columns.items()})
    return column_labels(columns[data.target_column], data)


def written_label(label: Label, data: DataParams) -> dict[str, Any]:
    """Return the cells that a label has in the target's columns, by name of the column."""
    if isinstance(data.target_column, str):
        return {data.target_column: label}
    own = None if label is None else labels_in(str(label))
    return {name: None if own is None else name in own for name in data.target_columns}


def column_labels(column: RawColumn, data: DataParams) -> list[Label]:
    """Return the labels of a column, as `labels_of` does; numbers in text may have a unit."""
    if kind_of(data.task).target.has_classes or column.stored != "text":
        return labels_of(cells_of(column), data)
    numbers = typed_column(column, "number").cells.astype(np.float64)
    return [None if math.isnan(number) else number for number in numbers.tolist()]


def _number(cell: Any) -> float | None:
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def concatenate(base: pa.Array, new: pa.Array) -> pa.Array:
    """Join two columns; if their types differ, as text that `clean` reads as the same values."""
    if base.type != new.type:
        base, new = _as_text(base.to_pylist()), _as_text(new.to_pylist())
    return pa.concat_arrays([base, new])


def target_cells(cells: list[Any], base: RawColumn, data: DataParams) -> pa.Array:
    """Return the targets of all rows, (N,), in a type that keeps the meaning of base cells."""
    if isinstance(data.target_column, list) and base.stored != "boolean":
        return _as_text(cells)
    if base.stored == "boolean" and {str(cell) for cell in cells} <= {"True", "False", "None"}:
        flags = [None if cell is None else str(cell) == "True" for cell in cells]
        return pa.array(flags, pa.bool_())
    if kind_of(data.task).target.has_classes:
        return pa.array([None if cell is None else label_of(cell) for cell in cells], pa.string())
    if any(isinstance(cell, str) for cell in cells):
        return _written_numbers(cells, base)
    return pa.array(cells, pa.float64())


def _written_numbers(cells: list[Any], base: RawColumn) -> pa.Array:
    """Return numbers as text with the marks and the unit of a column; other cells stay."""
    unit = typed_column(base, "number").unit if base.stored == "text" else ""
    return _as_text(
        [
            f"{_text(cell)}{unit}".replace(".", base.written.marks.decimal)
            if isinstance(cell, int | float)
            else cell
            for cell in cells
        ]
    )


def _as_text(cells: list[Any]) -> pa.Array:
    return pa.array([_text(cell) for cell in cells], pa.string())


def _text(cell: Any) -> str | None:
    """Return a cell as text, as a CSV file would hold it; a whole number has no decimal point."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).strip() or None


def spelled_as(column: RawColumn, cells: pa.Array, data: DataParams) -> pa.Array:
    """Return `cells` in the notation that a column of the base data uses."""
    if column.stored != "text":
        return cells
    (guess,) = column_types({column.name: column}, data.columns)
    if guess.kind == "number":
        return _written_numbers(cells.to_pylist(), column)
    if guess.kind == "date" and data.date_format is not None:
        is_date = pa.array(typed_column(column, "date").states[:-1] == GOOD)
        dates = column.values.filter(is_date).to_pylist()
        with contextlib.suppress(ValueError):
            for date in dates[:1]:
                datetime.strptime(date, data.date_format)
            found = [
                cell and datetime.fromisoformat(cell.strip()).strftime(data.date_format)
                for cell in cells.to_pylist()
            ]
            return pa.array(found, pa.string())
    return cells


def input_digests(table: RawTable, kinds: Mapping[str, str]) -> list[bytes]:
    """Return a digest of the inputs of each row; `kinds` gives the kind of each input by name."""
    columns = [_comparable(table.columns[name], kind) for name, kind in kinds.items()]
    found, _ = row_digests(columns, np.arange(len(table.numbers)))
    return [digest.tobytes() for digest in found]


def _has_notation(column: RawColumn, texts: list[str]) -> bool:
    """Return True if a column of text has numbers that are not written like -1234.5."""
    return column.written.marks != POINT or any(_NOTATION.search(text) for text in texts)


def _comparable(column: RawColumn, kind: str) -> RawColumn:
    """Return the column with one text for each value, whatever notation its cells have."""
    texts = [_text(cell) or "" for cell in column.values.to_pylist()]
    if kind == "boolean":
        texts = [text.lower() or "none" for text in texts]
        texts = [_BOOLEANS.get(text, text) for text in texts]
    elif kind == "date":
        typed = typed_column(column, "date")
        dates = zip(texts, typed.values[:-1], typed.states[:-1], strict=True)
        texts = [repr(float(days)) if state == GOOD else text for text, days, state in dates]
    elif kind == "number" and column.stored == "text" and _has_notation(column, texts):
        typed = typed_column(column, "number")
        numbers = zip(texts, typed.values[:-1], typed.states[:-1], strict=True)
        texts = [repr(float(value)) if state == GOOD else text for text, value, state in numbers]
    elif kind == "category":  # 0123 and 123 are two categories, as in `clean`
        states = typed_column(column, "category").states[:-1]
        pairs = zip(texts, states, strict=True)
        texts = ["" if state == MISSING else f"={text}" for text, state in pairs]
    else:
        return column
    return replace(column, stored="text", values=pa.array(texts, pa.string()))
