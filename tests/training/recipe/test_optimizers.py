"""Tests of weight decay, optimizers and learning-rate schedules."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slipway.training.distributed.shards import load_optimizer
from slipway.training.networks.networks import build_network
from slipway.training.recipe.optimizers import learning_rate_schedule, optimizer_and_schedule
from tests.project_params import PROJECT
from tests.training.conftest import spec


def _shares(num_steps: int, steps_per_epoch: int, **changes: Any) -> list[float]:
    share = learning_rate_schedule(PROJECT.train.model_copy(update=changes), steps_per_epoch)
    return [share(step) for step in range(num_steps)]


def _optimizer(fused: bool = False, **changes: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    found = optimizer_and_schedule(
        build_network(spec()), PROJECT.train.model_copy(update=changes), 5, fused=fused
    )["optimizer"]
    assert isinstance(found, torch.optim.Optimizer)
    return found


def test_the_cosine_schedule_rises_linearly_and_falls_along_a_cosine() -> None:
    shares = _shares(104, 4, warmup_epochs=1.0, epochs=26)
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[54] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in itertools.pairwise(shares[4:]))
    assert 0 < shares[-1] < 0.001


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_a_schedule_without_warm_up_starts_at_its_peak(schedule: str) -> None:
    assert _shares(
        1, 10, warmup_epochs=0.0, epochs=1, schedule=schedule, step_epochs=1, step_factor=0.5
    ) == [1.0]


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", "step", "constant"])
def test_a_learning_rate_schedule_keeps_its_last_value_after_the_last_step(schedule: str) -> None:
    shares = _shares(
        500, 4, warmup_epochs=1.0, epochs=26, schedule=schedule, step_epochs=5, step_factor=0.5
    )
    assert set(shares[104:]) == {shares[103]}


def test_the_one_cycle_schedule_equals_that_of_torch() -> None:
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        _sgd(), max_lr=1.0, total_steps=100, pct_start=0.3, cycle_momentum=False
    )
    expected = []
    for _ in range(100):
        expected.append(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()
    assert _shares(100, 10, warmup_epochs=3.0, epochs=10, schedule="one_cycle") == pytest.approx(
        expected
    )


def test_the_step_schedule_multiplies_the_learning_rate_at_the_requested_epochs() -> None:
    settings = {
        "warmup_epochs": 0.5,
        "epochs": 6,
        "schedule": "step",
        "step_epochs": 2,
        "step_factor": 0.1,
    }
    assert _shares(12, 2, **settings) == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)


def test_the_constant_schedule_stays_at_the_peak_after_warm_up() -> None:
    assert _shares(6, 2, warmup_epochs=1.0, epochs=3, schedule="constant") == [
        0.5,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ]


def test_weight_decay_skips_only_norms_and_biases() -> None:
    network = build_network(spec())
    optimizer: Any = optimizer_and_schedule(
        network, PROJECT.train.model_copy(update={"weight_decay": 0.3}), 5
    )["optimizer"]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decay = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    norms = (torch.nn.BatchNorm2d, torch.nn.GroupNorm)
    spared = {
        f"{place}.{name}"
        for place, module in network.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, norms) or name == "bias"
    }
    assert any("weight" in name for name in spared)  # of a norm
    assert decay == {name: 0.0 if name in spared else 0.3 for name in names.values()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_sgd_optimizer_has_the_requested_momentum(nesterov: bool) -> None:
    optimizer = _optimizer(optimizer="sgd", momentum=0.7, nesterov=nesterov)
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {
        (0.7, nesterov)
    }


def test_the_adamw_optimizer_is_torchs_adamw() -> None:
    assert isinstance(_optimizer(), torch.optim.AdamW)


def _steps(optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    """Step with gradients that depend on the weights; return the weights."""
    weights: list[torch.Tensor] = [
        weight for group in optimizer.param_groups for weight in group["params"]
    ]
    for _ in range(count):
        for weight in weights:
            weight.grad = (weight.detach() * 7).sin()
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("was_fused", [False, True])
def test_a_fused_optimizer_resumes_from_and_into_one_that_is_not(
    changes: dict[str, Any], was_fused: bool
) -> None:
    plain, first, second = (
        _optimizer(fused, **changes) for fused in (False, was_fused, not was_fused)
    )
    expected = _steps(plain, 10)
    for weight, found in zip(_steps(second, 0), _steps(first, 4), strict=True):
        weight.copy_(found)
    second.load_state_dict({**second.state_dict(), "state": first.state_dict()["state"]})
    assert {bool(group["fused"]) for group in second.param_groups} == {not was_fused}
    for found, value in zip(_steps(second, 6), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_a_restored_state_has_the_memory_layout_of_its_weight() -> None:
    # A fused kernel on the CPU pairs weights and states in the order of memory.
    torch.manual_seed(1)
    plain = torch.nn.Parameter(torch.randn(4, 3, 2, 2))
    last = torch.nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    saved = torch.optim.AdamW([plain], lr=0.1)
    _steps(saved, 3)
    fused = torch.optim.AdamW([last], lr=0.1, fused=True)
    last.data.copy_(plain.data)
    load_optimizer(fused, copy.deepcopy(saved.state_dict()))
    _steps(saved, 2)
    assert fused.state[last]["exp_avg"].stride() == last.stride() != plain.stride()
    (found,) = _steps(fused, 2)
    torch.testing.assert_close(found, plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_divided_weights_beside_whole_ones_are_updated_one_by_one(
    optimizer: str, tmp_path: Path
) -> None:
    network = build_network(spec())
    params = PROJECT.train.model_copy(update={"optimizer": optimizer})
    assert optimizer_and_schedule(network, params, 5)["optimizer"].defaults["foreach"] is None
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        head = network.get_submodule("backbone.head")
        weight = distribute_tensor(
            network.get_parameter("backbone.head.weight").detach(), mesh, [Shard(0)]
        )
        head.register_parameter("weight", torch.nn.Parameter(weight))
        chosen = optimizer_and_schedule(network, params, 5)["optimizer"]
        assert chosen.defaults["foreach"] is False
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        chosen.step()
        for group in chosen.param_groups:
            group["foreach"] = True  # torch's choice on a GPU
        with pytest.raises(RuntimeError, match="mixed"):
            chosen.step()
    finally:
        distributed.destroy_process_group()


def test_a_fused_optimizer_changes_no_weight_without_a_gradient() -> None:
    optimizer = _optimizer(fused=True)
    before = [weight.clone() for weight in _steps(optimizer, 1)]
    state = {key: value.clone() for key, value in next(iter(optimizer.state.values())).items()}
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert all(map(torch.equal, before, _steps(optimizer, 0)))
    after = next(iter(optimizer.state.values()))
    assert all(torch.equal(value, after[key]) for key, value in state.items())


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
