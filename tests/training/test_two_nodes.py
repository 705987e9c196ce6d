"""Scripts of `slipway launch` train the same weights on two nodes as two processes on one."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.cli.launch import write_script
from slipway.system import files
from slipway.training.networks.networks import read_model_manifest
from tests.training.conftest import ROOT, write_project
from tests.training.real_runs import run_command, run_training, weights_digest
from tests.training.slurm_cluster import slurm, wait_until
from tests.training.text_projects import write_text_project
from tests.training.two_nodes import TwoNodes, skip_without, two_nodes

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]
MPIRUN = "mpirun --hostfile hosts --map-by slot --bind-to none -x MASTER_ADDR=node1"
DEEPSPEED = "deepspeed --hostfile hosts --force_multi --no_local_rank --no_python"
HOSTS = "node1 slots=1\nnode2 slots=1\n"
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # without which Open MPI refuses
DDP = {"strategy": "ddp", "precision": "32-true"}
ZERO = {"strategy": "deepspeed_stage_2", "precision": "bf16-mixed", "offload": "optimizer"}
FSDP, TENSOR, STAGES = (
    {"strategy": strategy, "precision": "32-true"}
    for strategy in ("fsdp", "tensor_parallel", "pipeline")
)
# Two copies of the network, each on the two processes of a node.
MESH: dict[str, Any] = {**FSDP, "model_parallel": 2}
PIPELINE = (
    "stages: {train: {cmd: python -m slipway.stages.train, deps: [data], params: [train], "
    "outs: [artifacts/model]}}\n"
)


@pytest.fixture(name="nodes", scope="module")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(name="one_node", scope="module")
def _one_node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of the weights that two processes on one node train, by strategy."""
    return {
        settings["strategy"]: _trained_on_one_node(tmp_path_factory.mktemp("one"), **settings)
        for settings in (DDP, ZERO)
    }


def _write(root: Path, **train: Any) -> Path:
    """Write a project of texts for strategies that divide only transformers, else of images."""
    is_text = train["strategy"] in ("tensor_parallel", "pipeline") or "model_parallel" in train
    return (write_text_project if is_text else write_project)(root, **{"epochs": 3, **train})


def _trained_on_one_node(root: Path, **train: Any) -> str:
    devices = 2 * _num_devices(train)
    project = _write(root, devices=devices, num_nodes=1, **train)
    # A warm start has only one process beside the first.
    done = run_training(project) if devices == 2 else run_command(project)
    assert done.returncode == 0, done.stderr
    return weights_digest(project)


def _num_devices(train: dict[str, Any]) -> int:
    """Return the number of processes of each node."""
    return int(train.get("model_parallel", 1))


def _shared_project(root: Path, **train: Any) -> Path:
    """Write a project of this code with only the stage `train`, and scripts of `slipway launch`."""
    devices = _num_devices(train)
    _write(root, num_nodes=2, devices=devices, **train)
    with contextlib.chdir(root):
        write_script("torchrun.sh", 2, devices, gpus=0)
        write_script("slurm.sbatch", 2, devices, gpus=0)
    for name in ("slipway", "transforms", "data/demo"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(sys.prefix)
    (root / ".dvc").mkdir()
    files.write_text(root / ".dvc/config", "[core]\n    no_scm = true\n")
    files.write_text(root / "dvc.yaml", PIPELINE)
    files.write_text(root / "hosts", HOSTS)
    return root


def _trained_on_two_nodes(project: Path, num_devices: int = 1) -> str:
    assert read_model_manifest(project / "artifacts/model").actual.world_size == 2 * num_devices
    assert (project / "dvc.lock").is_file()
    return weights_digest(project)


@pytest.mark.nightly(seconds=75)
@pytest.mark.parametrize(
    "settings",
    [DDP, FSDP, TENSOR, STAGES, MESH],
    ids=["ddp", "fsdp", "tensor_parallel", "pipeline", "fsdp-model_parallel"],
)
def test_torchrun_on_two_nodes_trains_the_same_weights_as_on_one_node(
    nodes: TwoNodes, tmp_path: Path, settings: dict[str, Any]
) -> None:
    project, devices = _shared_project(tmp_path / "two", **settings), _num_devices(settings)
    with nodes.started("node2", ["./torchrun.sh", "1", "node1"], project) as second:
        done = nodes.run("node1", ["./torchrun.sh", "0", "node1"], project)
        assert done.returncode == 0, done.stdout + done.stderr
        assert second.wait(60) == 0
    one_node = _trained_on_one_node(tmp_path / "one", **settings)
    assert _trained_on_two_nodes(project, devices) == one_node


def _kill_after_a_checkpoint(project: Path, rank: int) -> int:
    """Wait for a checkpoint, kill the process of `rank`, and return its id."""
    saved = ".work/train/*/step-*/checkpoint.json"
    wait_until(lambda: any(project.glob(saved)), "checkpoint", 300)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_rank = f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if is_rank and (entry / "cwd").readlink() == project:
                os.kill(int(entry.name), signal.SIGKILL)
                return int(entry.name)
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.nightly(seconds=90)
def test_torchrun_on_two_nodes_restarts_a_lost_process_and_trains_the_same_weights(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    settings = {**DDP, "epochs": 12}
    project = _shared_project(tmp_path / "two", **settings, checkpoint_every_minutes=1e-9)
    with (
        nodes.started("node2", ["./torchrun.sh", "1", "node1"], project) as second,
        nodes.started("node1", ["./torchrun.sh", "0", "node1"], project) as first,
    ):
        _kill_after_a_checkpoint(project, rank=1)
        assert first.wait(300) == 0, (project / "node1.log").read_text()
        assert second.wait(60) == 0, (project / "node2.log").read_text()
    assert "resumed   after epoch" in (project / "node1.log").read_text()
    assert _trained_on_two_nodes(project) == _trained_on_one_node(tmp_path / "one", **settings)


@pytest.mark.parametrize(
    ("launcher", "tools", "settings"),
    [
        (MPIRUN, ("mpirun",), DDP),
        (DEEPSPEED, ("pdsh",), DDP),
        pytest.param(DEEPSPEED, ("pdsh",), ZERO, marks=pytest.mark.nightly),
        pytest.param(MPIRUN, ("mpirun",), TENSOR, marks=pytest.mark.nightly),
        pytest.param(MPIRUN, ("mpirun",), FSDP, marks=pytest.mark.nightly),
        pytest.param(MPIRUN, ("mpirun",), STAGES, marks=pytest.mark.nightly),
        pytest.param(DEEPSPEED, ("pdsh",), FSDP, marks=pytest.mark.nightly),
        pytest.param(DEEPSPEED, ("pdsh",), TENSOR, marks=pytest.mark.nightly),
        pytest.param(DEEPSPEED, ("pdsh",), STAGES, marks=pytest.mark.nightly),
    ],
)
def test_mpirun_and_deepspeed_on_two_nodes_train_the_same_weights_as_on_one_node(
    nodes: TwoNodes,
    one_node: dict[str, str],
    tmp_path: Path,
    launcher: str,
    tools: tuple[str, ...],
    settings: dict[str, str],
) -> None:
    skip_without("ssh", "sshd", *tools)
    project = _shared_project(tmp_path / "two", **settings)
    with nodes.reachable_by_ssh() as ssh:
        variables = {**AS_ROOT, "PATH": f"{ssh}:{os.environ['PATH']}", "TMPDIR": str(nodes.folder)}
        variables["TRAIN_LAUNCHER"] = launcher
        done = nodes.run("node1", [f"{sys.prefix}/bin/slipway", "run"], project, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = one_node.get(settings["strategy"]) or _trained_on_one_node(
        tmp_path / "one", **settings
    )
    assert _trained_on_two_nodes(project) == expected


@pytest.mark.nightly(seconds=170)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        (DDP, ("scontrol", "requeue")),
        # As Slurm does before the time limit; the training then requeues its job.
        (FSDP, ("scancel", "--signal=USR1")),
        (TENSOR, ("scontrol", "requeue")),
        (STAGES, ("scancel", "--signal=USR1")),
    ],
    ids=lambda value: value.get("strategy") if isinstance(value, dict) else value[0],
)
def test_slurm_on_two_nodes_and_a_requeued_job_train_the_same_weights_as_one_node(
    nodes: TwoNodes, tmp_path: Path, settings: dict[str, Any], stop: tuple[str, ...]
) -> None:
    settings = {**settings, "epochs": 60}
    project = _shared_project(tmp_path / "two", **settings)
    with slurm(nodes) as cluster:
        no_gpus = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
        job = cluster.ask("sbatch", "--parsable", *no_gpus, "slurm.sbatch", folder=project)
        log = project / f"slurm-{job}.log"
        wait_until(
            lambda: log.is_file() and "epoch  5/60" in log.read_text(),
            "end of the fifth epoch",
            300,
        )
        cluster.ask(*stop, job)
        wait_until(lambda: cluster.state(job) == "PENDING", "requeued job", 60)
        # A node refuses a job in the second in which it killed it.
        cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        wait_until(
            lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"),
            "end of the job",
            600,
        )
        assert cluster.state(job) == "COMPLETED", log.read_text()
    assert "resumed   after epoch" in log.read_text()
    is_signalled = stop[0] == "scancel"
    assert (f"scontrol requeue {job} done" in log.read_text()) == is_signalled
    assert _trained_on_two_nodes(project) == _trained_on_one_node(tmp_path / "one", **settings)
