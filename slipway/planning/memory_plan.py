"""Predicts the memory that each process takes on its device, for each training strategy.

`ddp` and `single` replicate parameters, gradients and optimizer state. `fsdp` shards all three, and
gathers the weights block by block. Where processes share a copy of the network, the step is traced
on the part that one of them computes. ZeRO shards the optimizer state and float32 master
weights (stage 1), also the gradients (stage 2), also the parameters (stage 3): Rajbhandari et al.,
arXiv 1910.02054, section 5. What DeepSpeed 0.19 and Lightning 2.6 add to it (buckets, gathered
parameters) was read off running engines; `zero_sizes` limits it.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipway.config.training import Offload, TrainParams
from slipway.planning.step_memory import StepMemory, trace_step
from slipway.training.distributed.pipeline import Stage, empty_weight
from slipway.training.distributed.placement import Placement
from slipway.training.distributed.zero_sizes import largest_block, zero_sizes
from slipway.training.networks.divided_layers import can_share, narrow, narrowed
from slipway.training.networks.networks import Network
from slipway.training.recipe.optimizers import Update

STRATEGIES = (
    "single",
    "ddp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "fsdp",
    "tensor_parallel",
    "pipeline",
)
_HALF = torch.bfloat16  # stands for both half precisions
_MASTER_BYTES = 4  # size of a float32 master weight; DeepSpeed has them for float32 weights, too
# Block-sized buffers in a backward pass of FSDP2. Weights: the present block, the next block, and
# the buffer that receives it. Gradients: the present block, and the buffer that sends them.
_GATHERED_WEIGHTS, _GATHERED_GRADIENTS = 3, 2


class Traces(NamedTuple):
    """Memory of one training step in each precision."""

    full: StepMemory  # float32
    autocast: StepMemory  # float32 weights, autocast to bfloat16 or float16 (the same memory)
    cast: StepMemory  # half-precision weights, without the optimizer
    block: int = 0  # float32 bytes of the largest block, which `fsdp` gathers
    # One of the processes that share a copy of the network. None if it cannot be divided.
    shared: "Traces | None" = None
    # The largest process of `pipeline`: (float32, autocast). None without micro-batches.
    stage: tuple[StepMemory, StepMemory] | None = None
    averages: bool = False  # the weights are averaged (EMA)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that one process takes on its device."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    buckets: int  # communication buffers
    float32_gradients: int = 0  # ZeRO's copy for the update, made once the activations are freed
    update: int = 0  # temporary results of the optimizer's step, once the activations are freed
    host: int = 0  # bytes that `offload` moves to the host's memory; not part of `total`
    disk: int = 0  # bytes that `offload_path` moves to a disk; part of neither
    average: int = 0  # the average of the weights (EMA)
    # A copy of the weights, made after a step while the average is updated or validated.
    copied_weights: int = 0

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        state = self.parameters + self.gradients + self.optimizer + self.buffers + self.buckets
        after_steps = max(self.float32_gradients, self.update, self.copied_weights)
        return state + self.average + max(self.activations, after_steps)


def trace_all(
    network: Network,
    params: TrainParams,
    rows: int,
    *,
    accumulates: bool,
    update: Update,
    model_parallel: int = 1,
    num_micro_batches: int = 0,
) -> Traces:
    """Trace a step on batches of `rows` rows in each precision.

    `update` is as in `trace_step`; weights that several processes share are updated singly.
    `model_parallel` processes share a copy of the network. `num_micro_batches` is 0 unless the
    strategy is `pipeline`.
    """
    precisions = partial(_trace_precisions, network, params, rows, accumulates=accumulates)
    traces = precisions(1, update=update)
    if num_micro_batches:
        stage = partial(trace_stage, network, params, rows, num_micro_batches, model_parallel)
        traces = traces._replace(stage=(stage(None, update), stage(_HALF, update)))
    if model_parallel > 1 and can_share(network, model_parallel):
        traces = traces._replace(shared=precisions(model_parallel, update="singly"))
    return traces


def _trace_precisions(
    network: Network,
    params: TrainParams,
    rows: int,
    num_sharing: int,
    *,
    accumulates: bool,
    update: Update,
) -> Traces:
    """Trace a step of one of the `num_sharing` processes that share a copy of the network."""
    step = partial(
        trace_share, network, params, rows, num_sharing, accumulates=accumulates, update=update
    )
    own = narrowed(network, num_sharing) if num_sharing > 1 else network
    return Traces(
        full=step(None),
        autocast=step(_HALF),
        cast=step(_HALF, casts_parameters=True),
        block=4 * largest_block(own),
        averages=params.ema_decay is not None,
    )


def trace_share(
    network: Network,
    params: TrainParams,
    rows: int,
    num_processes: int,
    half: torch.dtype | None,
    *,
    accumulates: bool,
    casts_parameters: bool = False,
    update: Update = "singly",
) -> StepMemory:
    """Trace a step of one of `num_processes` processes that share a copy of the network.

    `half`, `casts_parameters` and `update` are as in `trace_step`.
    """
    return trace_step(
        network,
        params,
        rows,
        half=half,
        casts_parameters=casts_parameters,
        accumulates=accumulates,
        part=partial(narrow, num_processes=num_processes) if num_processes > 1 else None,
        update=update,
    )


def trace_stage(
    network: Network,
    params: TrainParams,
    rows: int,
    num_micro_batches: int,
    num_stages: int,
    half: torch.dtype | None,
    update: Update,
) -> StepMemory:
    """Trace a step of `rows` rows on the stage of a pipeline that takes the most memory."""
    found = []
    # One of these two takes the most: stages between them hold fewer micro-batches than the first.
    for index in {0, num_stages - 1}:
        num_held = num_stages - index  # micro-batches whose activations exist at once
        found.append(
            trace_step(
                network,
                params,
                rows // num_micro_batches,
                half=half,
                # Gradients of the first micro-batches exist while the stage computes further ones.
                accumulates=num_micro_batches > num_held,
                part=partial(keep_stage, index=index, num_stages=num_stages),
                num_forward=num_held,
                update=update,
            )
        )
    return max(found, key=lambda memory: memory.peak)


def keep_stage(network: Network, index: int, num_stages: int) -> None:
    """Let `network` compute one stage only, and empty the weights of the others."""
    stage = Stage(network, index, num_stages)
    first_learning, num_outputs = stage.first_learning(), network.spec.num_outputs
    for name, weight in network.named_parameters():
        if name not in stage.own_names:
            empty_weight(weight)

    def forward(rows: Tensor) -> Tensor:
        received, _ = stage.examples(len(rows), first_learning)
        values = rows if index == 0 else torch.zeros_like(received, device="cpu")
        passed_on: Tensor = stage(values.requires_grad_(received.requires_grad), rows)
        if index == num_stages - 1:
            return passed_on
        # Its gradient is as large as the one that the next stage sends.
        return passed_on.flatten(1)[:, :num_outputs].float()

    vars(network)["forward"] = forward


def device_memory(
    traces: Traces,
    strategy: str,
    precision: str,
    world_size: int,
    *,
    model_parallel: int = 1,
    offload: Offload | None = None,
    on_disk: bool = False,
) -> DeviceMemory:
    """Predict the memory of one of `world_size` processes.

    `traces` must have been made for the same number of processes, of which `model_parallel` share
    a copy of the network. `offload` has an effect only with DeepSpeed; below stage 3 parameters
    stay on the device. With `on_disk` stage 3 keeps the optimizer's state on a disk.
    """
    mixed = precision != "32-true"
    if strategy == "fsdp":
        share = traces.shared if model_parallel > 1 and traces.shared else traces
        return _fully_sharded(share, world_size // model_parallel, itemsize=2 if mixed else 4)
    if strategy.startswith("deepspeed"):
        step, stage = traces.cast if mixed else traces.full, int(strategy[-1])
        return _zero(traces, step, stage, world_size, offload, on_disk=on_disk)
    step = traces.autocast if mixed else traces.full
    if strategy == "tensor_parallel" and traces.shared:
        step = traces.shared.autocast if mixed else traces.shared.full
    if strategy == "pipeline" and traces.stage:
        step = traces.stage[mixed]
    # DDP allocates buckets of the gradients' size in addition to them.
    buckets = step.parameters if strategy == "ddp" and world_size > 1 else 0
    return whole_step(step, buckets, averages=traces.averages)


def _zero(
    traces: Traces,
    step: StepMemory,
    stage: int,
    world_size: int,
    offload: Offload | None,
    *,
    on_disk: bool,
) -> DeviceMemory:
    """Predict the memory with DeepSpeed, whose `stage` says what is divided between processes."""
    num_parameters = traces.full.parameters // 4
    num_own = num_parameters // world_size
    shard, itemsize = step.parameters // world_size, step.parameters // num_parameters
    sizes = zero_sizes(num_parameters, traces.block // 4)
    parameters, copied = step.parameters, num_own
    if stage == 3:
        # Weights that are being gathered exist twice. A single process computes with its own part.
        gathered = min(num_parameters, sizes.live + sizes.prefetched)
        keeps_all = world_size == 1 and offload != "optimizer_and_parameters"
        parameters = shard + (0 if keeps_all else itemsize * gathered)
        copied = min(copied, sizes.updated)
    memory = DeviceMemory(
        parameters=parameters,
        gradients=shard if stage >= 2 else step.parameters,
        optimizer=(num_parameters * _MASTER_BYTES + traces.full.optimizer) // world_size,
        buffers=step.buffers,
        activations=step.activations,
        # Two are in use while stages 1 and 2 reduce. Stage 3 copies its only one to send it.
        buckets=2 * sizes.bucket * itemsize,
        float32_gradients=copied * _MASTER_BYTES,
    )
    if offload:
        memory = _offloaded(memory, stage, num_own, on_disk=on_disk)
    if offload == "optimizer_and_parameters" and stage == 3:
        memory = replace(memory, host=memory.host + shard, parameters=parameters - shard)
    if not traces.averages:
        return memory
    averaged = traces.full.parameters // (world_size if stage == 3 else 1)
    # Below stage 3 DeepSpeed gathers all float32 weights for each update of the average.
    return _with_average(memory, averaged, shard if stage == 3 else averaged)


def _offloaded(memory: DeviceMemory, stage: int, num_own: int, *, on_disk: bool) -> DeviceMemory:
    """Move the optimizer's state and the float32 gradients to the host, or the state to a disk.

    With stages 2 and 3 each bucket of gradients is moved, so none stay on the device.
    """
    disk = memory.optimizer if on_disk and stage == 3 else 0
    return replace(
        memory,
        optimizer=0,
        float32_gradients=0,
        gradients=0 if stage >= 2 else memory.gradients,
        host=memory.optimizer + num_own * _MASTER_BYTES - disk,
        disk=disk,
    )


def whole_step(step: StepMemory, buckets: int = 0, *, averages: bool = False) -> DeviceMemory:
    """Return the device memory of a process that shards nothing of the traced step."""
    memory = DeviceMemory(
        step.parameters,
        step.gradients,
        step.optimizer,
        step.buffers,
        step.activations,
        buckets,
        update=max(0, step.update - step.gradients),
    )
    return _with_average(memory, step.parameters, step.parameters) if averages else memory


def _with_average(memory: DeviceMemory, averaged: int, copied: int) -> DeviceMemory:
    """Add the average of `averaged` bytes of float32 weights, and of all buffers.

    While the average is validated in place of the weights, `copied` bytes of these are set aside.
    """
    return replace(
        memory, average=averaged + memory.buffers, copied_weights=copied + memory.buffers
    )


def _fully_sharded(traces: Traces, num_copies: int, itemsize: int) -> DeviceMemory:
    """Predict the memory with `fsdp`; shards are float32, gathered weights `itemsize` bytes."""
    full, half = traces.full, traces.cast
    activations = full.activations if itemsize == 4 else half.activations
    weights = _GATHERED_WEIGHTS * traces.block * itemsize // 4
    # Gradient buffers exist when most activations are freed, so only their excess adds memory.
    gradients = max(0, _GATHERED_GRADIENTS * traces.block - activations)
    shard = full.parameters // num_copies
    memory = DeviceMemory(
        parameters=shard,
        gradients=shard,
        optimizer=full.optimizer // num_copies,
        buffers=full.buffers,
        activations=activations,
        buckets=weights + gradients,
        update=max(0, full.update - full.parameters) // num_copies,
    )
    return _with_average(memory, shard, shard) if traces.averages else memory


def planned_memory(traces: Traces, placement: Placement) -> DeviceMemory:
    """Predict the memory of one process of `placement`."""
    return device_memory(
        traces,
        placement.strategy,
        placement.precision,
        placement.world_size,
        model_parallel=placement.model_parallel or 1,
        offload=placement.offload,
        on_disk=placement.offload_path is not None,
    )
