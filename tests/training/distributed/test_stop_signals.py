"""After a stop signal all processes save within a step, and the training resumes bit for bit."""

import os
import signal
import time
from pathlib import Path

import pytest

from slipway.system import files
from tests.training.conftest import write_project
from tests.training.forked_runs import run_forked, stop_after_checkpoint, stop_in_validation
from tests.training.real_runs import run_training, start_training, weights_digest

pytestmark = pytest.mark.process
EVERY_STEP = {"epochs": 2, "checkpoint_every_minutes": 1e-9}


def checkpoints(project: Path) -> list[str]:
    return sorted(path.name for path in (project / ".work/train").glob("*/step-*"))


def fake_scontrol(folder: Path, exit_code: int = 0) -> None:
    """Install a fake `scontrol` that records its arguments."""
    folder.mkdir()
    (folder / "scontrol").write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\necho "no such job" >&2\nexit {exit_code}\n'
    )
    (folder / "scontrol").chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def stop_for_requeue(number: int, scontrol: Path, exit_code: int, array: bool) -> None:
    fake_scontrol(scontrol, exit_code)
    os.environ["SLURM_JOB_ID"] = "123"
    if array:
        os.environ |= {"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "3"}
    stop_after_checkpoint(number, "SIGUSR1")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_signal_saves_a_checkpoint_after_the_step_and_ends_the_training(
    tmp_path: Path, name: str, code: int
) -> None:
    project = write_project(tmp_path, **EVERY_STEP)
    ended, output = run_forked(project, stop_after_checkpoint, 2, name)
    assert ended == code, output
    assert (
        f"stopped   by {name} after epoch 0 and 3 steps of the next, all saved; "
        "run the same command again to resume" in output
    )
    assert "Traceback" not in output
    assert checkpoints(project) == ["step-00000002", "step-00000003"]


def test_a_training_stopped_in_a_step_or_in_validation_resumes_to_the_same_weights(
    tmp_path: Path,
) -> None:
    whole, stopped = (
        write_project(tmp_path / name, epochs=2, num_workers=workers, ema_decay=0.9)
        for name, workers in (("whole", 0), ("stopped", 2))
    )
    assert run_forked(whole)[0] == 0
    assert run_forked(stopped, stop_in_validation, 1)[0] == 143
    assert checkpoints(stopped) == ["step-00000004"]
    ended, output = run_forked(stopped, stop_in_validation, 2)
    assert ended == 143, output
    assert "resumed   after epoch 0 and 4 steps of the next" in output
    assert run_forked(stopped)[0] == 0
    assert weights_digest(stopped) == weights_digest(whole)
    assert (stopped / "metrics/train.json").read_text() == (
        whole / "metrics/train.json"
    ).read_text()


@pytest.mark.parametrize(
    ("exit_code", "array", "said"),
    [(0, False, "requeue 123 done"), (1, True, "requeue 120_3 failed: no such job")],
)
def test_sigusr1_requeues_a_slurm_job(
    tmp_path: Path, exit_code: int, array: bool, said: str
) -> None:
    project = write_project(tmp_path / "project", **EVERY_STEP)
    ended, output = run_forked(project, stop_for_requeue, 1, tmp_path / "bin", exit_code, array)
    assert ended == 138, output
    assert said in output
    assert (tmp_path / "bin/asked").read_text() == ("requeue 120_3\n" if array else "requeue 123\n")


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    ended, _ = run_forked(write_project(tmp_path, **EVERY_STEP), stop_twice)
    assert ended == -signal.SIGTERM


def stop_twice() -> None:
    from slipway.training.distributed.collectives import MaxReducer

    def never(self: MaxReducer, own: int) -> int:
        if own > 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    MaxReducer.highest = never  # type: ignore[method-assign]
    stop_after_checkpoint(1, "SIGTERM")


@pytest.mark.parametrize(
    "to",
    [
        pytest.param("first", marks=pytest.mark.nightly),
        "other",
        pytest.param("all", marks=pytest.mark.nightly),
    ],
)
def test_both_processes_save_and_end_whichever_receives_the_signal(tmp_path: Path, to: str) -> None:
    project = write_project(tmp_path, epochs=1000, devices=2, num_workers=1)
    with start_training(project) as process:
        assert process.stdout is not None
        assert any("epoch    2/1000" in line for line in process.stdout)
        if to == "all":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(process.pid if to == "first" else _other_rank(process.pid), signal.SIGTERM)
        output = (
            process.stdout.read()
        )  # ends when the other rank, which holds the pipe too, has ended
    assert process.returncode == 143
    assert "stopped   by SIGTERM" in output
    assert checkpoints(project)
    assert not (project / "artifacts").exists()


def _other_rank(first: int) -> int:
    """Return the process of rank 1, the first child of rank 0; the other children are loaders."""
    return int((Path(f"/proc/{first}/task") / str(first) / "children").read_text().split()[0])


def test_a_killed_training_releases_the_lock_of_its_project(tmp_path: Path) -> None:
    project = write_project(tmp_path, epochs=1000, num_workers=2)
    with start_training(project) as process:
        assert process.stdout is not None
        assert any("epoch    1/1000" in line for line in process.stdout)
        assert "already running as process" in run_training(project).stderr
        process.kill()
    with files.lock(project / ".work/train/lock", "a training"):
        pass
