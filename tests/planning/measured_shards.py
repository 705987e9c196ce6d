"""Measures the memory of real steps of a small transformer that two processes divide.

With more processes, each two of them share a copy, except with `fsdp`; with `fsdp+shared` they do,
and FSDP2 divides their parts over the copies. With `ddp` each process has the whole transformer.
`torchrun --nproc_per_node 2 -m tests.planning.measured_shards STRATEGY WIDTH,LAYERS,ROWS ...`
prints for each shape, as a line of JSON on rank 0, the bytes that torch's profiler saw allocated at
the peak, the plan's, and the number of weights. With ZeRO-3 it also prints the largest number of
weights that a process held at a time, besides its part.
"""

import gc
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from slipway.planning.memory_plan import device_memory, trace_all
from slipway.training.distributed.collectives import gather_objects
from slipway.training.distributed.divided import average_gradients
from slipway.training.distributed.fully_sharded import FullyShardedStrategy
from slipway.training.distributed.pipeline import Stage, empty_weight
from slipway.training.distributed.shards import local
from slipway.training.distributed.tensor_parallel import share_layers
from slipway.training.distributed.zero_sizes import largest_block, zero_sizes
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses
from slipway.training.recipe.optimizers import optimizer_and_schedule
from tests.planning.measured_step import peak_of_events
from tests.project_params import PROJECT
from tests.training.distributed.divided_twice import divide
from tests.training.networks.test_text_networks import network

NUM_MICRO_BATCHES = 2  # of a pipeline


def measure(strategy: str, width: int, num_layers: int, rows: int) -> dict[str, int]:
    """Return predicted and allocated bytes of the process that takes most."""
    world_size = distributed.get_world_size()
    names = "data_parallel", "tensor_parallel"
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=names)
    shares = strategy in ("tensor_parallel", "pipeline", "fsdp+shared")
    built = network(
        "small_transformer", width=width, num_layers=num_layers, num_heads=4, patch=4, dropout=0.0
    )
    traces = trace_all(
        built,
        PROJECT.train,
        rows,
        accumulates=False,
        update="singly",
        model_parallel=2 if shares else 1,
        num_micro_batches=NUM_MICRO_BATCHES if strategy == "pipeline" else 0,
    )
    predicted = device_memory(
        traces,
        strategy.removesuffix("+shared"),
        "32-true",
        world_size,
        model_parallel=2 if shares else 1,
    )
    num_weights = built.num_parameters
    losses = RowLosses(built, PROJECT.train)
    texts = torch.randint(1, 200, (rows, 64), dtype=torch.uint8)
    targets = torch.zeros(rows, dtype=torch.int64)
    answer: Any = built

    def gradients() -> None:
        loss = losses(answer(texts), targets).mean()
        built.zero_grad()
        loss.backward()

    if strategy == "deepspeed_stage_3":
        return {"predicted": predicted.total, **_zero(built, texts, targets, losses)}
    if strategy == "pipeline":
        gradients = _pipeline(built, texts, targets, losses, mesh["tensor_parallel"])
    elif strategy == "tensor_parallel":
        share_layers(built, mesh["tensor_parallel"])
    elif strategy == "fsdp+shared":
        divide(built, FullyShardedStrategy(world_size // 2, 2, None), mesh)
    elif strategy == "fsdp":
        for module in (*parallel_blocks(built), built):
            fully_shard(module, reshard_after_forward=True)
    optimizer: Any = optimizer_and_schedule(built, PROJECT.train, 1)["optimizer"]

    def step() -> None:
        gradients()
        if world_size > 2 and strategy in ("tensor_parallel", "pipeline"):
            average_gradients(built, mesh["data_parallel"])
        optimizer.step()

    step()
    parts = [local(weight) for weight in built.parameters()]
    held = sum(3 * part.nbytes for part in parts)  # weight and two moments
    built.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # The gradients of the step before: the profiler misses the end of one made outside.
        for weight in built.parameters():
            weight.grad = torch.zeros_like(weight)
        if strategy == "ddp":  # so that the profiler sees its buckets
            # Not its first message with all weights: a thread of gloo frees it, see below.
            answer = DistributedDataParallel(built, broadcast_buffers=False, init_sync=False)
        # Only one step: it also misses that a thread of gloo frees a buffer.
        step()
    allocated = max(gather_objects(held + peak_of_events(profiler)))
    return {"predicted": predicted.total, "allocated": allocated, "weights": num_weights}


def _zero(built: Network, texts: Tensor, targets: Tensor, losses: RowLosses) -> dict[str, int]:
    """Measure a step of ZeRO-3, with the sizes that a training gives it."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no compiler
    num_parameters = built.num_parameters
    sizes = zero_sizes(num_parameters, largest_block(built))
    engine, *_ = deepspeed.initialize(
        model=built,
        optimizer=optimizer_and_schedule(built, PROJECT.train, 1)["optimizer"],
        config={
            "train_micro_batch_size_per_gpu": len(texts),
            "zero_optimization": {"stage": 3, **sizes.settings(3)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    gathered = 0

    def count(*_: Any) -> None:
        nonlocal gathered
        gathered = max(gathered, sum(weight.numel() for weight in built.parameters()))

    for module in built.modules():
        module.register_forward_hook(count)
        module.register_full_backward_pre_hook(count)

    def step() -> None:
        engine.backward(losses(engine(texts), targets).mean())
        engine.step()

    for _ in range(3):  # DeepSpeed gathers ahead once it has seen two steps
        step()
    held = _live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocated = max(gather_objects(held + peak_of_events(profiler)))
    return {"allocated": allocated, "gathered": gathered, "weights": num_parameters}


def _live_bytes() -> int:
    """Return the bytes of all tensors of this process, without those of mapped files."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _pipeline(
    built: Network, texts: Tensor, targets: Tensor, losses: RowLosses, mesh: DeviceMesh
) -> Any:
    """Keep this process's stage; return a function that makes the gradients of a step."""
    rank = mesh.get_local_rank()
    stage = Stage(built, rank, 2)
    for name, weight in built.named_parameters():
        if name not in stage.own_names:
            empty_weight(weight)
    examples = stage.examples(len(texts) // NUM_MICRO_BATCHES)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, 2, torch.device("cpu"), *examples, group=mesh.get_group()),
        NUM_MICRO_BATCHES,
        lambda answers, own: losses(answers, own).mean(),
    )

    def gradients() -> None:
        built.zero_grad()
        target = targets if rank == 1 else None
        rows = (texts,) if rank == 0 else ()
        schedule.step(*rows, target=target, return_outputs=False, rows=texts)

    return gradients


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for text in sys.argv[2:]:
        found = measure(sys.argv[1], *map(int, text.split(",")))
        if distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
        gc.collect()
    distributed.destroy_process_group()
