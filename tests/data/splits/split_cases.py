"""Rows for tests of the split, and the places where it puts them."""

from typing import Any

import pyarrow as pa
from hypothesis import settings

from slipway.config.sections import SplitParams
from slipway.data.engine.rows import ROWS
from slipway.data.splits.split import Split, split_rows
from tests.data.pictures import row
from tests.project_params import split_params

STABLE = split_params(assignment="stable")


SEVERAL = settings(deadline=None, max_examples=40)  # a deadline would measure the machine


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=ROWS)


def split(rows: list[dict[str, Any]], params: SplitParams = STABLE, seed: int = 7) -> Split:
    return split_rows(table(rows), params, seed)


def places(
    rows: list[dict[str, Any]], params: SplitParams = STABLE, seed: int = 7
) -> dict[str, str]:
    found = split(rows, params, seed).rows
    return dict(zip(found["id"].to_pylist(), found["split"].to_pylist(), strict=True))


def classes(num_rows: int, names: str = "abc", first: int = 0) -> list[dict[str, Any]]:
    return [row(seed, names[seed % len(names)]) for seed in range(first, first + num_rows)]


def own(**changes: Any) -> list[dict[str, Any]]:
    return [
        {
            **row(seed, "ab"[seed % 2]),
            "given_split": ("train", "train", "val", "test")[seed // 2 % 4],
            **changes,
        }
        for seed in range(80)
    ]
