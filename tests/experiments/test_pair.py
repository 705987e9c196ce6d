"""`slipway compare A B`: differences on the rows that both answered, or the reason for none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import NEVER
from slipway.experiments.answers import ExperimentAnswers
from slipway.experiments.comparison import Comparison
from slipway.experiments.pair import ExperimentPair, read_pair
from slipway.experiments.pair_page import pair_page
from slipway.reports.pages.charts import Series
from slipway.system.errors import ParamsError
from tests.experiments.records import record, results
from tests.reports.test_pages import EVIL, FOREIGN, faults

CLASSES = ["ape", EVIL]
PARAMS = {"seed": 7, "evaluate.bootstrap_samples": 200, "evaluate.confidence": 0.95}


def metric(value: float) -> Metric:
    return Metric(value=value, low=value - 0.01, high=value + 0.01, confidence=0.95, rows=100)


def class_answers(num_wrong: int, first: int = 0, num_rows: int = 100) -> ExperimentAnswers:
    """Rows from `first` on; the answers to the first `num_wrong` of them are wrong."""
    numbers = np.arange(first, first + num_rows)
    targets = numbers % 2
    predicted = np.where(np.arange(num_rows) < num_wrong, 1 - targets, targets)
    outputs = np.where(np.eye(2)[predicted] > 0, 0.8, 0.2).astype(np.float32)
    accuracy = 1 - num_wrong / num_rows
    return ExperimentAnswers(
        "image_classification",
        CLASSES,
        {"accuracy": metric(accuracy), "brier": metric(0.5)},
        [f"{number:032x}" for number in numbers],
        targets.astype(np.float64),
        outputs,
        {"loss": [Series("train", [1, 2], [3, 2]), Series("val", [1, 2], [3, 2.5])]},
    )


def number_answers(error: float) -> ExperimentAnswers:
    targets = np.arange(50.0)
    outputs = (targets + error * np.where(targets % 2, 1, -1))[:, np.newaxis].astype(np.float32)
    ids = [f"{number:032x}" for number in range(50)]
    return ExperimentAnswers(
        "table_regression", [], {"rmse": metric(error)}, ids, targets, outputs, {}
    )


def pair(first: Any, second: Any, *remarks: str) -> ExperimentPair:
    old = record("old", params=PARAMS | {"train.epochs": 5})
    new = record("new", params=PARAMS | {"train.epochs": 9, "train.loss": "auto"})
    return ExperimentPair(old, new, (first, second), remarks)


def test_the_difference_is_measured_on_the_shared_rows_with_a_paired_interval() -> None:
    found = pair(class_answers(20), class_answers(5))
    paired = found.paired["accuracy"]
    assert (paired.before, paired.after) == (0.8, 0.95)
    assert 0 < paired.low <= paired.difference <= paired.high
    assert paired.p_value is not None
    assert set(found.paired) == {"accuracy", "f1_macro", "log_loss"}
    assert "on the same 100 test rows" in found.note
    assert "left out" not in found.note


def test_classes_of_a_decision_are_compared_as_its_threshold_gives_them() -> None:
    usual = class_answers(0)
    strict = replace(usual, thresholds=[NEVER, 0.9])
    assert strict.predicted.max() == 0, "no probability reaches the threshold"
    paired = pair(usual, strict).paired
    assert (paired["accuracy"].before, paired["accuracy"].after) == (1.0, 0.5)
    assert paired["log_loss"].difference == 0


def test_rows_that_only_one_experiment_tested_are_left_out_and_counted() -> None:
    found = pair(class_answers(20), class_answers(0, first=40))
    assert found.paired["accuracy"].rows == 60
    assert found.paired["accuracy"].before == 1.0, "the wrong rows are not among the shared ones"
    assert "80 test rows that only one has are left out" in found.note


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (class_answers(5, first=100), "share 0 test rows"),
        (number_answers(1.0), "different tasks or classes"),
        (
            replace(class_answers(5), targets=1 - class_answers(5).targets),
            "shared test rows have different labels or targets",
        ),
    ],
)
def test_a_pair_that_cannot_be_paired_says_why(second: ExperimentAnswers, reason: str) -> None:
    found = pair(class_answers(20), second)
    assert found.paired == {}
    assert reason in found.note
    assert reason in pair_page(found)


def test_an_experiment_without_answers_keeps_its_headline_and_the_reason() -> None:
    found = pair(class_answers(20), None, "DVC keeps no answers of new: it is failed")
    assert "No paired intervals: DVC keeps no answers of new" in found.text()
    (line,) = [line for line in found.cells()[1] if line[0] == "accuracy"]
    assert line[1:6] == ["0.8000", "0.7900 to 0.8100", "0.9000", "0.8900 to 0.9100", "+0.1"]
    assert line[6] == ""


def test_changed_params_have_both_values_or_an_empty_one_for_a_missing_key() -> None:
    found = pair(None, None)
    assert found.changed == [["train.epochs", "5", "9"], ["train.loss", "", "'auto'"]]
    same = ExperimentPair(found.first, found.first, (None, None), [])
    assert "same params" in same.text()
    assert "Both have the same params." in pair_page(same)


def test_the_page_of_a_pair_shows_both_side_by_side_and_loads_nothing() -> None:
    page = pair_page(pair(class_answers(20), class_answers(5)))
    assert not FOREIGN.search(page)
    assert faults(page) == []
    assert page.count('<table class="heat">') == 2
    assert page.count('class="group"') == len(CLASSES)
    assert page.count("val loss") >= 1
    assert "Difference: new - old" in page
    numbers = pair_page(pair(number_answers(2.0), number_answers(1.0)))
    assert numbers.count("<circle") == 100
    assert "+" not in numbers.split("rmse</td>")[1].split("</tr>")[0], "the error fell"


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_anything_but_two_different_names_is_refused(names: list[str]) -> None:
    records = [record(name, results=results()) for name in "abc"]
    with pytest.raises(ParamsError, match="expected two different experiments"):
        read_pair(Comparison(records, records), names)
