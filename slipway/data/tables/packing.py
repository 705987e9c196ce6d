"""Packs a table: the typed cells of the rows become one float32 matrix per split.

The statistics of the columns are fitted to the training rows only. All rows decide only if a column
may have missing values, or categories that training rows lack. This affects the rows that the
service accepts, but not the network. It encodes requests with the same function.
`slipway.data.store.packed` reads the store.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.params import Params
from slipway.config.sections import PrecomputeParams
from slipway.data.store.packed import PackPaths
from slipway.data.store.targets import write_store
from slipway.data.tables.clean_files import TableColumns, in_order_of, read_cells
from slipway.inputs.columns import Column, ColumnContract, ColumnType, encode
from slipway.kinds.registry import Task
from slipway.system import files
from slipway.system.errors import CellError, DataError


def pack_rows(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Encode the rows into the packed store; return a summary to print."""
    cells, columns = read_cells(paths.clean)
    with files.new_directory(paths.packed) as folder:
        contract = pack_table(rows, cells, columns, params.precompute, params.data.task, folder)
    notes = [
        f"packed {rows.num_rows} rows of {len(contract.columns)} columns, {contract.shape[0]} "
        f"numbers each, into {paths.packed}"
    ]
    notes += rare_categories(cells, contract, params.precompute.max_categories)
    return "\n".join(notes)


def pack_table(
    rows: pa.Table,
    cells: pa.Table,
    columns: TableColumns,
    params: PrecomputeParams,
    task: Task,
    root: Path,
) -> ColumnContract:
    """Write the packed store of `rows` (schema SPLIT_ROWS) to the folder `root`.

    `cells` holds the typed cells by row id. Raises IntegrityError if they do not belong to these
    rows, and DataError if a column cannot be encoded.
    """
    rows = rows.sort_by("id")
    cells = in_order_of(rows, cells, "cells")
    is_training = pc.equal(rows["split"], "train").to_numpy()
    fitted = fit_columns(cells, is_training, columns.inputs, params)
    others = columns.model_dump(exclude={"inputs"})
    contract = fitted.model_copy(update=others)

    def write_inputs(path: Path, chosen: pa.ChunkedArray) -> None:
        np.save(path, encode_cells(cells.filter(chosen), contract), allow_pickle=False)

    write_store(root, rows, task, contract, write_inputs)
    return contract


def encode_cells(cells: pa.Table, contract: ColumnContract) -> NDArray[np.float32]:
    """Encode typed cells as (N, width) float32. Raises DataError if a number is too large."""
    columns = {column.name: _as_sequence(cells[column.name]) for column in contract.columns}
    try:
        return encode(columns, contract)
    except CellError as error:
        largest = pc.max(pc.abs(cells[error.column].cast(pa.float64()))).as_py()
        raise DataError(
            f"{error}: up to {largest:g}. "
            "Give the column a min and max in data.columns, or ignore it."
        ) from error


def rare_categories(cells: pa.Table, contract: ColumnContract, max_categories: int) -> list[str]:
    """Return a note for each column whose rare categories exceed the limit `max_categories`."""
    notes = []
    for column in contract.categorical:
        if len(column.categories) < max_categories:
            continue
        present = cells[column.name].drop_null()
        others = present.filter(pc.invert(pc.is_in(present, pa.array(column.categories))))
        if len(others):
            num_others = pc.count_distinct(others).as_py()
            num_categories = pc.count_distinct(present).as_py()
            notes.append(
                f"{column.name}: {num_others:,} of its {num_categories:,} categories, "
                f"in {len(others):,} rows, count as missing: "
                f"precompute.max_categories is {max_categories}"
            )
    return notes


def _as_sequence(column: pa.ChunkedArray) -> list[str | None] | NDArray[np.float64]:
    if pa.types.is_string(column.type):
        texts: list[str | None] = column.to_pylist()
        return texts
    return np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy())


def fit_columns(
    cells: pa.Table,
    is_training: NDArray[np.bool_],
    types: Sequence[ColumnType],
    params: PrecomputeParams,
) -> ColumnContract:
    """Compute the means, scales and categories of the columns in `types` from training rows.

    They make up the input contract of the model. `cells` are those of a `CleanedTable`. Raises
    DataError, which names every column whose numbers cannot be standardised.
    """
    columns, problems = [], []
    for column in types:
        fit = _fit_category if column.kind == "category" else _fit_number
        training = cells[column.name].filter(pa.array(is_training))
        others = cells[column.name].filter(pa.array(~is_training))
        try:
            columns.append(fit(column, training, others, params))
        except DataError as error:
            problems.append(f"  {error}")
    if problems:
        raise DataError(
            "some columns cannot be fitted:\n"
            + "\n".join(problems)
            + "\nBound or ignore them in data.columns, or add data."
        )
    return ColumnContract(kind="columns", columns=columns)


def _fit_category(
    column: ColumnType, training: pa.ChunkedArray, others: pa.ChunkedArray, params: PrecomputeParams
) -> Column:
    counts = Counter(training.drop_null().to_pylist())
    if not counts:
        raise DataError(_empty(column))
    by_frequency = sorted(counts, key=lambda category: (-counts[category], category))
    categories = by_frequency[: params.max_categories]
    has_missing = training.null_count > 0 or len(by_frequency) > len(categories)
    other_categories = set(pc.unique(others.drop_null()).to_pylist())
    new = others.null_count > 0 or not other_categories <= set(categories)
    return _column(
        column, has_missing=has_missing, imputed=new and not has_missing, categories=categories
    )


def _fit_number(
    column: ColumnType, training: pa.ChunkedArray, others: pa.ChunkedArray, params: PrecomputeParams
) -> Column:
    values = training.drop_null().cast(pa.float64()).to_numpy()
    if not len(values):
        raise DataError(_empty(column))
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(values.mean()), float(values.std())
    if not np.isfinite([mean, std]).all():
        raise DataError(
            f"{column.name!r} has numbers up to {np.abs(values).max():g}, "
            "whose mean or deviation exceeds float64"
        )
    has_missing = training.null_count > 0
    grid = np.linspace(0, 1, params.num_quantiles)
    return _column(
        column,
        has_missing=has_missing,
        imputed=others.null_count > 0 and not has_missing,
        mean=mean,
        std=std or 1.0,  # the column may be constant on the training rows
        fill=float(np.median(values)),
        quantiles=[] if column.kind == "boolean" else np.unique(np.quantile(values, grid)).tolist(),
    )


def _column(
    column: ColumnType,
    *,
    has_missing: bool,
    imputed: bool,
    categories: Sequence[str] = (),
    mean: float = 0.0,
    std: float = 1.0,
    fill: float = 0.0,
    quantiles: Sequence[float] = (),
) -> Column:
    return Column(
        **column.model_dump(),
        has_missing=has_missing,
        imputed=imputed,
        categories=list(categories),
        mean=mean,
        std=std,
        fill=fill,
        quantiles=list(quantiles),
    )


def _empty(column: ColumnType) -> str:
    return f"{column.name!r} has no value in any training row"
