"""A threshold with costs on one of two classes decides in each place that names the class."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from onnx import helper, numpy_helper

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import NEVER, Decision, DecisionCosts
from slipway.inference.files import predict_files
from slipway.inference.local import LoadedModel, load
from slipway.inference.predictions import ClassPrediction
from tests.calibrations import CALIBRATION
from tests.inference.test_files import read_csv
from tests.inference.test_sources import frame, write_csv
from tests.serving import bundles

LABELS = ["letter", "spam"]
THRESHOLD, LOW = 0.9, 0.6  # from LOW to below THRESHOLD a person is asked
RULE = Decision(
    positive="spam",
    place=1,
    costs=DecisionCosts(false_positive=5, false_negative=1, abstain=0.5),
    abstain_between=(LOW, THRESHOLD),
    rows=50,
)


def write_decided(folder: Path, rule: Decision) -> None:
    """Write a certified model of two classes whose threshold is far from a half."""
    weights = np.repeat(bundles.ROW_WEIGHTS[:, :1], 2, axis=1) * np.array([-1, 1], np.float32)
    nodes = [
        helper.make_node("MatMul", ["row", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = bundles._model(
        nodes,
        [numpy_helper.from_array(weights, "weights")],
        "probabilities",
        len(LABELS),
        bundles._encoded_rows(),
    )
    bundle = bundles.write_bundle(
        folder / "bundle",
        graph,
        output=OutputContract(kind="probabilities", labels=LABELS),
        calibration=CALIBRATION.model_copy(
            update={"thresholds": [NEVER, THRESHOLD], "decision": rule}
        ),
    )
    bundles.certify(folder / "certificate.json", bundle)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LoadedModel]:
    write_decided(tmp_path, RULE)
    with load(tmp_path) as loaded:
        yield loaded


def row_below_the_threshold(model: LoadedModel) -> dict[str, object]:
    """A row whose most probable class is not the predicted one."""
    for number in range(500):
        row = bundles.table_row(number)
        found = model.predict(row)
        assert isinstance(found, ClassPrediction)
        if LOW <= found.probabilities["spam"] < THRESHOLD:
            return row
    raise AssertionError("no row is between the bounds")


def test_explanation_is_of_the_class_chosen_by_the_threshold(model: LoadedModel) -> None:
    explained = model.explain(row_below_the_threshold(model))
    assert isinstance(explained.prediction, ClassPrediction)
    assert (explained.of, explained.prediction.label) == ("letter", "letter")
    assert explained.answer == explained.prediction.probabilities["letter"] < 0.5


def test_files_of_every_format_have_expected_cost_and_abstention(
    model: LoadedModel, tmp_path: Path
) -> None:
    source = write_csv(tmp_path / "in.csv", frame(30))
    for ending in ("csv", "parquet", "jsonl"):
        predict_files(model, source, tmp_path / f"out.{ending}")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    answers = [json.loads(line)["prediction"] for line in lines]
    costs = [answer["expected_cost"] for answer in answers]
    asked = [answer["abstain"] for answer in answers]
    assert len(set(costs)) > 1
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["expected_cost"].to_pylist() == costs
    assert table["abstain"].to_pylist() == asked
    rows = read_csv(tmp_path / "out.csv")
    assert [float(row["expected_cost"]) for row in rows] == costs
    assert [json.loads(row["abstain"]) for row in rows] == asked


def test_files_of_a_model_without_costs_have_no_columns_for_them(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    predict_files(table_model, write_csv(tmp_path / "in.csv", frame(3)), tmp_path / "out.parquet")
    assert not {"expected_cost", "abstain"} & set(
        pq.read_table(tmp_path / "out.parquet").column_names
    )
