"""Sizes of the buffers and gathered weights of ZeRO, from those of the network.

DeepSpeed's defaults are constants for networks of billions of weights: up to 1e9 gathered weights,
an update of 1e9 at once, buckets of 2e8 to 5e8 gradients. With them a process holds all of a
smaller network for a part of each step.
"""

from typing import NamedTuple

from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network

# Smaller messages and updates are slow, and as much memory does not matter.
_LEAST = 8_000_000
_MAX_BUCKET = 200_000_000  # Lightning's default
_MAX_PREFETCHED = 50_000_000  # DeepSpeed's defaults from here on
_MAX_LIVE = 1_000_000_000
_MAX_UPDATED = 1_000_000_000


class ZeroSizes(NamedTuple):
    """Numbers of weights or gradients that a process handles at once."""

    bucket: int  # gradients that are averaged together
    prefetched: int  # stage 3: weights that are gathered before they are needed
    live: int  # stage 3: gathered weights beyond which none are gathered ahead
    updated: int  # stage 3: weights of this process that the optimizer updates together

    def settings(self, stage: int) -> dict[str, int]:
        """Return DeepSpeed's settings for a stage."""
        if stage < 3:
            return {"reduce_bucket_size": self.bucket}
        return {
            "reduce_bucket_size": self.bucket,
            "stage3_prefetch_bucket_size": self.prefetched,
            "stage3_max_live_parameters": self.live,
            "stage3_max_reuse_distance": self.prefetched,
            "stage3_model_persistence_threshold": self.prefetched,
            "sub_group_size": self.updated,
        }


def zero_sizes(num_parameters: int, block: int) -> ZeroSizes:
    """Return the sizes for a network whose largest block has `block` weights."""
    size = min(num_parameters, max(block, _LEAST))
    return ZeroSizes(
        bucket=min(size, _MAX_BUCKET),
        prefetched=min(size, _MAX_PREFETCHED),
        live=min(2 * size, _MAX_LIVE),
        updated=min(size, _MAX_UPDATED),
    )


def largest_block(network: Network) -> int:
    """Return the number of weights of the largest block, or of those outside all blocks."""
    sizes = [
        sum(weight.numel() for weight in block.parameters()) for block in parallel_blocks(network)
    ]
    return max([*sizes, network.num_parameters - sum(sizes)])
