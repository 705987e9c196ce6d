"""The memory of a step, traced on tensors without content."""

from typing import Literal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slipway.planning.memory_plan import whole_step
from slipway.planning.step_memory import step_flop, trace_step
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.recipe.optimizers import Update, optimizer_and_schedule
from tests.planning.measured_step import peak_of_events
from tests.project_params import PROJECT
from tests.training.networks.test_text_networks import TOKENS, network

pytestmark = pytest.mark.unit


@pytest.mark.process
def test_a_step_on_texts_is_traced_at_their_whole_length() -> None:
    traced = [
        trace_step(network("small_transformer", TOKENS, patch=1), PROJECT.train, rows)
        for rows in (2, 4)
    ]
    assert traced[1].activations > 1.5 * traced[0].activations
    assert traced[1].parameters == traced[0].parameters


def test_a_transformer_step_counts_six_operations_per_weight_and_position() -> None:
    built = network("small_transformer", width=64, num_layers=4, num_heads=2)
    weights = sum(value.numel() for block in parallel_blocks(built) for value in block.parameters())
    positions = 17  # 64 bytes in patches of 4, and the first one
    assert step_flop(built, PROJECT.train, 8) == pytest.approx(6 * weights * 8 * positions, rel=0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("update", ["fused", "singly", "together"])
def test_the_temporary_results_of_an_update_are_those_that_torch_allocates(
    update: Update, optimizer: Literal["adamw", "sgd"]
) -> None:
    params = PROJECT.train.model_copy(update={"optimizer": optimizer, "momentum": 0.9})
    built = network("small_transformer", width=64, num_layers=2, num_heads=2)
    planned = trace_step(built, params, 1, update=update)
    gradients = [torch.ones_like(weight) for weight in built.parameters()]
    stepped = optimizer_and_schedule(built, params, 1, fused=update == "fused")["optimizer"]
    for weight, gradient in zip(built.parameters(), gradients, strict=True):
        weight.grad = gradient
    for group in stepped.param_groups:
        group["foreach"] = update == "together"
    stepped.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepped.step()
    temporary = planned.update - sum(gradient.nbytes for gradient in gradients)
    allocated = peak_of_events(profiler, with_scratch=True)
    assert temporary == pytest.approx(allocated, rel=0.05, abs=5000)
    largest = max(weight.nbytes for weight in built.parameters())
    assert temporary >= (largest if update != "fused" else 0)


def test_an_update_that_takes_more_than_the_activations_is_the_peak() -> None:
    built = network("small_transformer", width=64, num_layers=4, num_heads=2)
    few, many = (trace_step(built, PROJECT.train, rows, update="together") for rows in (1, 64))
    assert few.update == many.update
    assert few.gradients + few.activations < few.update < many.gradients + many.activations
    assert few.peak == few.parameters + few.optimizer + few.buffers + few.update
    assert whole_step(few).total == few.peak
