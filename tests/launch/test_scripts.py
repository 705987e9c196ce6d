"""The scripts that `slipway launch` writes: machines, interpreter, network card and restarts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.cli.command import main
from slipway.cli.launch import write_script
from tests.cli.test_params import message_of
from tests.conftest import ROOT

pytestmark = pytest.mark.unit
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SCALING = (ROOT / "docs/how-to/scaling.md").read_text()


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(params)


def _printed(script: Path, *arguments: str, **variables: str) -> str:
    """Return what a script would run, with its launcher, in place of `slipway run`."""
    folder = Path("bin").absolute()
    folder.mkdir(exist_ok=True)
    command = folder / "slipway"
    command.write_text(f'#!/bin/bash\necho "${VARIABLE} $NCCL_SOCKET_IFNAME $TRAIN_LAUNCHER: $@"\n')
    command.chmod(0o755)
    text = script.read_text()
    own = str(Path(sys.executable).parent)
    assert f"PATH={own}:" in text
    script.write_text(text.replace(f"PATH={own}:", f"PATH={folder}:"))
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        [f"./{script}", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torchrun_script_restarts_lost_processes_as_often_as_the_docs_say() -> None:
    (documented,) = set(re.findall(r"--max-restarts=\d+", SCALING))
    assert f"export {VARIABLE}=1\n" in SCALING
    assert _printed(write_script("torchrun.sh", 4, 8, 8), "0", "node1") == (
        "1  torchrun --nnodes=4 --nproc-per-node=8 --node-rank=0 --master-addr=node1 "
        f"--master-port=29500 --rdzv-conf=timeout=86400 {documented} --no-python: "
        "run train.num_nodes=4 train.devices=8\n"
    )


def test_max_restarts_changes_how_often_the_torchrun_script_restarts() -> None:
    script = write_script("torchrun.sh", 4, 8, 8)
    assert " --max-restarts=0 --no-python" in _printed(script, "0", "node1", MAX_RESTARTS="0")


def test_the_torchrun_script_prints_its_usage_if_called_without_arguments() -> None:
    answer = subprocess.run(
        [f"./{write_script('torchrun.sh', 2, 1, 1)}"], capture_output=True, text=True
    )
    assert (answer.returncode, answer.stderr) == (2, "usage: ./torchrun.sh NODE_RANK FIRST_NODE\n")


def test_the_interface_is_set_for_both_libraries_only_if_it_is_named() -> None:
    plain = write_script("torchrun.sh", 2, 1, 1).read_text()
    assert "export NCCL" not in plain
    Path("torchrun.sh").unlink()
    named = write_script("torchrun.sh", 2, 1, 1, "eth1")
    assert "GLOO_SOCKET_IFNAME=eth1" in named.read_text()
    assert _printed(named, "0", "node1").startswith("1 eth1 torchrun ")


def test_the_slurm_script_trains_on_what_the_allocation_has() -> None:
    main(["launch", "slurm", "--nodes", "3", "--gpus-per-node", "2"])
    text = Path("slurm.sbatch").read_text()
    for option in ("--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"):
        assert f"#SBATCH {option}" in text
    assert not re.search("@[a-z]+@", text)
    allocation = {"SLURM_JOB_NUM_NODES": "5", "SLURM_NTASKS_PER_NODE": "4"}
    Path("slurm.sbatch").chmod(0o755)
    printed = _printed(Path("slurm.sbatch"), **allocation)
    assert printed.endswith(": run train.num_nodes=5 train.devices=4\n")


def test_a_script_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("torchrun.sh").write_text("mine\n")
    assert "torchrun.sh exists" in message_of(["launch", "torchrun"], capsys)
    assert Path("torchrun.sh").read_text() == "mine\n"
