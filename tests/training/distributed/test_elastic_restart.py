"""If torchrun loses a process, all processes restart and end with the same weights."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import write_project
from tests.training.forked_runs import _named
from tests.training.real_runs import TORCHRUN, run_command, weights_digest
from tests.training.text_projects import write_text_project

RUN = "tests.training.forked_runs"


def lose_rank_once(marker: Path) -> None:
    """Kill rank 1 after its third checkpoint, unless the file `marker` records an earlier kill."""
    from slipway.training.checkpoints.checkpoints import CheckpointStore

    if os.environ.get("RANK") != "1" or marker.exists():
        return
    write, seen = CheckpointStore.write, []

    def counted(self: CheckpointStore, *arguments: object) -> None:
        write(self, *arguments)  # type: ignore[arg-type]
        seen.append(1)
        if len(seen) == 3:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore.write = counted  # type: ignore[assignment, method-assign]


@pytest.mark.nightly(seconds=90)
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "deepspeed_stage_3", "tensor_parallel", "pipeline"]
)
def test_torchrun_restarts_a_lost_process_and_the_training_ends_with_the_same_weights(
    tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = {
        "epochs": 2,
        "strategy": strategy,
        "devices": 2,
        "checkpoint_every_minutes": 1e-9,
    }
    write: Callable[..., Path] = write_project
    if strategy in ("tensor_parallel", "pipeline"):  # they divide only transformers
        write, settings["batch_size"] = write_text_project, 16
    whole, restarted = (write(tmp_path / name, **settings) for name in ("whole", "lost"))
    assert run_command(whole, TORCHRUN).returncode == 0
    marker = tmp_path / "lost once"
    prepared = json.dumps([lose_rank_once, marker], default=_named)
    *launcher, _ = TORCHRUN
    # Otherwise torch 2.14 gives the new processes the addresses of the old ones.
    new_store = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    command = [*new_store, *launcher[:-1], "--max-restarts=1", "-m", RUN, prepared]
    done = run_command(restarted, command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert marker.exists()
    assert "resumed   after epoch 0 and 3 steps of the next" in done.stdout
    assert weights_digest(restarted) == weights_digest(whole)
