"""`slipway loop` refuses to begin where a step could reach callers, or nothing is set."""

import multiprocessing
import shutil
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import cast

import pytest

from slipway.artifacts.bundle import Lineage
from slipway.experiments.records import ExperimentRecord
from slipway.loop.__main__ import advance, open_project
from slipway.loop.journal import JOURNAL, LoopError, append_step
from slipway.loop.steps import LoopProject
from slipway.serving.settings import Settings
from slipway.system import files
from slipway.system.errors import LockedError, UnavailableError
from slipway.traffic.postgres import DATABASE_URL
from tests.conftest import ROOT
from tests.loop.cases import loop_params, write_steps
from tests.project_params import PROJECT
from tests.serving.bundles import COLUMNS, row_classifier, write_bundle


@pytest.fixture
def project(tmp_path: Path) -> LoopProject:
    params = PROJECT.model_copy(update={"loop": loop_params()})
    return LoopProject(params, Settings(state=tmp_path / "state"), tmp_path)


def test_without_the_section_loop_the_command_says_that_the_loop_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoopError, match=r"no section loop, so the loop is off; expected"):
        open_project()


def test_the_loop_refuses_a_service_that_serves_the_projects_own_artifacts(
    project: LoopProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served = project.settings.model_copy(update={"bundle": tmp_path / "artifacts/bundle"})
    with pytest.raises(LoopError, match="Deploy it once: slipway rollout deploy artifacts/bundle"):
        advance(LoopProject(project.params, served, tmp_path))
    assert not (project.folder / JOURNAL).exists()


def test_the_loop_refuses_a_clock_that_was_set_back(project: LoopProject) -> None:
    append_step(project.folder / JOURNAL, 1, "triggered", {}, 10_000.0)
    with pytest.raises(LoopError, match=r"The clock|the clock says .* Set the clock"):
        advance(project, clock=lambda: 9_000.0)


def test_a_store_that_is_down_stops_the_loop_with_its_reason_and_records_nothing(
    project: LoopProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "bundle", row_classifier(), input=COLUMNS)
    served = project.settings.model_copy(update={"bundle": tmp_path / "bundle"})
    monkeypatch.setenv(DATABASE_URL, "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(UnavailableError, match="SLIPWAY_DATABASE_URL"):
        advance(LoopProject(project.params, served, tmp_path))
    assert not (project.folder / JOURNAL).exists()


def test_a_candidate_of_unknown_data_is_refused_and_not_copied(
    project: LoopProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cycle = write_steps(project.folder, {"triggered": {}, "merged": {"path": "next.parquet"}})
    lineage = Lineage(
        git_revision=None,
        git_dirty=False,
        params={"data": {"path": "next.parquet"}},
        data=None,
        digests={},
    )
    write_bundle(tmp_path / "artifacts/bundle", row_classifier(), input=COLUMNS, lineage=lineage)
    with pytest.raises(LoopError, match=r"digest of the data of \w+ is unknown, expected one"):
        project._copied_candidate(cycle, cast(ExperimentRecord, None))  # read after the check
    assert not project.place(1).exists()


def hold_lock(path: Path, is_held: Event, is_over: Event) -> None:
    with files.lock(path, "`slipway loop`"):
        is_held.set()
        is_over.wait(60)


@pytest.mark.process
def test_two_loops_cannot_run_at_once(project: LoopProject) -> None:
    context = multiprocessing.get_context("fork")
    is_held, is_over = context.Event(), context.Event()
    path = project.folder / "loop.lock"
    other = context.Process(target=hold_lock, args=(path, is_held, is_over))
    other.start()
    assert is_held.wait(60)
    with pytest.raises(LockedError, match="`slipway loop` is already running as process"):
        advance(project)
    is_over.set()
    other.join(60)
