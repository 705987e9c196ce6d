"""Helpers for tests of the stage `evaluate`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from slipway.artifacts import locations
from slipway.data.engine.rows import PACKED_ROWS, read_table
from slipway.data.store.packed import write_split
from slipway.kinds.registry import Task
from stages import evaluate
from tests.reports.conftest import (
    NUM_TEST_ROWS,
)

Project = Callable[[Task], None]


OUTPUTS = [
    locations.GATES,
    locations.CALIBRATION,
    locations.OOD_SCORE,
    locations.PREDICTIONS,
    locations.METRICS,
    evaluate.CONFUSION,
    evaluate.SCATTER,
    evaluate.RELIABILITY,
    evaluate.SLICES,
    evaluate.PAGE,
]


def mark_leaked(wrong_rows: bool, num_rows: int = NUM_TEST_ROWS) -> None:
    """Mark test rows as leaked: those with a wrong answer, or the first `num_rows`."""
    leaked = (
        np.arange(NUM_TEST_ROWS) % 5 == 0 if wrong_rows else np.arange(NUM_TEST_ROWS) < num_rows
    )
    folder, path = Path("data/packed/test"), Path("data/packed/manifest.json")
    rows = read_table(folder / "rows.parquet", PACKED_ROWS)
    rows = rows.set_column(
        rows.schema.get_field_index("leaked"), PACKED_ROWS.field("leaked"), pa.array(leaked)
    )
    manifest = json.loads(path.read_text())
    manifest["splits"]["test"] = write_split(
        folder, rows, tuple(manifest["splits"]["test"]["shape"])
    ).model_dump()
    path.write_text(json.dumps(manifest))
