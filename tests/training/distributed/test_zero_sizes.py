import pytest

from slipway.training.distributed.zero_sizes import largest_block, zero_sizes
from slipway.training.networks.blocks import parallel_blocks
from tests.training.networks.test_text_networks import network

pytestmark = pytest.mark.unit
MILLION = 10**6


def test_zero_handles_about_a_block_of_the_network_at_once() -> None:
    sizes = zero_sizes(361 * MILLION, 13 * MILLION)
    assert set(sizes) == {13 * MILLION, 2 * 13 * MILLION}
    assert set(sizes.settings(1)) == {"reduce_bucket_size"}
    assert sizes.settings(3)["sub_group_size"] == 13 * MILLION


def test_small_blocks_are_handled_together_and_a_small_network_at_once() -> None:
    assert zero_sizes(100 * MILLION, MILLION).bucket == 8 * MILLION
    assert set(zero_sizes(MILLION, 10)) == {MILLION, 2 * MILLION}


def test_huge_blocks_do_not_exceed_the_defaults_of_deepspeed_and_lightning() -> None:
    sizes = zero_sizes(10**12, 10**10)
    assert sizes.bucket == 200 * MILLION
    assert sizes.prefetched == 50 * MILLION
    assert sizes.live == sizes.updated == 10**9


def test_weights_outside_the_blocks_count_as_a_block_if_they_are_more() -> None:
    wide = network("small_transformer", width=32, num_layers=2, num_heads=2, patch=16)
    inside = [
        sum(weight.numel() for weight in block.parameters()) for block in parallel_blocks(wide)
    ]
    assert largest_block(wide) == wide.num_parameters - sum(inside) > max(inside)
    deep = network("small_transformer", width=64, num_layers=2, num_heads=2, patch=1)
    assert largest_block(deep) == sum(
        weight.numel() for weight in parallel_blocks(deep)[0].parameters()
    )
