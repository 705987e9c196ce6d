"""A missed quality gate costs no experiment and no export, and keeps the model from the service."""

import csv
import time

import pytest

from tests import plain_http
from tests.end_to_end.project import START_TIMEOUT_S, Project, copy_finished

pytestmark = [pytest.mark.nightly(seconds=150), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def project(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """64 pictures in a committed project whose gates are passed."""
    return copy_finished(finished, tmp_path_factory.mktemp("gates"))


def test_an_experiment_below_its_quality_gate_is_recorded_but_not_served(
    project: Project,
) -> None:
    bundle = (project.path / "artifacts/bundle/bundle.json").read_bytes()
    assert "gates passed" in project.shell("python -m slipway.reports.summary")

    said = project.shell("dvc exp run --name strict -S evaluate.gates.log_loss.max=0.0")
    ran = {
        stage
        for stage in ("train", "evaluate", "prune", "export", "compile", "verify")
        if f"Running stage '{stage}'" in said
    }
    assert ran == {"evaluate", "verify"}
    assert (project.path / "artifacts/bundle/bundle.json").read_bytes() == bundle

    rows = list(csv.DictReader(project.shell("dvc exp show --csv 2>/dev/null").splitlines()))
    committed, experiment = (row for row in rows if row["rev"] != "workspace")
    assert (experiment["Experiment"], experiment["gates"]) == ("strict", "missed")
    assert committed["gates"] == "passed"

    said = project.shell("python -m slipway.reports.summary", succeeds=False)
    assert "error: model" in said
    assert "missed: log_loss is " in said
    assert "required at most 0 (evaluate.gates.log_loss in params.yaml)" in said

    with project.service() as address:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "quality gates" not in (answer := plain_http.get(f"{address}/readyz")).text:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)
        assert answer.status_code == 503
        assert "log_loss is " in answer.text

    project.shell(
        "git checkout -q params.yaml dvc.lock metrics && dvc checkout -q "
        "&& dvc repro | grep -v \"Running stage 'code'\" | tee /dev/stderr "
        "| grep 'Running stage' && exit 1 || true"
    )
    assert "gates passed" in project.shell("python -m slipway.reports.summary")
