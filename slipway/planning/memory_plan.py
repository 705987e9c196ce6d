"""The memory that each process holds on its device, for each way of sharing a training over processes.

`ddp` and `single` keep everything whole. ZeRO shares out the optimizer's state with a float32 master of every weight (stage 1),
gradients too (2), parameters too (3): Rajbhandari et al., arXiv 1910.02054, section 5. What DeepSpeed 0.19 and Lightning 2.6
add to it (buckets, gathered parameters) was read off running engines.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipway.config.sections import TrainParams
from slipway.planning.step_memory import StepMemory, trace_step
from slipway.training.distributed.strategies import Placement
from slipway.training.networks.networks import Network

STRATEGIES = ("single", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
_MASTER_BYTES = 4  # DeepSpeed keeps one even of float32 parameters
_BUCKET_ELEMENTS = 200_000_000  # Lightning's reduce_bucket_size
_MOST_GATHERED_ELEMENTS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters


class Traces(NamedTuple):
    """One step, in each of the ways in which it can compute."""

    full: StepMemory  # float32
    autocast: StepMemory  # to bfloat16 or float16, which take the same
    cast: StepMemory  # parameters in half precision, without the optimizer


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    buckets: int  # of communication

    @property
    def total(self) -> int:
        """All together."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buffers
            + self.activations
            + self.buckets
        )


def trace_all(network: Network, params: TrainParams, rows: int, *, accumulates: bool) -> Traces:
    """Steps of `rows` rows at a time; bfloat16 stands for both halves."""
    half = torch.bfloat16
    return Traces(
        full=trace_step(network, params, rows, accumulates=accumulates),
        autocast=trace_step(network, params, rows, half=half, accumulates=accumulates),
        cast=trace_step(
            network, params, rows, half=half, casts_parameters=True, accumulates=accumulates
        ),
    )


def device_memory(
    traces: Traces, strategy: str, precision: str, world_size: int, *, on_gpu: bool
) -> DeviceMemory:
    """Of one of `world_size` processes. On the CPU a bucket's pages are held only as far as they were written."""
    mixed = precision != "32-true"
    if not strategy.startswith("deepspeed"):
        step = traces.autocast if mixed else traces.full
        copies = (
            step.parameters if strategy == "ddp" and world_size > 1 else 0
        )  # DDP's own buckets, beside the gradients
        return DeviceMemory(
            step.parameters, step.gradients, step.optimizer, step.buffers, step.activations, copies
        )
    step, stage = traces.cast if mixed else traces.full, int(strategy[-1])
    num_parameters = traces.full.parameters // 4
    state = num_parameters * _MASTER_BYTES + traces.full.optimizer
    return DeviceMemory(
        parameters=step.parameters // (world_size if stage == 3 else 1)
        + (_gathered(step, num_parameters) if stage == 3 else 0),
        gradients=step.parameters // (world_size if stage >= 2 else 1),
        optimizer=state // world_size,
        buffers=step.buffers,
        activations=step.activations,
        buckets=_buckets(stage, step.parameters // num_parameters, num_parameters, on_gpu=on_gpu),
    )


def planned_memory(traces: Traces, placement: Placement) -> DeviceMemory:
    """As `placement` trains."""
    on_gpu = placement.accelerator == "gpu"
    return device_memory(
        traces, placement.strategy, placement.precision, placement.world_size, on_gpu=on_gpu
    )


def _gathered(step: StepMemory, num_parameters: int) -> int:
    """Whole parameters that stage 3 holds at a time, at most."""
    return step.parameters * min(num_parameters, _MOST_GATHERED_ELEMENTS) // num_parameters


def _buckets(stage: int, itemsize: int, num_parameters: int, *, on_gpu: bool) -> int:
    """Stages 1 and 2 have two of them while gradients are reduced, stage 3 one for good."""
    elements = _BUCKET_ELEMENTS if on_gpu else min(num_parameters, _BUCKET_ELEMENTS)
    return elements * itemsize * (1 if stage == 3 else 2)
