"""Runs trainings in separate processes, as `dvc repro` starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from slipway.system import files
from tests import warm_starts
from tests.training.conftest import ROOT

TRAIN = [sys.executable, "-u", "-m", "slipway.stages.train"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "-m",
    "slipway.stages.train",
]
DEEPSPEED = [
    str(Path(sys.executable).parent / "deepspeed"),
    "--num_gpus=2",
    "--no_local_rank",
    "--module",
    "slipway.stages.train",
]
AS_ROOT = [
    "env",
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
]  # without which Open MPI refuses


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"/tmp/gpulike:{ROOT}",
        "DS_BUILD_OPS": "0",
        "DVC_NO_ANALYTICS": "1",
    }


def run_training(
    project: Path, module: str = "slipway.stages.train"
) -> subprocess.CompletedProcess[str]:
    """Train to the end in a process that has already imported all modules."""
    return warm_starts.run([module], project, environment(), timeout=300)


def start_training(project: Path) -> warm_starts.Process:
    """Start a training in its own session, and read its output."""
    return warm_starts.start(["slipway.stages.train"], project, environment())


def run_command(project: Path, command: list[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    """Train in a new process, started as by a user or a launcher."""
    return subprocess.run(
        command, cwd=project, env=environment(), capture_output=True, text=True, timeout=300
    )


def start_command(project: Path, command: list[str] = TRAIN) -> subprocess.Popen[str]:
    """Start a training in a new process, as a user or a launcher does, without waiting for it."""
    return subprocess.Popen(
        command,
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def kill_after(project: Path, text: str, command: list[str] | None = None) -> None:
    """Start a training and kill it, with all its processes, when it prints `text`."""
    with start_command(project, command) if command else start_training(project) as process:
        assert process.stdout is not None
        seen = any(text in line for line in process.stdout)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert seen


def kill_at_step(project: Path, step: int, command: list[str] | None = None) -> None:
    """Start a training, and kill all its processes once it has saved `step` or a later step."""
    with start_command(project, command) if command else start_training(project) as process:
        deadline = time.monotonic() + 300
        while not any(
            int(save.name[5:13]) >= step
            for save in (project / ".work/train").glob("*/step-????????")
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)


def weights_digest(project: Path) -> str:
    return files.sha256_file(project / "artifacts/model/weights.safetensors")


def validation_accuracy(project: Path) -> float:
    return float(json.loads((project / "metrics/train.json").read_text())["val_accuracy"])
