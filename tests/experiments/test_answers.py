"""Answers of experiments are read from DVC's cache, whatever the workspace has now."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipway.artifacts.uncertainty import NEVER
from slipway.cli.experiments import compare
from slipway.experiments import repository
from slipway.experiments.answers import read_answers
from slipway.system.errors import ParamsError, UnavailableError
from tests.calibrations import CALIBRATION
from tests.experiments.records import record
from tests.experiments.tiny_project import make_project

_PIPELINE = """\
stages:
  evaluate:
    cmd: python evaluate.py
    params: [seed]
    outs: [artifacts/predictions.parquet, artifacts/calibration.json, reports/live]
    metrics:
      - metrics/evaluate.json: {cache: false}
"""
# Answers with as many errors as the seed.
_EVALUATE = """\
import json
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from slipway.reports.evaluation.tables import predictions_schema
wrong = YAML(typ="safe").load(Path("params.yaml"))["seed"]
predicted = ["cat"] * wrong + ["dog"] * (20 - wrong)
chances = [[0.9, 0.1] if name == "cat" else [0.2, 0.8] for name in predicted]
columns = {
    "id": [f"{row:032x}" for row in range(20)], "source": ["a"] * 20, "leaked": [False] * 20,
    "target": ["dog"] * 20, "prediction": predicted, "confidence": [0.8] * 20,
    "probabilities": chances,
}
for folder in ("artifacts", "metrics", "reports/live/plots/metrics/val"):
    Path(folder).mkdir(parents=True, exist_ok=True)
pq.write_table(
    pa.table(columns, schema=predictions_schema("image_classification")),
    "artifacts/predictions.parquet",
)
Path("reports/live/plots/metrics/val/loss.tsv").write_text(f"step\\tloss\\n1\\t{wrong}\\n")
Path("artifacts/calibration.json").write_text(CALIBRATION)
value = {"name": "accuracy", "value": 1 - wrong / 20, "low": 0, "high": 1, "confidence": 0.9}
Path("metrics/evaluate.json").write_text(json.dumps({
    "metrics": [value | {"rows": 20}], "baseline": [],
    "per_class": [{"class": "cat"}, {"class": "dog"}],
}))
"""


@pytest.mark.nightly(seconds=40)
def test_two_saved_experiments_are_compared_by_their_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path)
    (tmp_path / "dvc.yaml").write_text(_PIPELINE)
    calibration = CALIBRATION.model_copy(update={"thresholds": [NEVER, 0.85]}).model_dump_json()
    (tmp_path / "evaluate.py").write_text(f"CALIBRATION = {calibration!r}\n{_EVALUATE}")
    project.git("commit", "-aqm", "Evaluate")
    for name, value in project.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    params = (tmp_path / "params.yaml").read_text()
    for name, seed in (("good", 2), ("bad", 9)):
        text = re.sub("^seed: .*", f"seed: {seed}", params, flags=re.MULTILINE)
        (tmp_path / "params.yaml").write_text(text)
        subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], check=True)
        repository.save(name, ["metrics/evaluate.json"])
    shutil.rmtree(tmp_path / "artifacts")

    task = {"data.task": "image_classification"}
    good, bad = (read_answers(record(name, params=task)) for name in ("good", "bad"))
    assert [int((found.outputs.argmax(axis=1) != 1).sum()) for found in (good, bad)] == [2, 9]
    decided = read_answers(record("good", params=task | {"evaluate.decision.positive": "dog"}))
    assert decided.thresholds == [NEVER, 0.85]
    assert int((decided.predicted != 1).sum()) == 20, "no dog reaches the threshold"
    assert (good.classes, set(good.targets)) == (["cat", "dog"], {1.0})
    assert good.metrics["accuracy"].value == 0.9
    assert bad.curves["loss"][0].y == [9.0]
    output = project.slipway("compare", "good", "bad")
    assert "on the same 20 test rows" in output
    assert "-0.35" in output
    page = tmp_path / "reports/two.html"
    project.slipway("compare", "good", "bad", "--html", str(page))
    assert "Confusion matrices" in page.read_text()

    shutil.rmtree(tmp_path / ".dvc/cache")
    with pytest.raises(UnavailableError, match="Expected them in its cache or its remote"):
        read_answers(record("good", params=task))
    assert "No paired intervals" in project.slipway("compare", "good", "bad")


def test_an_experiment_that_dvc_does_not_keep_has_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnavailableError, match="it ended with evaluate"):
        read_answers(record("half", stage="evaluate"))
    with pytest.raises(UnavailableError, match="it is failed"):
        read_answers(record("broken", status="failed"))


@pytest.mark.parametrize("option", ["--csv", "--json", "--reverse", "--sort=metric"])
def test_compare_refuses_names_together_with_options_for_lists(option: str) -> None:
    answer = CliRunner().invoke(compare, ["a", "b", option])
    assert isinstance(answer.exception, ParamsError)
    assert "expected no option but --html with names" in str(answer.exception)
