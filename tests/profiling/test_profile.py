"""The profile of real trainings finds a part that was slowed, and forecasts the gain."""

import os
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from slipway.config.params import load_params
from slipway.profiling.measured_run import COMMAND, MeasuredRun, ProfiledProject
from slipway.profiling.profile import NUM_ROUNDS, profile_project, prove
from slipway.profiling.report import ProfileReport
from tests import warm_starts
from tests.training.conftest import ROOT, write_project

pytestmark = pytest.mark.process
TOLERANCE = 0.25  # relative to the expected gain


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )


def _project(root: Path, kind: str = "", **train: object) -> ProfiledProject:
    write_project(root, **{"batch_size": 4, **train})
    slowed = (sys.executable, "-m", "tests.profiling.slowed_run", kind)
    command = slowed if kind else COMMAND
    places = (root / "data/packed", root / "data/augmented", root, root / "scratch")
    return ProfiledProject(load_params(root / "params.yaml"), *places, command, _started)


def _started(command: list[str], stdout: IO[str], stderr: IO[str], **_: Any) -> warm_starts.Process:
    """Run `python -m MODULE FOLDER` in a process that has already imported the libraries."""
    return warm_starts.Process(
        command[2:], Path(), dict(os.environ), stdout.fileno(), stderr.fileno(), new_session=True
    )


def _profiled(
    root: Path, kind: str, num_rounds: int = NUM_ROUNDS
) -> tuple[ProfiledProject, ProfileReport]:
    project = _project(root, kind)
    return project, profile_project(project, trials=False, num_rounds=num_rounds)


@pytest.mark.nightly(seconds=20)
def test_profile_of_a_slow_transform_names_it_and_proposes_loader_processes(tmp_path: Path) -> None:
    _, found = _profiled(tmp_path, "transform", num_rounds=2)
    assert found.bottleneck.name == "making batches"
    assert found.bottleneck.fraction > 0.5
    assert found.proposal is not None
    assert set(found.proposal.changes) == {"train.num_workers"}
    assert found.proposal.expected_gain > 1.3
    used = found.utilisation
    assert used is not None
    assert list(used.rates) == ["float32", "bfloat16"]
    assert 0 < used.fraction.median < 0.2, "most of the step waits for its batch"


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [("transform", "making batches", "it computes"), ("disk", "reading", "it waits")],
)
def test_measured_gain_of_the_proposal_matches_the_forecast(
    tmp_path: Path, kind: str, name: str, words: str
) -> None:
    project, found = _profiled(tmp_path, kind)
    assert found.bottleneck.name == name
    assert words in found.bottleneck.text
    assert found.bottleneck.fraction > 0.5
    assert found.proposal is not None
    assert set(found.proposal.changes) == {"train.num_workers"}
    proof = prove(project, found.proposal, num_rounds=7)
    print(f"{kind}: expected {proof.expected_gain:.2f}, measured {proof.measured_gain}")
    assert proof.measured_gain.median > 1.3
    assert abs(proof.error) < TOLERANCE


@pytest.mark.nightly(seconds=30)
def test_the_profile_of_an_unslowed_training_names_no_part_of_loading_as_bottleneck(
    tmp_path: Path,
) -> None:
    project = _project(tmp_path, batch_size=32)
    found = profile_project(project, trials=False)
    assert found.bottleneck.name not in ("making batches", "reading", "decoding")
    assert found.proposal is None


def test_the_measured_parts_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    with MeasuredRun(_project(tmp_path, batch_size=32), "present") as run:
        found = [run.time_steps() for _ in range(3)]
    for each in found:
        assert sum(each.parts_ms.values()) == pytest.approx(each.step_ms, rel=0.01)
        assert each.row_length == 8, "the side of its images"


@pytest.mark.nightly
def test_communication_is_measured_only_with_two_processes(tmp_path: Path) -> None:
    project = _project(tmp_path, batch_size=32, strategy="deepspeed_stage_2", devices=2)
    with MeasuredRun(project, "present") as run:
        found = [run.time_steps(synchronised=True) for _ in range(2)]
    assert min(each.parts_ms["communication"] for each in found) > 0.1
    with MeasuredRun(_project(tmp_path / "one", batch_size=32), "present") as run:
        assert run.time_steps(synchronised=True).parts_ms["communication"] == 0
