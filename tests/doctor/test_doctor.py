"""The doctor names what was slowed on purpose, and its forecast comes true: on real trainings in real processes."""

import os
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from slipway.config.params import load_params
from slipway.doctor.diagnosis import Diagnosis
from slipway.doctor.doctor import NUM_ROUNDS, examine, prove
from slipway.doctor.timed_processes import Measured, Project
from tests import warm_starts
from tests.training.conftest import ROOT, write_project

pytestmark = pytest.mark.process
FOUND_WITHIN = 0.25  # of the gain that was foretold


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )


def _project(root: Path, kind: str = "", **train: object) -> Project:
    write_project(root, **{"batch_size": 4, **train})
    command = (
        [sys.executable, "-m", "tests.doctor.slowed_run", kind]
        if kind
        else [sys.executable, "-m", "slipway.doctor.timed_run"]
    )
    places = (root / "data/packed", root / "data/augmented", root, root / "scratch")
    return Project(load_params(root / "params.yaml"), *places, command, _started)


def _started(command: list[str], stdout: IO[str], stderr: IO[str], **_: Any) -> warm_starts.Process:
    """`python -m MODULE FOLDER` without the seconds that importing takes, five times in a test."""
    return warm_starts.Process(
        command[2:], Path(), dict(os.environ), stdout.fileno(), stderr.fileno(), new_session=True
    )


def _examined(root: Path, kind: str, num_rounds: int = NUM_ROUNDS) -> tuple[Project, Diagnosis]:
    project = _project(root, kind)
    return project, examine(project, trials=False, num_rounds=num_rounds)


def test_what_was_slowed_is_named_and_its_cure_proposed(tmp_path: Path) -> None:
    _, found = _examined(tmp_path, "transform", num_rounds=2)
    assert found.bottleneck.name == "making batches"
    assert found.bottleneck.share > 0.5
    assert found.proposal is not None
    assert set(found.proposal.changes) == {"train.num_workers"}
    assert found.proposal.expected_gain > 1.3


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [("transform", "making batches", "it computes"), ("disk", "reading", "it waits")],
)
def test_a_slow_part_is_named_and_the_gain_of_its_cure_foretold(
    tmp_path: Path, kind: str, name: str, words: str
) -> None:
    project, found = _examined(tmp_path, kind)
    assert found.bottleneck.name == name
    assert words in found.bottleneck.text
    assert found.bottleneck.share > 0.5
    assert found.proposal is not None
    assert set(found.proposal.changes) == {"train.num_workers"}
    proof = prove(project, found.proposal, num_rounds=7)
    print(f"{kind}: expected {proof.expected_gain:.2f}, measured {proof.measured_gain}")
    assert proof.measured_gain.median > 1.3
    assert abs(proof.error) < FOUND_WITHIN


@pytest.mark.nightly(seconds=30)
def test_a_training_that_nothing_slows_is_bound_by_something_else_than_its_data(
    tmp_path: Path,
) -> None:
    project = _project(tmp_path, batch_size=32)
    found = examine(project, trials=False)
    assert found.bottleneck.name not in ("making batches", "reading", "decoding")
    assert found.proposal is None


def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    with Measured(_project(tmp_path, batch_size=32), "present") as run:
        found = [run.time_steps() for _ in range(3)]
    for each in found:
        assert sum(each.parts_ms.values()) == pytest.approx(each.step_ms, rel=0.01)


@pytest.mark.nightly
def test_communication_of_two_processes_is_told_apart(tmp_path: Path) -> None:
    project = _project(tmp_path, batch_size=32, strategy="deepspeed_stage_2", devices=2)
    with Measured(project, "present") as run:
        found = [run.time_steps(synchronised=True) for _ in range(2)]
    assert min(each.parts_ms["communication"] for each in found) > 0.1
    with Measured(_project(tmp_path / "one", batch_size=32), "present") as run:
        assert run.time_steps(synchronised=True).parts_ms["communication"] == 0
