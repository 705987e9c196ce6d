"""Finds inputs that predict the target almost alone, which suggests that they copy the target.

`clean` finds only exact copies. Here, each column is scored by itself on the training rows. A row's
target is predicted from the other rows with the same value; for numbers and dates also from the
rows with the nearest values. One row of each group or near-duplicate cluster is used. A high score
is a suspicion, not a proof, so such columns stay inputs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.data.splits.units import find_units
from slipway.data.tables.clean_files import CELLS, ID_COLUMN

Float = NDArray[np.float64]
Int = NDArray[np.int64]
# Petal width, which nearly separates the three irises, has 0.96; the size of a diamond tells 0.9 of
# the variance of its price.
SUSPICIOUS = 0.98
_MIN_ROWS = 20
_ROWS_PER_CLASS = 10  # with fewer rows a column may separate the classes by chance
_MOST_ROWS = 100_000  # rows with the smallest ids, which is a random choice
_MOST_REPORTED = 50
_NEIGHBOURS = 2  # neighbours on each side


class ColumnScore(NamedTuple):
    """The score of a column as the only predictor of the target."""

    column: str
    score: float  # at most 1. Classes: balanced accuracy. Numbers: R2
    rows: int  # number of rows that were scored, each predicted from the others

    @property
    def is_suspicious(self) -> bool:
        """True if the column predicts the target nearly without error."""
        return self.score >= SUSPICIOUS

    def in_words(self, *, of_classes: bool) -> str:
        """Return the score as a sentence for the report."""
        kind = "balanced accuracy" if of_classes else "R2"
        score = f"{kind} {self.score:.3f} on {self.rows:,} rows, each held out"
        return f"{self.column!r} alone predicts the target ({score})"


def score_columns(rows: pa.Table, folder: Path) -> list[ColumnScore]:
    """Score each column of the cells in `folder` that has enough rows; return the best first."""
    if not (folder / CELLS).exists():  # this is a set of images
        return []
    training = _one_of_each_unit(rows.filter(pc.equal(rows["split"], "train")).sort_by("id"))
    training = training.slice(0, _MOST_ROWS)
    if training.num_rows < _MIN_ROWS:
        return []
    of_classes = training["label"].null_count == 0
    targets = (
        _codes(training["label"]).astype(float) if of_classes else training["target"].to_numpy()
    )
    scores = (
        (name, best_score(cells, targets, of_classes=of_classes))
        for name, cells in _columns(folder / CELLS, training["id"])
    )
    found = [ColumnScore(name, *best) for name, best in scores if best is not None]
    return sorted(found, key=lambda copy: (-copy.score, copy.column))


def score_report(scores: list[ColumnScore], *, of_classes: bool) -> dict[str, Any]:
    """Return the highest scores and the suspicious columns as part of `reports/split.json`."""
    return {
        "target_copies": [
            {**column._asdict(), "finding": column.in_words(of_classes=of_classes)}
            for column in scores
            if column.is_suspicious
        ],
        "column_scores": [column._asdict() for column in scores[:_MOST_REPORTED]],
    }


def _one_of_each_unit(rows: pa.Table) -> pa.Table:
    _, first = np.unique(find_units(rows, 0).of_row, return_index=True)
    return rows.take(np.sort(first))


def _columns(path: Path, ids: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Yield the cells of each input, ordered by `ids`; only one column is in memory at a time."""
    found = pq.read_table(path, columns=[ID_COLUMN], partitioning=None)[ID_COLUMN].combine_chunks()
    places = pc.index_in(ids.combine_chunks(), found)
    for name in pq.read_schema(path).names:
        if name != ID_COLUMN:
            yield name, pq.read_table(path, columns=[name], partitioning=None)[name].take(places)


def best_score(
    cells: pa.ChunkedArray, targets: Float, *, of_classes: bool
) -> tuple[float, int] | None:
    """Return the best score of a column and its number of rows; None if it has too few rows.

    The column is scored on all rows, and again on the rows with a value.
    """
    score = _class_scores if of_classes else _number_scores
    # A file may be sorted by its target. Then rows of equal values must not stay in its order.
    shuffled = np.random.default_rng(0).permutation(len(cells))
    cells, targets = cells.take(pa.array(shuffled)), targets[shuffled]
    present = np.asarray(pc.is_valid(cells).to_numpy())
    keys, values = _keys(cells)
    found = []
    for chosen in [np.ones(len(present), bool)] + [present] * (not present.all()):
        if chosen.sum() >= _MIN_ROWS:
            of_chosen = None if values is None else values[chosen]
            scores = score(keys[chosen], of_chosen, targets[chosen])
            found += [(value, int(chosen.sum())) for value in scores]
    return max(found, default=None)


def _keys(cells: pa.ChunkedArray) -> tuple[Int, Float | None]:
    """Return a code for each value, (N,), and the values of numbers, (N,), or None.

    Missing numbers get a value far below all others.
    """
    keys = _codes(cells)
    if not pa.types.is_floating(cells.type):
        return keys, None
    values = pc.fill_null(cells, np.nan).to_numpy()
    least, most = np.nanmin(values, initial=0.0), np.nanmax(values, initial=0.0)
    with np.errstate(over="ignore"):
        far_away = least - (most - least) - 1
        return keys, np.where(np.isnan(values), far_away, values)


def _codes(cells: pa.ChunkedArray) -> Int:
    """Return a code for the value of each row, (N,); a missing cell counts as a value."""
    encoded = pc.dictionary_encode(cells.combine_chunks(), null_encoding="encode")
    return np.asarray(encoded.indices.to_numpy(), np.int64)


# Classes ------------------------------------------------------------------------------------------


def _class_scores(keys: Int, values: Float | None, targets: Float) -> list[float]:
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    if len(counts) < 2 or len(classes) < len(counts) * _ROWS_PER_CLASS:
        return []
    scores = [_accuracy_by_value(keys, classes, counts)]
    if values is not None:
        scores.append(_accuracy_by_neighbours(values, classes, counts))
    return scores


def _accuracy_by_value(keys: Int, classes: Int, counts: Int) -> float:
    """Return the balanced accuracy of predicting the most frequent class of each value.

    The class of a row is predicted from the other rows with the same value.
    """
    pairs, num_rows = np.unique(keys * len(counts) + classes, return_counts=True)
    key, label = np.divmod(pairs, len(counts))
    order = np.lexsort((-num_rows / counts[label], key))
    key, label, num_rows = key[order], label[order], num_rows[order]
    is_first = np.append(True, key[1:] != key[:-1])
    # The frequency of the second class of the same value.
    second = np.append(np.where(is_first[1:], 0.0, (num_rows / counts[label])[1:]), 0.0)
    # Only the first class of a value can be right, if it stays first without the predicted row.
    is_right = is_first & (num_rows > 1) & ((num_rows - 1) / counts[label] > second)
    right = np.bincount(label[is_right], num_rows[is_right], len(counts))
    return float((right / counts).mean())


def _accuracy_by_neighbours(values: Float, classes: Int, counts: Int) -> float:
    """Return the balanced accuracy of predicting the most frequent class of the nearest values."""
    order = np.argsort(values, kind="stable")
    places = _neighbour_places(len(order))
    with np.errstate(over="ignore", invalid="ignore"):
        far = np.abs(values[order][places] - values[order][:, np.newaxis])
    by_distance = np.argsort(far, axis=1, kind="stable")
    nearest = np.take_along_axis(classes[order][places], by_distance, axis=1)
    votes = (nearest[:, :, np.newaxis] == nearest[:, np.newaxis, :]).sum(axis=2)
    voted = np.take_along_axis(nearest, votes.argmax(axis=1)[:, np.newaxis], axis=1)[:, 0]
    right = np.bincount(classes[order][voted == classes[order]], minlength=len(counts))
    return float((right / counts).mean())


def _neighbour_places(num_rows: int) -> Int:
    """Return the positions of the neighbours before and after each row, (N, 2 * _NEIGHBOURS).

    At both ends, positions beyond the rows are replaced by others further inward.
    """
    steps = np.array([step for near in range(1, _NEIGHBOURS + 1) for step in (-near, near)])
    places = np.arange(num_rows)[:, np.newaxis] + steps
    width = 2 * _NEIGHBOURS + 1
    places = np.where(places < 0, places + width, places)
    return np.asarray(np.where(places >= num_rows, places - width, places))


# Numbers ------------------------------------------------------------------------------------------


def _number_scores(keys: Int, values: Float | None, targets: Float) -> list[float]:
    """Score a numeric target by R2: 1 - squared errors / squared errors of the mean."""
    largest = np.abs(targets).max()
    scaled = targets / largest if largest else targets
    usual = np.square(scaled - scaled.mean()).sum()
    if usual == 0:
        return []
    predicted = [_mean_by_value(keys, scaled)]
    if values is not None:
        predicted += _between_neighbours(values, scaled)
    return [float(1 - np.square(scaled - found).sum() / usual) for found in predicted]


def _mean_by_value(keys: Int, targets: Float) -> Float:
    """Return for each row the mean target of the other rows with the same key, (N,).

    A row with a unique key gets the mean of all rows.
    """
    counts, sums = np.bincount(keys)[keys], np.bincount(keys, targets)[keys]
    means = (sums - targets) / np.maximum(counts - 1, 1)
    return np.where(counts > 1, means, targets.mean())


def _between_neighbours(values: Float, targets: Float) -> list[Float]:
    """Return predictions for each row from the two rows with the nearest values, each (N,).

    They are the mean of the two targets, and the place on the line between them; at the first and
    the last value the line is prolonged in one of them, and its nearer end taken in another.
    """
    order = np.argsort(values, kind="stable")
    before, after = np.roll(order, 1), np.roll(order, -1)
    before[0], after[0], before[-1], after[-1] = order[[1, 2, -3, -2]]
    mean = (targets[before] + targets[after]) / 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        place = (values[order] - values[before]) / (values[after] - values[before])
        predicted = [
            targets[before] + where * (targets[after] - targets[before])
            for where in (place, np.clip(place, 0, 1))
        ]
    found = np.empty((3, len(order)))
    found[:, order] = [mean, *(np.where(np.isfinite(line), line, mean) for line in predicted)]
    return list(found)
