"""The memory of a step, traced on tensors without content."""

import pytest

from slipway.planning.step_memory import step_flop, trace_step
from slipway.training.networks.blocks import parallel_blocks
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
