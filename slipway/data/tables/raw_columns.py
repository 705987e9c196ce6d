"""Reads columns of the user's table for given rows, so that `evaluate` can slice its results.

A column may be in the table at `data.path`, as an input or not, or a value that the user's
`precompute.transform` returned for the images. Cells are read as in `clean`, with the kind from
`data.columns` or the inferred kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.config.sections import ColumnParams, DataParams
from slipway.data.engine.rows import content_of, row_ids
from slipway.data.sources.image_tables import missing_column
from slipway.data.sources.raw_tables import RawColumn, stored_column
from slipway.data.sources.sources import find_layout, table_in
from slipway.data.tables.cells import BAD, row_digests, typed_column
from slipway.data.tables.column_types import infer
from slipway.data.tables.source import columns_of, identified_columns, read_table_of
from slipway.inputs.columns import Kind
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError, IntegrityError


@dataclass(frozen=True)
class RawCells:
    """The cells of one column for some rows."""

    name: str
    kind: Kind
    # (N,) float64 (booleans 0 and 1, dates days since 1970 UTC), NaN for no cell; or text, "" for
    # no cell.
    values: NDArray[np.float64] | NDArray[np.object_]
    elsewhere: list[str] = field(default_factory=list)  # categories that only other rows have


def read_raw_columns(
    data: DataParams, names: Sequence[str], ids: Sequence[str], sources: Sequence[str], found: Path
) -> list[RawCells]:
    """Return the columns `names` of the rows with the given `sources` and `ids`.

    `found` is the table of values from a transform, if it exists. Raises DataError, which names
    every column that does not exist, and IntegrityError if the rows have changed since `clean`.
    """
    if not names:
        return []
    present = columns_of(data) if _has_table(data) else []
    transformed = pq.read_table(found, partitioning=None) if found.exists() else pa.table({})
    others = [name for name in transformed.column_names if name != "id"]
    _refuse_unknown(names, data, present, others)
    inside = [name for name in names if name in present]
    raw: dict[str, RawColumn] = {}
    if inside:
        raw, rows = _raw_columns(data, inside, ids, sources)
    every = np.arange(len(ids))
    return [
        _cells(raw[name], data.columns.get(name), rows)
        if name in raw
        else _cells(stored_column(name, transformed[name]), None, every)
        for name in names
    ]


def check_slice_names(data: DataParams, names: Sequence[str]) -> None:
    """Raise DataError, which names every column that neither the data nor a transform provides."""
    _refuse_unknown(names, data, columns_of(data) if _has_table(data) else [], [])


def _has_table(data: DataParams) -> bool:
    root = Path(data.path)
    if data.sources is not None:
        return not find_layout(data).joined
    return not root.is_dir() or table_in(root, data) is not None


def _refuse_unknown(
    names: Sequence[str], data: DataParams, present: Sequence[str], transformed: Sequence[str]
) -> None:
    known = [*present, *transformed]
    problems = [
        f"  {name!r}, {missing_column(name, known)}\n" for name in names if name not in known
    ]
    if problems:
        there = "is a folder of class folders, which has no columns"
        if known:
            there = f"has the columns {', '.join(known)}"
        raise DataError(
            f"evaluate.slices names unknown columns; data.path {data.path!r} {there}:\n"
            f"{''.join(problems)}Correct the names, or remove them."
        )


def _raw_columns(
    data: DataParams, names: Sequence[str], ids: Sequence[str], sources: Sequence[str]
) -> tuple[dict[str, RawColumn], NDArray[np.int64]]:
    ids_from_cells = kind_of(data.task).input.ids_from_cells
    raw = read_table_of(data, None if ids_from_cells else names)
    numbers = np.array([int(source.partition(":")[0]) for source in sources], np.int64)
    rows = np.searchsorted(raw.numbers, numbers)
    num_changed = int((~np.isin(numbers, raw.numbers)).sum())
    # Ids of images and texts are digests of bytes that are not read here.
    if ids_from_cells and not num_changed:
        digests, _ = row_digests(identified_columns(raw), rows)
        found = row_ids(digests).to_pylist()
        num_changed = sum(new != content_of(old) for new, old in zip(found, ids, strict=True))
    if num_changed:
        raise IntegrityError(
            f"{data.path!r} changed since it was cleaned: {num_changed} rows are gone or differ. "
            "Put it back, or run `slipway run`."
        )
    return {name: raw.columns[name] for name in names}, rows


def _cells(raw: RawColumn, given: ColumnParams | None, rows: NDArray[np.int64]) -> RawCells:
    if raw.stored == "other":
        raise DataError(
            f"evaluate.slices names {raw.name!r}, whose cells are {raw.arrow_type}: "
            "expected text, numbers, booleans or dates. Remove it from evaluate.slices."
        )
    kind = infer(raw).kind if given is None or given.kind == "ignore" else given.kind
    if kind == "ignore":  # counters are numbers, ids are categories
        has_text = (typed_column(raw, "number").states == BAD).any()
        kind = "category" if has_text else "number"
    every = typed_column(raw, kind, given.map if given else {}).cells
    elsewhere = set(every.tolist()) - {*every[rows].tolist(), ""} if kind == "category" else set()
    return RawCells(raw.name, kind, every[rows], sorted(elsewhere))
