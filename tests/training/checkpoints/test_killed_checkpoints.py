"""A kill at any file operation of a checkpoint leaves the other checkpoints intact."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.file_operations import is_possible, killed_at
from tests.training.conftest import write_project
from tests.training.forked_runs import run_forked
from tests.training.killed_checkpoints import (
    older_ones_removed_first,
    sweep_third_checkpoint,
    written_in_place,
)

pytestmark = pytest.mark.skipif(
    not is_possible, reason="system calls are traced only on Linux on x86-64"
)


def sweep(project: Path, twin: Callable[..., Any] | None = None) -> list[dict[str, Any]]:
    code, output = run_forked(
        write_project(project, checkpoint_every_minutes=1e-9),
        sweep_third_checkpoint,
        project / "report",
        twin,
    )
    assert code == 0, output
    found: list[dict[str, Any]] = json.loads((project / "report").read_text())
    return found


@pytest.mark.process
def test_a_checkpoint_killed_at_any_file_operation_leaves_intact_checkpoints(
    tmp_path: Path,
) -> None:
    found = sweep(tmp_path)
    assert {"write", "fsync", "rename", "mkdir", "unlink", "openat"} <= {
        each["operation"] for each in found
    }
    assert len(found) > 40
    assert {each["newest"] for each in found} == {2, 3}
    assert [each["newest"] for each in found] == sorted(each["newest"] for each in found)
    assert [each["problems"] for each in found if each["problems"]] == []
    assert {name for each in found for name in each["left"]} == {
        "fingerprint.json",
        *(f"step-{step:08d}" for step in (1, 2, 3)),
    }
    assert found[-1]["left"] == ["fingerprint.json", "step-00000002", "step-00000003"]


@pytest.mark.process
def test_a_checkpoint_written_in_place_would_be_damaged_by_a_kill(tmp_path: Path) -> None:
    assert any(
        "step-00000003 is damaged" in problem
        for each in sweep(tmp_path, written_in_place)
        for problem in each["problems"]
    )


@pytest.mark.nightly(seconds=9)
def test_removing_old_checkpoints_first_would_leave_none_after_a_kill(tmp_path: Path) -> None:
    assert None in {each["newest"] for each in sweep(tmp_path, older_ones_removed_first)}


def test_kill_helper_stops_an_action_before_its_nth_operation(tmp_path: Path) -> None:
    def write_two() -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()

    assert killed_at(2, write_two) == "mkdir"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    (tmp_path / "one").rmdir()
    assert killed_at(3, write_two) is None
    assert len(list(tmp_path.iterdir())) == 2
