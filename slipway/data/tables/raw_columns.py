"""Columns of the user's own table for given rows, whatever the model takes of them: what slices are made by.

A column may be in the table that `data.path` is or holds, an input or not, or be one that `precompute.transform` found on the images. Its
cells are read as in `clean`, with the kind that `data.columns` says, or the inferred one.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.config.sections import ColumnParams, DataParams
from slipway.data.sources.raw_tables import RawColumn, column_names, read_raw_table, stored_column
from slipway.data.sources.sources import table_in
from slipway.data.tables.cells import BAD, row_digests, typed_column
from slipway.data.tables.column_types import infer
from slipway.data.tables.source import ID_DIGITS, find_table, identified_columns
from slipway.inputs.columns import Kind
from slipway.kinds.registry import is_table
from slipway.system.errors import DataError, IntegrityError


@dataclass(frozen=True)
class RawCells:
    """One column of N rows: float64 with NaN where there is none (booleans 0 and 1, dates days since 1970 UTC), or text, "" where none."""

    name: str
    kind: Kind
    values: NDArray[np.float64] | NDArray[np.object_]  # (N,)


def read_raw_columns(
    data: DataParams, names: Sequence[str], ids: Sequence[str], sources: Sequence[str], found: Path
) -> list[RawCells]:
    """The columns `names` of the rows `sources`, whose ids are `ids`; `found` is the table of what a transform found on them, if any.

    DataError naming every column that is nowhere, IntegrityError if the rows are not those that were cleaned.
    """
    if not names:
        return []
    table = _table_of(data)
    present = column_names(table) if table else []
    transformed = pq.read_table(found, partitioning=None) if found.exists() else pa.table({})
    _refuse_unknown(
        names, data, present, [name for name in transformed.column_names if name != "id"]
    )
    inside = [name for name in names if name in present]
    raw, rows = (
        _raw_columns(data, table, inside, ids, sources) if table and inside else ({}, np.arange(0))
    )
    outside = {name: stored_column(name, transformed[name]) for name in names if name not in raw}
    taken = [_cells(raw[name], data.columns.get(name), rows) for name in inside]
    taken += [_cells(column, None, np.arange(len(ids))) for column in outside.values()]
    by_name = {cells.name: cells for cells in taken}
    return [by_name[name] for name in names]


def check_slice_names(data: DataParams, names: Sequence[str]) -> None:
    """DataError naming every column that is neither in the data nor possible in a transform."""
    table = _table_of(data)
    _refuse_unknown(names, data, column_names(table) if table else [], [])


def _table_of(data: DataParams) -> Path | None:
    """Return the table of the data set; None for class folders."""
    root = Path(data.path)
    return None if root.is_dir() and table_in(root) is None else find_table(data)


def _refuse_unknown(
    names: Sequence[str], data: DataParams, present: Sequence[str], transformed: Sequence[str]
) -> None:
    known = [*present, *transformed]
    problems = [f"  {name!r}{_hint(name, known)}" for name in names if name not in known]
    if problems:
        there = (
            f"has the columns {', '.join(known)}"
            if known
            else "is a folder of class folders, which has no columns"
        )
        raise DataError(
            f"evaluate.slices names what is not there; data.path {data.path!r} {there}:\n"
            + "\n".join(problems)
            + "\nCorrect the names, "
            "or take them out."
        )


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _raw_columns(
    data: DataParams, table: Path, names: Sequence[str], ids: Sequence[str], sources: Sequence[str]
) -> tuple[dict[str, RawColumn], NDArray[np.int64]]:
    """Return the whole raw columns, and the position of each row in them."""
    raw = read_raw_table(table, None if is_table(data.task) else names)
    numbers = np.array([int(source.partition(":")[0]) for source in sources], np.int64)
    rows = np.searchsorted(raw.numbers, numbers)
    if not np.isin(numbers, raw.numbers).all():
        raise _changed(data, int((~np.isin(numbers, raw.numbers)).sum()))
    if is_table(data.task):  # an image's id is of its bytes, which are not read here
        digests, _ = row_digests(identified_columns(raw), rows)
        others = [
            row_id
            for row_id, digest in zip(ids, digests, strict=True)
            if digest.tobytes().hex()[:ID_DIGITS] != row_id
        ]
        if others:
            raise _changed(data, len(others))
    return {name: raw.columns[name] for name in names}, rows


def _changed(data: DataParams, num_rows: int) -> IntegrityError:
    return IntegrityError(
        f"{data.path!r} changed since it was cleaned: {num_rows} rows are gone or others. Put it back, or run `dvc repro`."
    )


def _cells(raw: RawColumn, said: ColumnParams | None, rows: NDArray[np.int64]) -> RawCells:
    if raw.stored == "other":
        raise DataError(
            f"evaluate.slices names {raw.name!r}, whose cells are {raw.arrow_type}: slices are made of text, numbers, booleans or dates."
        )
    kind = _kind(raw, said)
    return RawCells(raw.name, kind, typed_column(raw, kind).cells[rows])


def _kind(raw: RawColumn, said: ColumnParams | None) -> Kind:
    """Return the kind of any column: counters are numbers, ids are categories."""
    if said is not None and said.kind != "ignore":
        return said.kind
    guess = infer(raw).kind
    if guess != "ignore":
        return guess
    return "category" if (typed_column(raw, "number").states == BAD).any() else "number"
