"""Cells of base and new rows in one form: labels, text, and digests of the inputs by value."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from slipway.config.sections import DataParams
from slipway.data.merge.matching import Label
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.sources.samples import spelled
from slipway.data.tables.cells import (
    FALSE_WORDS,
    GOOD,
    MISSING,
    TRUE_WORDS,
    row_digests,
    typed_column,
)
from slipway.data.tables.targets import label_of
from slipway.kinds.registry import is_classification

_ARROW = {"text": pa.string(), "number": pa.float64(), "boolean": pa.bool_()}
_BOOLEANS = {
    **dict.fromkeys((*TRUE_WORDS, "1"), "true"),
    **dict.fromkeys((*FALSE_WORDS, "0"), "false"),
}


def cells_of(column: RawColumn) -> pa.Array:
    """(N,) the cells of a raw column, null if there is none."""
    cells = column.values.take(pa.array(column.codes, mask=column.codes < 0))
    return cells if column.stored == "other" else cells.cast(_ARROW[column.stored])


def labels_of(cells: Any, data: DataParams) -> list[Label]:
    """Return labels after `data.label_map`, or numbers; None for a missing or unreadable one."""
    if not is_classification(data.task):
        return [_number(cell) for cell in cells.to_pylist()]
    texts = [None if cell is None else label_of(cell).strip() for cell in cells.to_pylist()]
    return [spelled(text, data.label_map)[0] if text else None for text in texts]


def _number(cell: Any) -> float | None:
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def concatenate(base: pa.Array, new: pa.Array) -> pa.Array:
    """Join two columns; as text if their types differ, which reads as the same values."""
    if base.type != new.type:
        base, new = _as_text(base.to_pylist()), _as_text(new.to_pylist())
    return pa.concat_arrays([base, new])


def target_cells(cells: list[Any], base: RawColumn, data: DataParams) -> pa.Array:
    """(N,) the targets of all rows, in a type that keeps the meaning of the base data's cells."""
    if base.stored == "boolean" and {str(cell) for cell in cells} <= {"True", "False", "None"}:
        flags = [None if cell is None else str(cell) == "True" for cell in cells]
        return pa.array(flags, pa.bool_())
    if is_classification(data.task):
        return pa.array([None if cell is None else label_of(cell) for cell in cells], pa.string())
    if any(isinstance(cell, str) for cell in cells):
        return _as_text(cells)
    return pa.array(cells, pa.float64())


def _as_text(cells: list[Any]) -> pa.Array:
    return pa.array([_text(cell) for cell in cells], pa.string())


def _text(cell: Any) -> str | None:
    """Return a cell as in a CSV file; a whole number has no decimal point."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).strip() or None


def input_digests(table: RawTable, kinds: Mapping[str, str]) -> list[bytes]:
    """Digest each row by the values of its inputs, a column of a kind each."""
    columns = [_comparable(table.columns[name], kind) for name, kind in kinds.items()]
    found, _ = row_digests(columns, np.arange(len(table.numbers)))
    return [digest.tobytes() for digest in found]


def _comparable(column: RawColumn, kind: str) -> RawColumn:
    """Return the column with equal text for equal values, in whatever form they were written."""
    texts = [_text(cell) or "" for cell in column.values.to_pylist()]
    if kind == "boolean":
        texts = [text.lower() or "none" for text in texts]
        texts = [_BOOLEANS.get(text, text) for text in texts]
    elif kind == "date":
        typed = typed_column(column, "date")
        dates = zip(texts, typed.values[:-1], typed.states[:-1], strict=True)
        texts = [repr(float(days)) if state == GOOD else text for text, days, state in dates]
    elif kind == "category":  # 0123 and 123 are two categories, as in `clean`
        states = typed_column(column, "category").states[:-1]
        pairs = zip(texts, states, strict=True)
        texts = ["" if state == MISSING else f"={text}" for text, state in pairs]
    else:
        return column
    return replace(column, stored="text", values=pa.array(texts, pa.string()))
