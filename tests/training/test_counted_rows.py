"""Validation metrics do not depend on the number of processes: every row is counted once."""

import json
import os
from typing import Any

import numpy as np
import pytest
import torch

from slipway.metrics.class_scores import confusion_matrix, count_classes, scores_from_counts
from slipway.metrics.scores import Resampling
from tests import warm_starts
from tests.metric_cases import classification_metrics
from tests.training.conftest import ROOT
from tests.training.counted_rows import CLASSES, NUM_ROWS, SIZES, answers, rows

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Count the rows in real processes, and return the content of the files that they write."""
    folder = tmp_path_factory.mktemp("counted")
    ended = warm_starts.run(
        ["tests.training.counted_rows", str(folder)], ROOT, dict(os.environ), timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def logits() -> torch.Tensor:
    """Return the logits (21, 3) for pixels that are not normalised, which changes no order."""
    return answers(torch.from_numpy(rows().inputs[:]).permute(0, 3, 1, 2).double())


def confusion(cells: dict[str, float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return NUM_ROWS * np.array([cells[str(index)] for index in range(len(CLASSES) ** 2)]).reshape(
        len(CLASSES), -1
    )


@pytest.mark.process
def test_the_confusion_matrix_of_21_rows_is_the_same_on_1_2_and_4_processes(found: Found) -> None:
    split = rows()
    expected = confusion_matrix(split.targets, logits().argmax(dim=1).numpy(), len(CLASSES))
    assert (expected > 0).sum() >= 5
    for size in SIZES:
        assert np.abs(confusion(found[str(size)]["cells"]) - expected).max() < 1e-12


@pytest.mark.process
def test_validation_metrics_of_21_rows_do_not_depend_on_the_number_of_processes(
    found: Found,
) -> None:
    assert found["1"] == found["2"] == found["4"]
    split = rows()
    whole = classification_metrics(
        split.targets, torch.softmax(logits(), dim=1).numpy(), Resampling(0, 100, 0.95)
    )
    matrix = np.rint(confusion(found["4"]["cells"])).astype(np.int64)
    for name, value in scores_from_counts(count_classes(matrix)).items():
        assert whole[name].value == value
    assert found["4"]["validation"]["score"] == whole["accuracy"].value


@pytest.mark.process
def test_counting_padding_rows_would_change_the_metrics(found: Found) -> None:
    assert found["4_with_fillers"]["cells"] != found["4"]["cells"]
    assert found["4_with_fillers"]["validation"] != found["4"]["validation"]
