"""Tests of the strategy `tensor_parallel` on two processes: equal loss, kills, other strategies."""

from pathlib import Path

import pytest

from tests.training.distributed.divided_cases import (
    require_losses_of_one_process,
    require_resumption_by_each_strategy,
    require_same_weights_after_a_kill,
)
from tests.training.real_runs import run_training
from tests.training.text_projects import write_text_project

pytestmark = pytest.mark.process


@pytest.mark.parametrize("num_steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_each_tensor_parallel_step_has_the_same_loss_as_on_one_process(
    tmp_path: Path, num_steps: int
) -> None:
    require_losses_of_one_process(tmp_path, "tensor_parallel", num_steps)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_tensor_parallel_training_resumes_to_the_same_weights(
    tmp_path: Path, precision: str
) -> None:
    # 4 steps of two accumulated batches an epoch; each rank has to draw the same dropout.
    require_same_weights_after_a_kill(
        tmp_path, "tensor_parallel", precision, max_batch_per_device=8
    )


@pytest.mark.nightly(seconds=90)
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "tensor_parallel", "fsdp", "tensor_parallel"],
        ["tensor_parallel", "deepspeed_stage_3", "tensor_parallel", "ddp"],
    ],
    ids=" ".join,
)
def test_tensor_parallel_and_other_strategies_resume_each_others_checkpoints(
    tmp_path: Path, strategies: list[str]
) -> None:
    require_resumption_by_each_strategy(tmp_path, strategies)


def test_a_number_of_processes_that_does_not_divide_the_heads_is_refused_before_a_step(
    tmp_path: Path,
) -> None:
    project = write_text_project(tmp_path, strategy="tensor_parallel", devices=3)
    refused = run_training(project)
    assert refused.returncode == 1
    assert "3 processes cannot equally share the 4 heads" in refused.stderr
    assert "Use 2 or 4 processes" in refused.stderr
    assert not list((project / ".work/train").glob("*/step-*"))
