"""Measures the memory of real steps of a small transformer that two processes divide.

`torchrun --nproc_per_node 2 -m tests.planning.measured_shards STRATEGY WIDTH LAYERS ROWS`
prints as JSON, on rank 0, the bytes that torch's profiler saw allocated at the peak, and the
plan's.
"""

import json
import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from slipway.planning.memory_plan import device_memory, trace_all
from slipway.training.distributed.shards import local
from slipway.training.distributed.tensor_parallel import share_layers
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.recipe.losses import RowLosses
from slipway.training.recipe.optimizers import optimizer_and_schedule
from tests.planning.measured_step import peak_of_events
from tests.project_params import PROJECT
from tests.training.networks.test_text_networks import network


def measure(strategy: str, width: int, num_layers: int, rows: int) -> dict[str, int]:
    """Return predicted and allocated bytes of one of two processes."""
    built = network(
        "small_transformer", width=width, num_layers=num_layers, num_heads=4, patch=4, dropout=0.0
    )
    traces = trace_all(built, PROJECT.train, rows, accumulates=False, world_size=2)
    predicted = device_memory(traces, strategy, "32-true", 2, on_gpu=False)
    if strategy == "tensor_parallel":
        share_layers(built, init_device_mesh("cpu", (2,)))
    else:
        for module in (*parallel_blocks(built), built):
            fully_shard(module, reshard_after_forward=True)
    optimizer: Any = optimizer_and_schedule(built, PROJECT.train, 1)["optimizer"]
    losses = RowLosses(built, PROJECT.train)
    texts = torch.randint(1, 200, (rows, 64), dtype=torch.uint8)
    targets = torch.zeros(rows, dtype=torch.int64)

    def step() -> None:
        loss = losses(built(texts), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    parts = [local(weight) for weight in built.parameters()]
    held = sum(4 * part.nbytes for part in parts)  # weight, old gradient and two moments
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return {"predicted": predicted.total, "allocated": held + peak_of_events(profiler)}


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    found = measure(sys.argv[1], *map(int, sys.argv[2:]))
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()
