"""The score over folds is that of all answers, each by a model that did not see the row."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from slipway.artifacts.bundle import Metric
from slipway.metrics.scores import Resampling
from slipway.search import cross_validation
from slipway.search.cross_validation import FOLD, CrossValidation, as_json, conclude, cross_validate
from slipway.search.journal import JobLine, ResultLine
from slipway.search.study import Study, open_study
from slipway.system.errors import ParamsError, SlipwayError
from tests.conftest import ROOT

WRONG = (0, 2, 4)  # answers of each fold of 20 rows


@pytest.fixture(name="study")
def _study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study with a trial for each fold, and its answers."""
    monkeypatch.chdir(tmp_path)
    params = cross_validation._params("table_classification", 3, 7, None)
    study = open_study(None, "folds", "digest", params, 5, threads=2)
    for trial, wrong in enumerate(WRONG):
        fold = (trial + 1) % 3  # a grid has an order of its own
        job = JobLine(event="job", job=trial, trial=trial, values={FOLD: fold}, level=0, epoch=5)
        study.add_job(job)
        targets = np.arange(20) % 2
        predicted = np.where(np.arange(20) < wrong, 1 - targets, targets)
        path = study.answers(trial).with_suffix(".npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        outputs = np.where(np.eye(2)[predicted] > 0, 0.9, 0.1).astype(np.float32)
        np.savez(path, targets=targets, outputs=outputs)
        score = 1 - wrong / 20
        metric = Metric(value=score, low=score, high=score, confidence=0.95, rows=20)
        result = {"event": "result", "job": trial, "trial": trial, "status": "done", "epoch": 5}
        line = {"score": score, "metric": metric, "seconds": 2.0, "cause": ""}
        study.add_result(ResultLine.model_validate(result | line))
    return study


def test_cross_validation_measures_the_predictions_of_all_folds_together(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = cross_validation._measured(
        study, "table_classification", Resampling(7, 200, 0.95), None
    )
    assert metrics["accuracy"].value == pytest.approx(0.9)
    assert metrics["accuracy"].rows == 60
    assert metrics["accuracy"].low < 0.9 < metrics["accuracy"].high
    folds = {
        cross_validation._fold(study, one.trial): one for one in study.schedule.results.values()
    }
    shown = ["accuracy", "log_loss"]
    found = CrossValidation(study, "accuracy", metrics, dict(sorted(folds.items())), shown)
    content = as_json(found)
    assert content["search"] == "folds-1"
    assert [(one["fold"], one["score"]) for one in content["folds"]] == [
        (0, 0.8),
        (1, 1.0),
        (2, 0.9),
    ]
    conclude(found)
    printed = capsys.readouterr().out
    assert "folds-1: accuracy 0.9000" in printed
    assert "60 rows of all 3 folds" in printed
    assert "standard deviation 0.1000" in printed
    assert "log_loss" in printed
    assert "brier" not in printed


def test_error_for_missing_predictions_names_the_fold_and_the_remedy(study: Study) -> None:
    study.answers(1).with_suffix(".npz").unlink()
    with pytest.raises(SlipwayError, match=r"answers of 1 folds are missing .* Remove"):
        cross_validation._measured(study, "table_classification", Resampling(7, 9, 0.95), None)


def test_error_without_folds_gives_the_command_that_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "demo").symlink_to(ROOT / "data" / "demo")
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ParamsError, match=r"slipway set split\.folds=5"):
        cross_validate(None)
