"""Finds numeric columns that are the sum, the difference or the product of other columns.

A total beside its parts gives each of them away: `tip` is `total - fare - tolls`. A relation has to
hold in every row that has all its cells, up to the rounding of the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from slipway.data.tables.cells import typed_column
from slipway.data.tables.column_rules import is_line
from slipway.project.column_roles import SampledColumn

_MOST_COLUMNS = 40
_MOST_ROWS, _SEARCH_ROWS = 5_000, 300  # rows in which a relation is verified, and found
_MIN_ROWS = 20
_ROWS_PER_COLUMN = 3  # with fewer rows a sum may fit by chance
_MOST_MISSING = 0.1  # fraction of the rows; other columns are no terms of a sum
_MOST_FACTORS = 3
_RANDOM_ORDERS = 3
_PRODUCT_ROWS = 40  # in which products are tried
_EXACT = 1e-6  # deviation due to rounding in float64, relative to the largest number
_MOST_DECIMALS = 6
_STEPS = 200  # deviations of the rounding in a standard deviation; with fewer, chance may fit
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Relation:
    """A column that is computed from others in every row: a sum with signs, or a product."""

    result: str
    terms: tuple[tuple[str, int], ...]  # names and signs; all signs of a product are 1
    is_product: bool
    constant: float = 0.0  # that is added to a sum

    @property
    def names(self) -> frozenset[str]:
        """The names of all columns of the relation."""
        return frozenset((self.result, *(name for name, _ in self.terms)))

    def __str__(self) -> str:
        if self.is_product:
            return f"{self.result!r} is {' * '.join(repr(name) for name, _ in self.terms)}"
        first, *others = sorted(self.terms, key=lambda term: -term[1])
        text = f"{'-' * (first[1] < 0)}{first[0]!r}"
        text += "".join(f" {'+' if sign > 0 else '-'} {name!r}" for name, sign in others)
        if self.constant:
            text += f" {'+' if self.constant > 0 else '-'} {abs(self.constant):g}"
        return f"{self.result!r} is {text}"


def find_relations(columns: Sequence[SampledColumn]) -> list[Relation]:
    """Return the relations between the numeric columns, each once, with the fewest minus signs."""
    numeric = [column for column in columns if column.is_numeric and len(column.counts) > 1]
    cells: dict[str, Float] = {}
    for column in numeric[:_MOST_COLUMNS]:
        values = np.asarray(typed_column(column.raw, "number").cells, np.float64)
        values = values[:: len(values) // _MOST_ROWS + 1]
        few = values[:_SEARCH_ROWS]
        if not any(is_line(few, other[:_SEARCH_ROWS]) for other in cells.values()):
            cells[column.name] = values
    # One of several columns of 0 and 1 often is what the others leave.
    codes = {column.name for column in numeric if len(column.counts) == 2}
    best: dict[frozenset[str], Relation] = {}
    for relation in (*_sums(cells), *_products(cells)):
        if relation.names <= codes:
            continue
        known = best.setdefault(relation.names, relation)
        if _minuses(relation) < _minuses(known):
            best[relation.names] = relation
    return list(best.values())


def _minuses(relation: Relation) -> int:
    return sum(sign < 0 for _, sign in relation.terms)


def _sums(cells: dict[str, Float]) -> Iterator[Relation]:
    names = [name for name, values in cells.items() if np.isnan(values).mean() <= _MOST_MISSING]
    if len(names) < 3:
        return
    matrix = np.stack([cells[name] for name in names], axis=1)
    matrix = matrix[~np.isnan(matrix).any(axis=1)]
    matrix = matrix[:: len(matrix) // _SEARCH_ROWS + 1]
    if len(matrix) < max(_MIN_ROWS, _ROWS_PER_COLUMN * len(names)):
        return
    matrix = (matrix - matrix.mean(axis=0)) / np.maximum(matrix.std(axis=0), 1e-300)
    if np.linalg.svd(matrix, compute_uv=False)[-1] > _EXACT * len(matrix) ** 0.5:
        return  # no column is a linear function of others, which is usual
    # With several relations, the order in which terms are left out decides which one remains.
    places, draw = np.arange(len(names)), np.random.default_rng(0)
    orders = [places, places[::-1], *(draw.permutation(places) for _ in range(_RANDOM_ORDERS))]
    for place, name in enumerate(names):
        if not _is_function(
            matrix, place, [other for other in range(len(names)) if other != place]
        ):
            continue
        for order in orders:
            terms = _necessary_terms(
                matrix, place, [each for each in order.tolist() if each != place]
            )
            if len(terms) > 1 and (found := _as_sum(cells, name, [names[each] for each in terms])):
                yield found
                break


def _is_function(matrix: Float, result: int, terms: Sequence[int]) -> bool:
    """Return True if the column `result` is an exact linear function of the columns `terms`."""
    weights, *_ = np.linalg.lstsq(matrix[:, terms], matrix[:, result])
    return bool(np.abs(matrix[:, terms] @ weights - matrix[:, result]).max() < _EXACT)


def _necessary_terms(matrix: Float, result: int, terms: list[int]) -> list[int]:
    """Leave out, in their order, the `terms` that are not needed to compute `result`."""
    for place in list(terms):
        fewer = [term for term in terms if term != place]
        if fewer and _is_function(matrix, result, fewer):
            terms = fewer
    return terms


def _as_sum(cells: dict[str, Float], result: str, names: Sequence[str]) -> Relation | None:
    """Return the sum with all weights 1 or -1, if it holds in every complete row."""
    matrix = np.stack([np.ones_like(cells[result]), *(cells[name] for name in names)], axis=1)
    complete = ~np.isnan(matrix).any(axis=1) & ~np.isnan(cells[result])
    weights, *_ = np.linalg.lstsq(matrix[complete], cells[result][complete])
    signs = np.sign(weights[1:])
    if np.abs(weights[1:] - signs).max() > 1e-3:
        return None
    largest = float(np.abs(cells[result][complete]).max())
    constant = 0.0 if abs(weights[0]) < _EXACT * largest else float(f"{weights[0]:.6g}")
    if not _holds(matrix[:, 1:] @ signs + constant, cells[result]):
        return None
    in_order = [name for name in cells if name in names]
    weight = dict(zip(names, signs.astype(int).tolist(), strict=True))
    terms = tuple((name, weight[name]) for name in in_order)
    return Relation(result, terms, is_product=False, constant=constant)


def _products(cells: dict[str, Float]) -> Iterator[Relation]:
    names = list(cells)
    if len(names) < 3:
        return
    starts = np.stack([values[:_PRODUCT_ROWS] for values in cells.values()])
    rounding = np.array([_tolerance(values) for values in cells.values()])[:, np.newaxis]
    for number in range(2, _MOST_FACTORS + 1):
        for factors in combinations(range(len(names)), number):
            gaps = np.abs(starts - starts[list(factors)].prod(axis=0))
            fits = ((gaps <= rounding) | np.isnan(gaps)).all(axis=1)
            for place in set(np.flatnonzero(fits).tolist()) - set(factors):
                computed = np.prod([cells[names[factor]] for factor in factors], axis=0)
                if _holds(computed, cells[names[place]]):
                    terms = tuple((names[factor], 1) for factor in factors)
                    yield Relation(names[place], terms, is_product=True)


def _holds(computed: Float, result: Float) -> bool:
    """Return True if the result is the computed number in every row that has both."""
    gaps = np.abs(computed - result)
    gaps = gaps[~np.isnan(gaps)]
    return len(gaps) >= _MIN_ROWS and bool((gaps <= _tolerance(result)).all())


def _tolerance(result: Float) -> float:
    """Return half of the last decimal place in which all numbers are written."""
    present = result[~np.isnan(result)]
    if not len(present):
        return 0.0
    exact = _EXACT**2 * float(np.abs(present).max())
    for decimals in range(_MOST_DECIMALS + 1):
        half = 0.5 * 10.0**-decimals
        if (
            half * _STEPS <= present.std()
            and np.abs(np.round(present, decimals) - present).max() <= exact
        ):
            return half + exact
    return exact
