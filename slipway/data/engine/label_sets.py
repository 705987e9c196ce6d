"""Reads the label sets of multi-label tasks from cells, counts labels, and makes a label matrix.

Cleaned rows store a set as text in their column `label`; slipway/artifacts/label_sets.py defines
this text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.artifacts.label_sets import labels_in

TRUE_WORDS = ("true", "yes", "t", "y")
FALSE_WORDS = ("false", "no", "f", "n")
_TRUE, _FALSE = {*TRUE_WORDS, "1"}, {*FALSE_WORDS, "0"}
EXPECTED = "labels, or [] for none"


def read_labels(cell: Any, separator: str) -> list[str]:
    """Return the labels in a cell, as they are written.

    A cell is a list, the text of a JSON list, or labels with a separator. Raises ValueError, which
    quotes the label, if a label is empty or is neither text nor a number.
    """
    if isinstance(cell, str):
        cell = _json_list(cell) if cell.lstrip().startswith("[") else cell.split(separator)
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    found = [_label(label) for label in (cell if isinstance(cell, list) else [cell])]
    if "" in found:
        raise ValueError(f"{found} with an empty label")
    return found


def _json_list(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r}, which begins like a JSON list but is not one") from None
    return found if isinstance(found, list) else [found]


def _label(label: Any) -> str:
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"{label!r}, which is not a label")
    return str(label).strip()


def is_given(cell: Any) -> bool:
    """Return a cell as True or False. Raises ValueError for any other content."""
    if isinstance(cell, bool | np.bool_):
        return bool(cell)
    text = str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{cell!r}")


def meant_labels(
    labels: Iterable[str], label_map: Mapping[str, str]
) -> tuple[list[str], tuple[str, ...]]:
    """Apply `label_map` to labels and drop repeated ones.

    Returns the labels, and a text that describes each correction.
    """
    written = list(labels)
    meant = [label_map.get(label, label) for label in written]
    changes = [f"label: {a} -> {b}" for a, b in zip(written, meant, strict=True) if a != b]
    twice = sorted({label for label in meant if meant.count(label) > 1})
    return meant, (*changes, *(f"label: {label} twice -> once" for label in twice))


def labels_of_rows(texts: pa.ChunkedArray) -> tuple[list[list[str]], pa.Array]:
    """Return the labels of each distinct set, and the index of the set of each row, (N,)."""
    encoded = pc.dictionary_encode(texts.combine_chunks())
    return [labels_in(text) for text in encoded.dictionary.to_pylist()], encoded.indices


def label_counts(texts: pa.ChunkedArray) -> dict[str, int]:
    """Return the number of rows with each label, by label."""
    sets, indices = labels_of_rows(texts)
    counts: dict[str, int] = {}
    for labels, rows in zip(sets, np.bincount(indices, minlength=len(sets)), strict=True):
        for label in labels:
            counts[label] = counts.get(label, 0) + int(rows)
    return dict(sorted(counts.items()))


def membership(texts: pa.ChunkedArray, labels: list[str]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an (N, K) uint8 matrix with 1 where row n has the k-th of `labels`, else 0."""
    sets, indices = labels_of_rows(texts)
    table = np.zeros((len(sets), len(labels)), np.uint8)
    places = {label: place for place, label in enumerate(labels)}
    for row, own in enumerate(sets):
        table[row, [places[label] for label in own]] = 1
    return np.asarray(table[indices.to_numpy()], np.uint8)
