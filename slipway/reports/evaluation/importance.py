"""Measures the permutation importance of a table's columns.

A column's values are shuffled among test rows (Breiman 2001, "Random Forests", section 10). The
more the network relies on the column, the worse the metric becomes. Columns that carry the same
information hide each other's importance.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import Task, input_kind, kind_of
from slipway.system.contract import Contract

_MOST_ROWS, _LEAST_ROWS = 1000, 100
_SHUFFLES = 3
_MOST_ANSWERS = 200_000  # network outputs to compute, but at least for 100 rows

Answer = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class ColumnImportance(Contract):
    """The loss of the headline metric when a column is shuffled; near 0 for an unused column."""

    column: str
    loss: float  # mean over the shuffles: points of the accuracy, or growth of the RMSE
    low: float  # smallest and largest loss of a shuffle
    high: float
    rows: int  # test rows that were shuffled
    gain: float | None = None  # boosted trees: the column's fraction of the gain of all splits


def permutation_importance(
    manifest: PackedManifest,
    test: PackedSplit,
    answer: Answer,
    seed: int,
    thresholds: Sequence[float] | None = None,
    gains: Mapping[str, float] | None = None,
) -> list[ColumnImportance]:
    """Measure each column of a table, the most important first; none for images.

    It uses the test rows with the smallest ids. `answer` maps rows (N, width) to probabilities
    (N, K) or values (N, 1). `thresholds` are those of the labels if rows have several. `gains` are
    each column's fractions of the split gain of boosted trees.
    """
    task, contract = manifest.task, manifest.input
    if not isinstance(contract, ColumnContract):
        return []
    places: list[list[int]] = input_kind(contract.kind).load_part("positions")(contract)
    most = max(_LEAST_ROWS, _MOST_ANSWERS // (_SHUFFLES * len(places)))
    rows = np.array(test.inputs[: min(most, _MOST_ROWS)], np.float32)
    targets = test.targets[: len(rows)]
    sign = 1 if kind_of(task).target.headline_is_fraction else -1
    usual = _score(task, targets, answer(rows), thresholds)
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(rows)) for _ in range(_SHUFFLES)]
    found = []
    for column, own in zip(contract.columns, places, strict=True):
        shuffled = np.tile(rows, (_SHUFFLES, 1, 1))
        for turn, order in enumerate(orders):
            shuffled[turn][:, own] = rows[order][:, own]
        answers = answer(shuffled.reshape(-1, rows.shape[1])).reshape(_SHUFFLES, len(rows), -1)
        losses = [
            sign * (usual - _score(task, targets, outputs, thresholds)) for outputs in answers
        ]
        found.append(
            ColumnImportance(
                column=column.name,
                loss=float(np.mean(losses)),
                low=min(losses),
                high=max(losses),
                rows=len(rows),
                gain=gains.get(column.name) if gains else None,
            )
        )
    return sorted(found, key=lambda one: (-one.loss, one.column))


def _score(
    task: Task,
    targets: NDArray[Any],
    outputs: NDArray[Any],
    thresholds: Sequence[float] | None,
) -> float:
    target = kind_of(task).target
    answers = target.load_part("scores")(targets, outputs, None, thresholds)
    every = np.arange(len(targets))[np.newaxis]
    return float(answers.scores(every, [target.headline])[target.headline][0])
