"""Merges new rows into a table, such that no input column distinguishes them from base rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.merge.cells import (
    cells_of,
    concatenate,
    input_digests,
    spelled_as,
    table_labels,
    target_cells,
    written_label,
)
from slipway.data.merge.new_rows import Label, MergeReport, NewRows
from slipway.data.sources.raw_tables import (
    COLLECTED,
    RawColumn,
    RawTable,
    is_row_index,
    read_raw_table,
)
from slipway.data.sources.text_format import USUAL_FORMAT, TextFormat
from slipway.data.tables.cells import TypedColumn, typed_column
from slipway.data.tables.column_rules import constant_columns, duplicate_columns, tells_classes
from slipway.data.tables.column_types import column_types, counts_rows
from slipway.data.tables.source import read_table_of
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import DataError


@dataclass(frozen=True)
class _AddedRows:
    """The new rows that are added, and the labels of the base rows."""

    indices: list[int]  # indices in the new table
    digests: list[bytes]
    labels: list[Label]
    base_labels: list[Label]

    def take(self, cells: pa.Array) -> pa.Array:
        return cells.take(pa.array(self.indices, pa.int64()))


def merge_tables(
    data: DataParams, new_path: Path, out: Path, recent_from: int | None = None
) -> MergeReport:
    """Write the rows of `data.path` and of `new_path` to `out`.

    `recent_from` is described in `merge`. Raises DataError if a column is missing.
    """
    report = MergeReport()
    written = TextFormat.of(data)
    base = read_table_of(data)
    as_collected = USUAL_FORMAT._replace(list_columns=written.list_columns, marks=written.marks)
    new = read_raw_table(new_path, written=as_collected)
    inputs = _input_names(data, base, new, new_path)
    base_labels = table_labels(base, data)
    was_collected = _collected_marks(base)
    labels, added = _match_rows(data, base, new, inputs, base_labels, was_collected, report)
    columns: dict[str, pa.Array] = {}
    for name, column in base.columns.items():
        if name == COLLECTED:
            continue
        cells = cells_of(column)
        if column.stored == "other":
            report.omitted.append(column.unreadable)
        elif name in data.target_columns:
            changes = zip(cells.to_pylist(), base_labels, labels, strict=True)
            targets = [
                cell if label == before else written_label(label, data)[name]
                for cell, before, label in changes
            ]
            more = [written_label(label, data)[name] for label in added.labels]
            columns[name] = target_cells([*targets, *more], column, data)
        else:
            found = _added_cells(name, data, base, new, added)
            if name in new.columns and name not in data.text_columns:
                found = spelled_as(column, found, data)
            columns[name] = concatenate(cells, found)
    columns[COLLECTED] = pa.array([*was_collected, *[True] * len(added.indices)])
    report.omitted += [f"row {number} of {data.path}: {what}" for number, what in base.malformed]
    with files.new_file(out, files.PRIVATE) as file:
        mark = report.recent_mark(recent_from, Path(data.path))
        pq.write_table(pa.table(columns).replace_schema_metadata(mark or None), file)
    return report


def input_kinds(
    data: DataParams, base: RawTable, new: RawTable, inputs: list[str]
) -> dict[str, str]:
    """Return the kind with which the cells of each input are compared, by name of the input."""
    guesses = column_types({name: base.columns[name] for name in inputs}, data.columns)
    kinds: dict[str, str] = {guess.name: guess.kind for guess in guesses}
    kinds |= {name: "boolean" for name in inputs if new.columns[name].stored == "boolean"}
    return kinds | dict.fromkeys(data.text_columns, "category")  # texts are no numbers or dates


def _input_names(data: DataParams, base: RawTable, new: RawTable, new_path: Path) -> list[str]:
    inputs = [name for name in new.columns if name not in data.target_columns]
    missing = [
        name
        for name in (*inputs, *data.target_columns)
        if name not in base.columns or name not in new.columns
    ]
    if missing:
        raise DataError(
            f"{data.path} and {new_path} do not both have the columns {', '.join(missing)}. "
            "Collect the rows with a bundle that was trained on this data."
        )
    return inputs


def _collected_marks(base: RawTable) -> list[bool]:
    if COLLECTED not in base.columns:
        return [False] * len(base.numbers)
    marks = cells_of(base.columns[COLLECTED]).to_pylist()
    return [str(mark).lower() == "true" for mark in marks]


def _match_rows(
    data: DataParams,
    base: RawTable,
    new: RawTable,
    inputs: list[str],
    base_labels: list[Label],
    was_collected: list[bool],
    report: MergeReport,
) -> tuple[list[Label], _AddedRows]:
    kinds = input_kinds(data, base, new, inputs)
    digests = input_digests(new, kinds)
    rows = NewRows(digests, table_labels(new, data), report)
    labels = [
        rows.label_for(digest, label, str(number), was_collected=mark)
        for digest, label, number, mark in zip(
            input_digests(base, kinds),
            base_labels,
            base.numbers.tolist(),
            was_collected,
            strict=True,
        )
    ]
    chosen = rows.to_add()
    report.num_base, report.num_added, report.added = len(labels), len(chosen), chosen
    added_labels = [rows.labels[index] for index in chosen]
    return labels, _AddedRows(chosen, [digests[index] for index in chosen], added_labels, labels)


def _added_cells(
    name: str, data: DataParams, base: RawTable, new: RawTable, added: _AddedRows
) -> pa.Array:
    if name in new.columns:
        return added.take(cells_of(new.columns[name]))
    count, column = len(added.indices), base.columns[name]
    if name == data.group_column:
        return pa.array([f"collected-{digest.hex()[:16]}" for digest in added.digests])
    if name == data.weight_column:
        return pa.array([1.0] * count)
    if name == data.split_column:
        return pa.array(["train"] * count)
    found = None
    if name != data.time_column and not is_row_index(name) and len(base.numbers):
        found = _continued_cells(column, data, base, new, added)
    return pa.nulls(count, column.values.type) if found is None else found


def _continued_cells(
    column: RawColumn, data: DataParams, base: RawTable, new: RawTable, added: _AddedRows
) -> pa.Array | None:
    """Return cells for the added rows in a column that `clean` excludes because of its content.

    Returns None for other columns. An excluded column counts rows, is constant, repeats an input or
    names the classes. If its cells were missing in the added rows, it would distinguish these rows
    and become an input.
    """
    count = len(added.indices)
    if counts_rows(column):
        last = float(typed_column(column, "number").cells[-1])
        return pa.array([last + step for step in range(1, count + 1)], pa.float64())
    typed = _typed_as_cleaned(column, data)
    has_label = np.array([label is not None for label in added.base_labels])
    if typed is None or not has_label.any():
        return None
    if constant_columns([typed], has_label):
        return cells_of(column).take(pa.array([int(np.argmax(has_label))] * count, pa.int64()))
    for name in new.columns:
        other = (
            _typed_as_cleaned(base.columns[name], data) if name not in data.target_columns else None
        )
        if other is not None and duplicate_columns([other, typed], has_label):
            return added.take(cells_of(new.columns[name]))
    if kind_of(data.task).target.has_classes:
        return _cells_by_class(typed, np.flatnonzero(has_label), added)
    return None


def _cells_by_class(typed: TypedColumn, rows: np.ndarray, added: _AddedRows) -> pa.Array | None:
    """Return for each added row the cell that base rows of the same class have in a column.

    Returns None if the cells of the column do not map one to one to the classes.
    """
    labels = [str(added.base_labels[row]) for row in rows]
    names, first, classes = np.unique(labels, return_index=True, return_inverse=True)
    if not tells_classes(typed.keys[rows], classes):
        return None
    row_of = dict(zip(names.tolist(), rows[first].tolist(), strict=True))
    chosen = [row_of.get(str(label)) for label in added.labels]
    return cells_of(typed.raw).take(pa.array(chosen, pa.int64()))


def _typed_as_cleaned(column: RawColumn, data: DataParams) -> TypedColumn | None:
    """Return the column with cells typed as in `clean`; None if `clean` ignores the column."""
    (guess,) = column_types({column.name: column}, data.columns)
    given = data.columns.get(column.name)
    meant = given.map if given else {}
    return None if guess.kind == "ignore" else typed_column(column, guess.kind, meant)
