"""Drift features of table rows: one feature for each column."""

from typing import Literal

import numpy as np

from slipway.drift.features import Feature, Float
from slipway.inputs.columns import ColumnContract


def column_features(contract: ColumnContract) -> list[Feature]:
    """List the columns of `measure_columns`."""
    features = []
    for column in [*contract.numeric, *contract.categorical]:
        categories = []
        if column.kind == "boolean":
            categories = ["false", "true"]
        elif column.kind == "category":
            categories = ["missing or unknown", *column.categories]
        kind: Literal["number", "category"] = "category" if categories else "number"
        features.append(
            Feature(name=f"column {column.name}", kind=kind, origin="input", categories=categories)
        )
    return features


def measure_columns(contract: ColumnContract, encoded: Float) -> Float:
    """Return (rows, columns) float32: standardised numbers, booleans as 0 and 1, category codes.

    Missing cells are NaN.
    """
    num_numeric, num_indicated = len(contract.numeric), len(contract.indicated)
    features = np.array(encoded[:, :num_numeric], np.float32)
    indicator = num_numeric
    for position, column in enumerate(contract.numeric):
        if column.kind == "boolean":
            features[:, position] = np.rint(features[:, position] * column.std + column.mean)
        if column.has_missing:
            features[encoded[:, indicator] > 0, position] = np.nan
            indicator += 1
    return np.concatenate([features, encoded[:, num_numeric + num_indicated :]], axis=1)
