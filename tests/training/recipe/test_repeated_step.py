"""A repeated step must give equal bits; otherwise the training ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from slipway.system.errors import ParamsError, TrainingError
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.recipe.repeated_step import check_equal_bits, check_equal_weights
from tests import warm_starts
from tests.project_params import PROJECT
from tests.training.conftest import ROOT
from tests.training.real_runs import environment
from tests.training.recipe.test_nonfinite import _fit, _module


class _Drifting(nn.Module):
    """A layer whose weight appears to change slightly from the second call on."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls, self._error = 0, error

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        self.calls += 1
        wrong = self._error if self.num_calls > 1 else 0.0
        answers: Tensor = self.dropout(self.layer(inputs))
        return answers + wrong * self.layer.weight[0, 0]


def _check(network: nn.Module) -> None:
    def mean_loss() -> Tensor:
        torch.manual_seed(1)
        answers: Tensor = network(torch.ones(2, 4))
        return answers.square().mean()

    check_equal_bits(network, mean_loss, "step 40 (epoch 2)")


def test_a_repeated_step_with_equal_results_passes_and_changes_nothing() -> None:
    network = _Drifting(error=0.0)
    _check(network)
    assert network.num_calls == 2
    assert network.get_buffer("calls") == 0
    assert network.layer.weight.grad is None


def test_a_repeated_step_with_different_bits_ends_the_training() -> None:
    with pytest.raises(
        TrainingError,
        match=r"step 40 \(epoch 2\), repeated on .*, gave other bits: the .* differs in .* of .* "
        r"numbers, expected none\. No weight was changed",
    ):
        _check(_Drifting(error=1e-3))


def test_a_loss_that_is_nan_twice_has_equal_bits() -> None:
    network = _Drifting(error=0.0)
    nn.init.constant_(network.layer.weight, torch.nan)
    _check(network)


def test_half_precision_repeats_its_casts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _check(_Drifting(error=0.0))


def test_a_single_process_has_no_other_weights() -> None:
    check_equal_weights(_Drifting(error=0.0), "step 1 (epoch 1)")


@pytest.mark.process
def test_a_rank_whose_weights_differ_by_one_bit_is_named_on_every_rank(tmp_path: Path) -> None:
    module, variables = "tests.training.recipe.test_repeated_step", environment()
    ranks = [
        warm_starts.start(
            [module, str(tmp_path / "store"), rank], ROOT, variables, subprocess.STDOUT
        )
        for rank in ("0", "1")
    ]
    for rank in ranks:
        with rank:
            assert rank.stdout
            said = rank.stdout.read()
            assert rank.wait(120) == 0, said
            assert said.startswith(
                "equal weights pass\nbefore step 2 (epoch 1) the weights of rank 1 on "
            )
            assert " differ from those of the other ranks, expected equal bits. No weight" in said


def main(store: str, rank: int) -> None:
    """Compare equal weights, and then weights of which rank 1 changes one bit; print the error."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    network = nn.Linear(4, 3)
    nn.init.constant_(network.weight, 0.5)
    nn.init.zeros_(network.bias)
    check_equal_weights(network, "step 1 (epoch 1)")
    print("equal weights pass")
    if rank == 1:
        network.weight.data.view(torch.int32)[2, 1] ^= 1
    try:
        check_equal_weights(network, "step 2 (epoch 1)")
    except TrainingError as error:
        print(error)
    distributed.destroy_process_group()


def test_repeated_steps_change_no_bit_of_the_training() -> None:
    plain, repeating = _module(), _module(repeat_every_steps=2)
    for module in (plain, repeating):
        _fit(module)
    weights = (module.network.state_dict().values() for module in (plain, repeating))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", "tensor_parallel", "pipeline"])
def test_divided_weights_cannot_be_repeated(strategy: str) -> None:
    params = PROJECT.train.model_copy(
        update={"repeat_every_steps": 10, "strategy": strategy, "precision": "32-true"}
    )
    placement = place(params, TrainingHost(num_gpus=0, has_bfloat16=False, launch=None))
    with pytest.raises(ParamsError, match=rf"repeat_every_steps is 10, but {strategy}.*Use null"):
        check_execution(params, placement, "image_classification")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
