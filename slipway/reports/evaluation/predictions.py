"""`artifacts/predictions.parquet`: what the trained network answers for each test row, one row each."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.rows import read_table, write_table
from slipway.reports.evaluation.record import Evaluation

_ROW = [
    pa.field("id", pa.string(), nullable=False),
    pa.field("source", pa.string(), nullable=False),  # path inside the data set, or row number
    pa.field("leaked", pa.bool_(), nullable=False),  # has a twin, or its group, in another split
]
CLASS_PREDICTIONS = pa.schema(
    [
        *_ROW,
        pa.field("target", pa.string(), nullable=False),  # class names
        pa.field("prediction", pa.string(), nullable=False),
        pa.field("confidence", pa.float32(), nullable=False),  # probability of the prediction
        pa.field(
            "probabilities", pa.list_(pa.float32()), nullable=False
        ),  # in the order of the classes
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
    schema = CLASS_PREDICTIONS if evaluation.is_classification else VALUE_PREDICTIONS
    columns = (
        _class_columns(evaluation)
        if evaluation.is_classification
        else {"target": evaluation.targets, "prediction": evaluation.predictions}
    )
    leaked = (
        np.zeros(len(evaluation.ids), np.bool_) if evaluation.leaked is None else evaluation.leaked
    )
    row = {"id": evaluation.ids, "source": evaluation.sources, "leaked": leaked}
    write_table(path, pa.table({**row, **columns}, schema=schema), schema)


def read_predictions(path: Path, *, classification: bool) -> pa.Table:
    """Read them back; SchemaError if they are missing or of another schema."""
    return read_table(path, CLASS_PREDICTIONS if classification else VALUE_PREDICTIONS)


def _class_columns(evaluation: Evaluation) -> dict[str, object]:
    return {
        "target": _names(evaluation.targets, evaluation.classes),
        "prediction": _names(evaluation.predictions, evaluation.classes),
        "confidence": evaluation.outputs.max(axis=1),
        "probabilities": list(evaluation.outputs),
    }


def _names(indices: NDArray[np.float64], classes: list[str]) -> list[str]:
    return [classes[int(index)] for index in indices]
