"""Tests of loss spikes: how they are found, skipped, or undone by going back to a checkpoint."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.data.store import packed
from slipway.system.errors import ParamsError, TrainingError
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.module import TrainingModule
from slipway.training.recipe.loss_spikes import LossWindow
from tests.project_params import PROJECT
from tests.training.conftest import write_project
from tests.training.forked_runs import run_forked
from tests.training.real_runs import weights_digest
from tests.training.recipe.test_nonfinite import SPLIT, _fit, _module, _spoiled

USUAL = [0.7 + 0.1 * (-1) ** number for number in range(128)]  # mean 0.7, deviation 0.1


def test_a_loss_spike_lies_more_than_six_deviations_above_the_mean() -> None:
    window = LossWindow(USUAL)
    assert window.describe_spike(1.29) is None
    assert window.describe_spike(0.0) is None
    assert window.describe_spike(1.31) == (
        "more than 6 standard deviations above the mean 0.7 of the last"
    )


def test_a_nonfinite_loss_does_not_count_as_a_loss_spike() -> None:
    assert LossWindow(USUAL).describe_spike(np.inf) is None
    assert LossWindow(USUAL).describe_spike(np.nan) is None


def test_no_step_is_a_spike_before_there_are_128_losses() -> None:
    window = LossWindow(USUAL[:127])
    assert window.describe_spike(1e9) is None
    window.add(0.6)
    assert window.describe_spike(1e9)


def test_only_the_last_128_losses_decide_if_a_step_is_a_spike() -> None:
    window = LossWindow([1e6, *USUAL])
    assert window.values() == USUAL
    window.add(0.5)
    assert window.values() == [*USUAL[1:], 0.5]


def _spiking(**changes: Any) -> tuple[TrainingModule, packed.PackedSplit]:
    """Return a module whose second step has a row with a weight that multiplies its loss."""
    split = _spoiled(1, weight=1000.0)
    module = _module(split, **changes)
    module.on_load_checkpoint({"guard": {"num_skipped": 0, "losses": USUAL}})
    return module, split


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_skipped_loss_spike_changes_no_weights_and_is_counted(accumulated: int) -> None:
    module, split = _spiking(on_loss_spike="skip")
    changed, trainer = _fit(module, split, accumulated)
    assert module.nonfinite_guard.num_skipped == 1
    assert trainer.global_step == 3
    assert accumulated > 1 or changed == [True, False, True]
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["guard"]["losses"][:-2] == USUAL[2:]
    assert max(checkpoint["guard"]["losses"]) < 10


def test_a_loss_spike_is_applied_if_on_loss_spike_is_null() -> None:
    module, split = _spiking(on_loss_spike=None)
    assert _fit(module, split)[0] == [True, True, True]


def test_spikes_beyond_max_skipped_steps_end_the_training_with_their_rows() -> None:
    module, split = _spiking(on_loss_spike="skip", max_skipped_steps=0)
    with pytest.raises(
        TrainingError,
        match=r"the loss .* of step 2 \(epoch 1\) is more than 6 standard .* of the last 128 steps;"
        r" the ids of its rows are .*has skipped 1 steps, expected at most 0",
    ):
        _fit(module, split)


def test_the_spike_check_changes_no_bit_of_a_training_without_spikes() -> None:
    plain, checked = _module(), _module(on_loss_spike="skip")
    for module in (plain, checked):
        _fit(module, SPLIT)
    weights = (module.network.state_dict().values() for module in (plain, checked))
    assert all((one == other).all() for one, other in zip(*weights, strict=True))


def test_a_pipeline_refuses_skipping_loss_spikes() -> None:
    params = PROJECT.train.model_copy(
        update={"on_loss_spike": "skip", "strategy": "pipeline", "precision": "32-true"}
    )
    placement = place(params, TrainingHost(num_gpus=0, has_bfloat16=False, launch=None))
    with pytest.raises(ParamsError, match=r"'skip', but strategy 'pipeline' knows .*Use null"):
        check_execution(params, placement, "text_classification")


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "tensor_parallel", "pipeline"])
def test_rewinding_is_refused_for_strategies_that_divide_the_state(strategy: str) -> None:
    params = PROJECT.train.model_copy(
        update={"on_loss_spike": "rewind", "strategy": strategy, "precision": "32-true"}
    )
    placement = place(params, TrainingHost(num_gpus=0, has_bfloat16=False, launch=None))
    remedy = "null" if strategy == "pipeline" else "'skip'"
    with pytest.raises(ParamsError, match=rf"rewind.*{strategy}.*Use {remedy}"):
        check_execution(params, placement, "image_classification")


def call_steps_spikes(first: int, last: int) -> None:
    """Make the window report the steps `first` to `last` (counted from 1) as spikes."""
    from slipway.training.recipe import loss_spikes

    def described(self: LossWindow, loss: float) -> str | None:
        steps = getattr(self, "steps", 0) + 1
        self.steps = steps  # type: ignore[attr-defined]
        return "planted among the last" if first <= steps <= last else None

    loss_spikes.LossWindow.describe_spike = described  # type: ignore[method-assign]


@pytest.mark.process
def test_rewinding_after_a_loss_spike_equals_skipping_the_steps_since_the_checkpoint(
    tmp_path: Path,
) -> None:
    settings = {
        "epochs": 2,
        "ema_decay": 0.9,
        "checkpoint_every_epochs": 1,
        "checkpoint_every_minutes": None,
    }
    results = []
    for kind, first in (("rewind", 7), ("skip", 5)):
        project = write_project(tmp_path / kind, **settings, on_loss_spike=kind)
        code, output = run_forked(project, call_steps_spikes, first, 7)
        assert code == 0, output
        assert ("steps 5 to 7 are left out" in output) == (kind == "rewind")
        assert output.count("skipped   the loss") == 8 - first
        results.append(weights_digest(project))
    assert results[0] == results[1]


def spike_on_rank_1(step: int, folder: Path) -> None:
    """Multiply the losses of rank 1 in `step` (counted from 1), and record what each rank judges.

    The window has 8 losses, because a small project has fewer than 128 steps.
    """
    from slipway.training.recipe import loss_spikes

    loss_spikes.WINDOW = 8
    row_losses, describe = TrainingModule._row_losses, LossWindow.describe_spike

    def spoiled(self: TrainingModule, *arguments: Any) -> Any:
        is_spoiled = (self.global_rank, self.global_step) == (1, step - 1)
        return row_losses(self, *arguments) * (1000.0 if is_spoiled else 1.0)

    def recorded(self: LossWindow, loss: float) -> str | None:
        found = describe(self, loss)
        with open(folder / f"rank {os.environ.get('LOCAL_RANK', '0')}", "a") as file:
            file.write(f"{loss!r} {found}\n")
        return found

    TrainingModule._row_losses = spoiled  # type: ignore[assignment, method-assign]
    LossWindow.describe_spike = recorded  # type: ignore[method-assign]


@pytest.mark.nightly(seconds=60)
def test_a_loss_spike_in_the_rows_of_one_process_is_found_by_both_processes_alike(
    tmp_path: Path,
) -> None:
    # 4 steps an epoch; processes compare their weights in every third step.
    project = write_project(
        tmp_path, epochs=3, devices=2, on_loss_spike="rewind", repeat_every_steps=3
    )
    code, output = run_forked(project, spike_on_rank_1, 11, tmp_path)
    assert code == 0, output
    assert output.count("skipped   the loss") == 1
    assert "of step 11 (epoch 3) is more than 6 standard deviations above the mean" in output
    assert "steps 9 to 11 are left out" in output
    first, second = ((tmp_path / f"rank {rank}").read_text().splitlines() for rank in (0, 1))
    assert first == second
    assert [place for place, line in enumerate(first) if not line.endswith("None")] == [10]
