import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.training.distributed.processes import (
    is_first_process,
    launched_rank,
    terminate_ranks_together,
    was_started_by_another,
)
from slipway.training.distributed.stop_signals import Stopped

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_LOCALID": "0",
}
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
WAIT = "import time; print('ready', flush=True); time.sleep(60)"
WAIT_FOR_PARENT = (
    f"from slipway.training.distributed.processes import end_with_parent; end_with_parent(); {WAIT}"
)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def _ends_within(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _is_running(process):
            return True
        time.sleep(0.1)
    return False


def _child_of_a_killed_parent(code: str) -> int:
    command = [sys.executable, "-c", PARENT, code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    return child


@pytest.mark.process
def test_a_rank_ends_when_its_parent_is_killed() -> None:
    assert _ends_within(_child_of_a_killed_parent(WAIT_FOR_PARENT), 5)


@pytest.mark.process
def test_a_process_without_the_parent_watch_outlives_its_killed_parent() -> None:
    child = _child_of_a_killed_parent(WAIT)
    assert not _ends_within(child, 2)
    os.kill(child, 9)


def _fail_with(children: list[Any]) -> None:
    trainer: Any = SimpleNamespace(
        global_rank=0,
        world_size=1,
        strategy=SimpleNamespace(launcher=SimpleNamespace(procs=children)),
    )
    with terminate_ranks_together(trainer):
        raise ValueError("rank 0 failed")


def test_the_ranks_that_rank_0_started_are_killed_when_it_fails() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT]) as child:
        with pytest.raises(ValueError, match="rank 0 failed"):
            _fail_with([child])
        assert child.wait(5) == -9


@pytest.mark.process
def test_ranks_that_are_stopping_get_time_to_end_by_themselves() -> None:
    slow = "import sys, time; time.sleep(1); sys.exit(143)"
    with subprocess.Popen([sys.executable, "-c", slow]) as child:
        trainer: Any = SimpleNamespace(
            global_rank=0,
            world_size=1,
            strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[child])),
        )
        with pytest.raises(Stopped), terminate_ranks_together(trainer):
            raise Stopped(15)
        assert child.returncode == 143


def test_an_error_of_a_trainer_without_a_launcher_is_raised_unchanged() -> None:
    trainer: Any = SimpleNamespace(
        global_rank=0, world_size=1, strategy=SimpleNamespace(launcher=None)
    )
    with pytest.raises(ValueError, match="its own"), terminate_ranks_together(trainer):
        raise ValueError("its own")


@pytest.mark.parametrize(
    ("environment", "first", "started"),
    [
        ({}, True, False),
        ({"LOCAL_RANK": "0"}, True, False),
        ({"LOCAL_RANK": "1"}, False, True),
        (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}, False, False),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, False),
        (SLURM | {"SLURM_PROCID": "3"}, False, False),
        (SLURM | {"SLURM_PROCID": "0"}, True, False),
    ],
)
def test_exactly_one_process_of_each_launcher_is_the_first(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: bool, started: bool
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_first_process(), was_started_by_another()) == (first, started)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}, (4, 8)),
        (SLURM | {"SLURM_PROCID": "3"}, (3, 4)),
        (SLURM | {"SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}, (0, 1)),
    ],
    ids=["nothing", "Lightning", "torchrun", "Slurm", "an unequal Slurm step"],
)
def test_the_rank_comes_from_the_variables_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == expected
