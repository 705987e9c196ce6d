"""Tests of the launchers' environment variables: they are read, or refused with a reason."""

import json
import sys

import pytest

from slipway.system.errors import UnavailableError
from slipway.training.distributed.launchers import (
    RELAUNCH,
    LaunchedEnvironment,
    cluster_environment,
    find_launch,
    relaunch,
)
from tests import warm_starts
from tests.conftest import ROOT

# The variables of rank 3: the second process on the second of two nodes.
ENVIRONMENTS = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    },
    "the DeepSpeed launcher": {
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "LOCAL_SIZE": "2",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    },
    "Slurm": {
        "SLURM_JOB_ID": "21234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    },
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_rank_and_world_size_are_read_from_the_variables_of_each_launcher(launcher: str) -> None:
    launch = find_launch(ENVIRONMENTS[launcher])
    assert launch is not None
    assert launch.launcher == launcher
    assert (
        launch.rank,
        launch.local_rank,
        launch.num_local,
        launch.num_nodes,
        launch.world_size,
    ) == (3, 1, 2, 2, 4)
    assert (launch.main_address, launch.main_port) == (
        "node1",
        16234 if launcher == "Slurm" else 29500,
    )


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_lightning_reads_rank_and_world_size_from_the_launcher(launcher: str) -> None:
    environment = cluster_environment(find_launch(ENVIRONMENTS[launcher]))
    assert isinstance(environment, LaunchedEnvironment)
    assert environment.creates_processes_externally
    assert (
        environment.world_size(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
    ) == (
        4,
        3,
        1,
        1,
    )
    environment.set_world_size(1)
    environment.set_global_rank(0)
    assert (environment.world_size(), environment.global_rank()) == (4, 3)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "4000",
        },  # Lightning's own child
        {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },  # an sbatch script
        ENVIRONMENTS["Slurm"]
        | {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
        },  # srun --pty bash
        ENVIRONMENTS["mpirun"] | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ],
)
def test_lightning_starts_the_processes_if_there_is_no_launcher(
    environment: dict[str, str],
) -> None:
    assert find_launch(environment) is None
    assert type(cluster_environment(None)).__name__ == "LightningEnvironment"


@pytest.mark.parametrize("inner", ["torchrun", "mpirun"])
def test_a_launcher_inside_a_slurm_job_takes_precedence_over_slurm(inner: str) -> None:
    launch = find_launch(ENVIRONMENTS["Slurm"] | ENVIRONMENTS[inner])
    assert launch is not None
    assert launch.launcher == inner


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            ENVIRONMENTS["Slurm"]
            | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            "started 3 processes as 2,1 on 2 nodes",
        ),
        (
            ENVIRONMENTS["Slurm"] | {"SLURM_STEP_TASKS_PER_NODE": "3,1"},
            "as 3,1 on 2 nodes, expected equally many",
        ),
        (
            ENVIRONMENTS["torchrun"] | {"WORLD_SIZE": "5"},
            "torchrun started 5 processes, 2 of them on this node",
        ),
        (
            {k: v for k, v in ENVIRONMENTS["mpirun"].items() if k != "MASTER_ADDR"},
            "mpirun does not say on which node rank 0 runs",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "not Open MPI's"),
    ],
)
def test_unknown_launchers_and_unequal_processes_per_node_are_refused(
    environment: dict[str, str], text: str
) -> None:
    with pytest.raises(UnavailableError, match=text):
        find_launch(environment)


def test_two_runs_of_mpirun_on_one_machine_use_different_ports() -> None:
    one_node = {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    launches = [
        find_launch(one_node | {"PMIX_NAMESPACE": name})
        for name in ("2847932417", "2847932418", "2847932418")
    ]
    ports = [launch.main_port for launch in launches if launch]
    assert ports[0] != ports[1] == ports[2]
    assert all(launch and launch.main_address == "127.0.0.1" for launch in launches)


def _run(*environments: dict[str, str]) -> str:
    """Return the output of a process that calls `relaunch` in each environment in turn."""
    done = warm_starts.run(
        ["tests.training.relaunched", json.dumps(environments)], ROOT, {}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_relaunch_replaces_the_process_by_the_configured_launcher() -> None:
    assert (
        _run({"TRAIN_LAUNCHER": "echo one 'two three'"})
        == f"one two three {sys.executable} -u -m slipway.stages.train\n"
    )


@pytest.mark.process
def test_relaunch_does_nothing_in_launched_processes_or_without_a_command() -> None:
    started = {"TRAIN_LAUNCHER": "echo", **ENVIRONMENTS["torchrun"]}
    assert _run(started, {"TRAIN_LAUNCHER": " "}, {}) == "went on\n" * 3


@pytest.mark.parametrize("command", ["no-such-launcher -n 2", "srun 'unclosed"])
def test_a_launcher_that_cannot_be_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv(RELAUNCH, command)
    with pytest.raises(UnavailableError, match=f"TRAIN_LAUNCHER is .*{command.split()[0]}"):
        relaunch("slipway.stages.train")
