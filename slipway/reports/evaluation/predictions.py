"""Writes `artifacts/predictions.parquet`: the trained network's prediction for each test row."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from slipway.data.engine.rows import read_table, write_table
from slipway.reports.evaluation.record import Evaluation

_ROW = [
    pa.field("id", pa.string(), nullable=False),
    pa.field("source", pa.string(), nullable=False),  # path inside the data set, or row number
    pa.field("leaked", pa.bool_(), nullable=False),  # a duplicate or its group in another split
]
CLASS_PREDICTIONS = pa.schema(
    [
        *_ROW,
        pa.field("target", pa.string(), nullable=False),  # class names
        pa.field("prediction", pa.string(), nullable=False),
        pa.field("confidence", pa.float32(), nullable=False),  # probability of the prediction
        # in the order of the classes
        pa.field("probabilities", pa.list_(pa.float32()), nullable=False),
    ]
)
VALUE_PREDICTIONS = pa.schema(
    [
        *_ROW,
        pa.field("target", pa.float64(), nullable=False),
        pa.field("prediction", pa.float64(), nullable=False),
    ]
)


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """Write one row for each test row, in the order of the packed split."""
    targets, predictions, classes = evaluation.targets, evaluation.predictions, evaluation.classes
    columns: dict[str, object] = {"target": targets, "prediction": predictions}
    schema = VALUE_PREDICTIONS
    if evaluation.is_classification:
        schema = CLASS_PREDICTIONS
        columns = {
            "target": [classes[int(index)] for index in targets],
            "prediction": [classes[int(index)] for index in predictions],
            "confidence": evaluation.outputs.max(axis=1),
            "probabilities": list(evaluation.outputs),
        }
    leaked = evaluation.leaked
    if leaked is None:
        leaked = np.zeros(len(evaluation.ids), np.bool_)
    row = {"id": evaluation.ids, "source": evaluation.sources, "leaked": leaked}
    write_table(path, pa.table({**row, **columns}, schema=schema), schema)


def read_predictions(path: Path, *, classification: bool) -> pa.Table:
    """Read the predictions; SchemaError if they are missing or have another schema."""
    return read_table(path, CLASS_PREDICTIONS if classification else VALUE_PREDICTIONS)
