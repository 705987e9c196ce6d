"""The script for torchrun restarts lost processes, as docs/how-to/scaling.md says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.unit
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SCALING = (ROOT / "docs/how-to/scaling.md").read_text()


def _launcher(folder: Path, **variables: str) -> str:
    """Return the variable that restarts need, and the command with which a training starts."""
    (folder / "launch").mkdir()
    shutil.copy(ROOT / "launch/torchrun.sh", folder / "launch")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    (folder / "slipway").write_text(f'#!/bin/bash\necho "${VARIABLE} $TRAIN_LAUNCHER"\n')
    (folder / "slipway").chmod(0o755)
    done = subprocess.run(
        ["launch/torchrun.sh", "4", "8", "0", "node1"],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torchrun_script_restarts_lost_processes_as_often_as_the_docs_say(
    tmp_path: Path,
) -> None:
    (documented,) = set(re.findall(r"--max-restarts=\d+", SCALING))
    assert f"export {VARIABLE}=1\n" in SCALING
    assert _launcher(tmp_path) == (
        "1 torchrun --nnodes=4 --nproc-per-node=8 --node-rank=0 --master-addr=node1 "
        f"--master-port=29500 --rdzv-conf=timeout=86400 {documented} --no-python\n"
    )


def test_max_restarts_changes_how_often_the_torchrun_script_restarts(tmp_path: Path) -> None:
    assert " --max-restarts=0 --no-python" in _launcher(tmp_path, MAX_RESTARTS="0")
