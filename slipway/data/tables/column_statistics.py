"""Fits the statistics of the column contract to the training rows only.

All rows decide only if a column may have missing values, or categories that training rows lack.
This affects the rows that the service accepts, but not the network.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import PrecomputeParams
from slipway.inputs.columns import Column, ColumnContract, ColumnType
from slipway.system.errors import DataError


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
