"""Cleans a table: reads every cell as its column's kind, and finds all cells that break a rule.

Nothing is repaired or dropped silently: kept + quarantined == read. The result depends on the
content of the table, not on the order of its rows and columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.rows import ROWS, hex_strings, row_ids
from slipway.data.engine.scratch import (
    each_true,
    numbers_of,
    order_by,
    scratch_array,
    slices,
    store_table,
    take,
    take_rows,
    true_rows,
)
from slipway.data.rules.outliers import robust_deviations
from slipway.data.rules.report import ColumnSummary
from slipway.data.rules.result import Cleaned
from slipway.data.sources.image_tables import missing_column, skipped_comments, special_columns
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.tables.cells import (
    BAD,
    DIGEST_BYTES,
    GOOD,
    TypedColumn,
    is_missing,
    row_digests,
    shown_cell,
    typed_column,
)
from slipway.data.tables.clean_files import CELL_TYPES, ID_COLUMN, cell_schema
from slipway.data.tables.column_rules import apply_column_rules
from slipway.data.tables.column_types import ColumnGuess, column_type, column_types, columns_yaml
from slipway.data.tables.duplicate_rows import (
    apply_duplicate_rules,
    apply_equal_input_rules,
    number_equal_rows,
    refuse_duplicates,
)
from slipway.data.tables.hints import table_hints, written_notes
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.source import first_table, identified_columns, is_out_of_range
from slipway.data.tables.targets import Annotations, CellTexts, annotate
from slipway.inputs.columns import MAX_CATEGORY_LENGTH, ColumnType, expected_number
from slipway.system.errors import DataError

WRITTEN_ROWS = 1 << 14  # rows written at a time


@dataclass(frozen=True)
class CleanedTable:
    """The cleaned rows, their typed cells in the same order, and the columns of the table."""

    cleaned: Cleaned
    # ID_COLUMN and the inputs: float64 (dates: days since 1970 UTC), bool or string; may be null.
    cells: pa.Table
    types: list[ColumnType]  # types of the input columns
    ignored: list[str]  # every other column but the target
    ledger: Ledger
    columns: list[ColumnSummary]
    columns_yaml: str
    hints: list[str]  # what the user may want to change, with lines of params.yaml


@dataclass(frozen=True)
class _Input:
    type: ColumnType
    typed: TypedColumn
    present: NDArray[np.bool_]  # (N,) good and within the bounds

    @property
    def keys(self) -> NDArray[np.int64]:
        """A key for the cell of each row, (N,): equal for equal cells, and 0 for missing cells."""
        keys = scratch_array((len(self.present),), np.int64)
        for part in slices(len(keys)):
            keys[part] = np.where(self.present[part], self.typed.keys[part], 0)
        return keys


def clean_table(raw: RawTable, data: DataParams, clean: CleanParams) -> CleanedTable:
    """Read, check and compare every row of a table.

    Raises DataError if the columns do not match the params.
    """
    check_columns(raw, data)
    ledger = Ledger(raw.numbers, raw.source)
    annotations = annotate(raw, data, clean, ledger)
    guesses = column_types(
        {name: raw.columns[name] for name in input_names(raw, data)}, data.columns
    )
    inputs = [
        _read_input(raw, guess, data, clean, ledger) for guess in guesses if guess.kind != "ignore"
    ]
    _refuse_all_missing(inputs, clean, ledger)
    find_outliers(inputs, annotations, raw.columns[data.target_columns[0]], clean, ledger)
    # An entry for the sake of its map, as `init` proposes, does not insist on a copy of the target.
    insisted = frozenset(
        name for name, given in data.columns.items() if given.kind != "ignore" and not given.map
    )
    typed = [column.typed for column in inputs]
    verdicts = apply_column_rules(typed, annotations, ledger.alive, clean.rules, insisted)
    ignored = {guess.name: guess.reason for guess in guesses if guess.kind == "ignore"}
    ignored |= verdicts.leaking
    dropped = ignored | verdicts.dropped
    kept = [column for column in inputs if column.type.name not in dropped]
    if not kept:
        raise DataError(_no_inputs(dropped))
    order, rows = _compare(raw, data, clean, kept, annotations, ledger)
    used = {*data.target_columns, *(column.type.name for column in kept)}
    types = [
        column_type(guess, data.columns.get(guess.name))
        for guess in guesses
        if guess.name not in ignored
    ]
    return CleanedTable(
        cleaned=Cleaned(
            rows, ledger.quarantine(raw.malformed), raw.num_read, ledger.flagged_rows()
        ),
        cells=_cells(kept, order, rows),
        types=[column.type for column in kept],
        ignored=[name for name in raw.columns if name not in used],
        ledger=ledger,
        columns=_summaries(
            raw, guesses, inputs, dropped, written_notes(raw.columns, guesses) | verdicts.noted
        ),
        columns_yaml=columns_yaml(types, ignored),
        hints=table_hints(raw, guesses, data),
    )


def input_names(raw: RawTable, data: DataParams) -> list[str]:
    """Return the name of every column that may be an input."""
    special = special_columns(data).values()
    return [name for name in raw.columns if name not in special]


def check_columns(raw: RawTable, data: DataParams) -> None:
    """Raise DataError, which names every column of the params that is missing or contradictory."""
    check_column_names(list(raw.columns), data)
    if not raw.num_read:
        raise DataError(f"{data.path!r} has a header but no rows. Add rows.")


def check_column_names(present: Sequence[str], data: DataParams) -> None:
    """Raise DataError, which names every column of the params that is missing or contradictory.

    `present` are the names of the table's columns.
    """
    keys_of: dict[str, list[str]] = {}
    texts = {f"text_columns[{i}]": name for i, name in enumerate(data.text_columns)}
    for key, name in (special_columns(data) | texts).items():
        keys_of.setdefault(name, []).append(f"data.{key}")
    problems = [
        f"  {key} is {name!r}, {missing_column(name, present)}"
        for name, keys in keys_of.items()
        for key in keys
        if name not in present
    ]
    problems += [
        f"  data.columns names {name!r}, {missing_column(name, present)}"
        for name in data.columns
        if name not in present
    ]
    problems += [
        f"  {' and '.join(keys)} are both {name!r}, expected different columns"
        for name, keys in keys_of.items()
        if len(keys) > 1
    ]
    problems += [
        f"  data.columns names {name!r}, which is not an input but {keys[0]}"
        for name, keys in keys_of.items()
        if name in data.columns
    ]
    if ID_COLUMN in present:
        problems.append(f"  the name {ID_COLUMN!r} is reserved for Slipway; rename that column")
    if problems and len(present) == 1:
        problems.append(
            "  There is one column only: in a CSV the header's names are separated by commas, "
            "semicolons, tabs or `|`, or by the character of a first line `sep=`."
        )
    if problems:
        raise DataError(
            f"{data.path!r} has the columns {', '.join(present) or 'none'}.\n"
            + "\n".join(problems)
            + skipped_comments(first_table(data), data.encoding)
        )


def _no_inputs(reasons: dict[str, str]) -> str:
    lines = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
    return (
        f"no column is left as an input:\n{lines}\n"
        "Add columns, or name the kind of one of these in data.columns."
    )


def _read_input(
    raw: RawTable, guess: ColumnGuess, data: DataParams, clean: CleanParams, ledger: Ledger
) -> _Input:
    rules = clean.rules
    column = column_type(guess, data.columns.get(guess.name), rules.out_of_range is not None)
    typed = typed_column(raw.columns[guess.name], column.kind, column.map)
    column = column.model_copy(update={"unit": typed.unit})
    expected = _expected(column) + (f" with {typed.unit}, as in other rows" if typed.unit else "")
    has_bounds = column.min is not None or column.max is not None
    is_beyond = (
        is_out_of_range(column, typed.values) if has_bounds else np.zeros(len(typed.states), bool)
    )
    bad, beyond = typed.cell_states == BAD, take(is_beyond, typed.raw.codes)
    present = (typed.cell_states == GOOD) & ~beyond
    is_refused = np.zeros(len(present), bool)
    for broken, rule, action in (
        (bad, "type_violation", rules.type_violation),
        (beyond, "out_of_range", rules.out_of_range),
    ):
        ledger.apply_to_cells(action, typed.raw, broken, rule, expected)
        if action == "refuse":
            is_refused |= broken
            continue
        for row in each_true(broken):
            ledger.correct(row, f"{column.name}: {shown_cell(typed.raw, row)} -> missing")
    if column.required:
        missing = ~present & ~is_refused
        ledger.apply_to_cells("refuse", typed.raw, missing, "missing_value", expected)
    return _Input(column, typed, present)


def _expected(column: ColumnType) -> str:
    if column.kind != "number":
        return {
            "category": f"UTF-8 text of at most {MAX_CATEGORY_LENGTH} characters",
            "boolean": "true or false",
            "date": "a date as ISO 8601 text or in data.date_format",
        }[column.kind]
    return expected_number(column)


def _refuse_all_missing(inputs: Sequence[_Input], clean: CleanParams, ledger: Ledger) -> None:
    present = np.zeros(len(ledger.alive), bool)
    for column in inputs:
        present |= column.present
    verdicts = ((row, "no input has a value") for row in each_true(~present & ledger.alive))
    ledger.apply(clean.rules.all_missing, "all_missing", verdicts)


def find_outliers(
    inputs: Sequence[_Input],
    annotations: Annotations,
    target: RawColumn,
    clean: CleanParams,
    ledger: Ledger,
) -> None:
    """Apply the rule `outlier` to the numeric inputs and to a numeric target."""
    if clean.rules.outlier is None:
        return
    # All columns are measured on the same rows, whatever this rule refuses.
    alive = scratch_array((len(ledger.alive),), np.bool_)
    alive[:] = ledger.alive
    numbers = [
        (column.typed.raw, column.typed.cells, column.present & alive)
        for column in inputs
        if column.type.kind == "number"
    ]
    if annotations.targets is not None:
        numbers.append((target, annotations.targets, alive))
    threshold = clean.outlier_mad_threshold
    for raw, cells, present in numbers:
        rows = true_rows(present)
        median, deviations = robust_deviations(np.asarray(take(cells, rows), np.float64))
        is_far = scratch_array((len(present),), np.bool_)
        is_far[:] = False
        is_far[rows] = deviations > threshold
        expected = f"within {threshold:g} robust deviations of the median {median:g}"
        ledger.apply_to_cells(clean.rules.outlier, raw, is_far, "outlier", expected)


def _compare(
    raw: RawTable,
    data: DataParams,
    clean: CleanParams,
    inputs: Sequence[_Input],
    annotations: Annotations,
    ledger: Ledger,
) -> tuple[NDArray[np.int64], pa.Table]:
    """Apply the rules for duplicates; return the remaining row numbers by id, and their ROWS."""
    alive = true_rows(ledger.alive)
    found, num_bytes = row_digests(identified_columns(raw), alive)
    may_be_ids = [raw.columns[name] for name in input_names(raw, data) if not _is_input(name, data)]
    splits = annotations.given_splits
    apply_duplicate_rules(found, alive, may_be_ids, clean.rules, ledger, splits)
    digests = digests_by_row(found, alive, ledger)
    keys = [column.keys for column in inputs]
    clusters = apply_equal_input_rules(keys, annotations, digests, clean.rules, ledger)
    order, numbers = number_equal_rows(rows_by_digest(digests, ledger), digests, annotations)
    return order, kept_rows(raw, order, digests, clusters, num_bytes, annotations, ledger, numbers)


def _is_input(name: str, data: DataParams) -> bool:
    """Return True if the user says that the column is an input, and so holds no ids."""
    return name in data.columns and data.columns[name].kind != "ignore"


def compare_whole_rows(
    raw: RawTable, annotations: Annotations, ledger: Ledger
) -> tuple[NDArray[np.uint8], int]:
    """Refuse the second of two equal rows.

    Returns the digests of the rows, (N, DIGEST_BYTES), and the digested bytes per row.
    """
    alive = true_rows(ledger.alive)
    found, num_bytes = row_digests(identified_columns(raw), alive)
    refuse_duplicates(found, alive, ledger, annotations.given_splits)
    return digests_by_row(found, alive, ledger), num_bytes


def digests_by_row(
    found: NDArray[np.uint8], rows: NDArray[np.int64], ledger: Ledger
) -> NDArray[np.uint8]:
    """Return the digests `found` of some `rows` by row, (N, DIGEST_BYTES)."""
    digests = scratch_array((len(ledger.alive), DIGEST_BYTES), np.uint8)
    for part in slices(len(rows)):
        digests[rows[part]] = found[part]
    return digests


def rows_by_digest(digests: NDArray[np.uint8], ledger: Ledger) -> NDArray[np.int64]:
    """Return the numbers of the rows that no rule refuses, in the order of their digests."""
    left = true_rows(ledger.alive)
    words = take(digests, left).view(">u8")  # (rows, 4), in the order of the hex digits
    return take(left, order_by(*words.T))


def kept_rows(
    raw: RawTable,
    order: NDArray[np.int64],
    digests: NDArray[np.uint8],
    clusters: NDArray[np.int64],
    num_bytes: int,
    annotations: Annotations,
    ledger: Ledger,
    numbers: NDArray[np.int64] | None = None,
) -> pa.Table:
    """Return the rows with the numbers `order`, as a table with the schema ROWS.

    `clusters` (N,) holds the first row of each row's cluster, or -1. `numbers` are those of
    `number_equal_rows`, None if no two rows are equal.
    """
    flags, corrections = _RowTexts(ledger.flags()), _RowTexts(ledger.corrections())

    def batches() -> Iterator[pa.RecordBatch]:
        for part in slices(len(order), WRITTEN_ROWS):
            rows = order[part]
            columns = {
                "id": row_ids(digests[rows], None if numbers is None else numbers[part]),
                "source": raw.sources(ledger.numbers[rows]),
                "label": _taken(annotations.labels, rows),
                "target": _taken(annotations.targets, rows),
                "group": _taken(annotations.groups, rows),
                "time": _taken(annotations.times, rows),
                "weight": _taken(annotations.weights, rows),
                "given_split": _taken(annotations.given_splits, rows),
                "cluster": pc.if_else(
                    pa.array(clusters[rows] >= 0),
                    row_ids(digests[clusters[rows]]),
                    pa.scalar(None, pa.string()),
                ),
                "width": pa.nulls(len(rows), pa.int32()),
                "height": pa.nulls(len(rows), pa.int32()),
                "bytes": np.full(len(rows), num_bytes),
                "sha256": hex_strings(digests[rows]),
                "flags": flags.lists(rows),
                "corrections": corrections.lists(rows),
            }
            yield from pa.table(columns, schema=ROWS).to_batches()

    return store_table(batches(), ROWS)


class _RowTexts:
    """Lists of texts of rows, read from a table of `row` and `text` that is sorted by `row`."""

    def __init__(self, table: pa.Table) -> None:
        self._texts = table.select(["text"])
        self._rows = numbers_of(table["row"], np.int64)

    def lists(self, rows: NDArray[np.int64]) -> pa.ListArray:
        """Return the list of texts of each row in `rows`."""
        begins = np.searchsorted(self._rows, rows)
        lengths = np.searchsorted(self._rows, rows, "right") - begins
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
        places = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
        flat = take_rows(self._texts, places)["text"].combine_chunks()
        return pa.ListArray.from_arrays(offsets, flat)


def _taken(
    values: NDArray[np.float64] | NDArray[np.object_] | CellTexts | None, order: NDArray[np.int64]
) -> NDArray[np.generic] | pa.Array:
    return pa.nulls(len(order)) if values is None else values[order]


def _cells(inputs: Sequence[_Input], order: NDArray[np.int64], rows: pa.Table) -> pa.Table:
    schema = cell_schema([column.type for column in inputs])

    def batches() -> Iterator[pa.RecordBatch]:
        for part in slices(len(order), WRITTEN_ROWS):
            columns: list[pa.Array | pa.ChunkedArray] = [rows["id"][part]]
            for column in inputs:
                values = column.typed.cells[order[part]]
                values = values.astype(bool) if column.type.kind == "boolean" else values
                missing = ~column.present[order[part]]
                columns.append(pa.array(values, CELL_TYPES[column.type.kind], mask=missing))
            yield from pa.table(columns, schema=schema).to_batches()

    return store_table(batches(), schema)


def _summaries(
    raw: RawTable,
    guesses: Sequence[ColumnGuess],
    inputs: Sequence[_Input],
    ignored: dict[str, str],
    noted: dict[str, str],
) -> list[ColumnSummary]:
    missing = {column.type.name: int((~column.present).sum()) for column in inputs}
    return [
        ColumnSummary(
            name=guess.name,
            kind="ignore" if guess.name in ignored else guess.kind,
            missing=missing.get(guess.name, _num_missing(raw.columns[guess.name])),
            note=ignored.get(guess.name, noted.get(guess.name, "")),
        )
        for guess in guesses
    ]


def _num_missing(raw: RawColumn) -> int:
    return int(np.append(is_missing(raw), True)[raw.codes].sum())
