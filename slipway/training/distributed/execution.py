"""How the network is executed: the layout of its weights, and whether torch compiles it.

Neither changes what a checkpoint holds. What is asked for and cannot be had is refused before the first step.
"""

import importlib.util

import torch
from torch import nn

from slipway.config.sections import TrainParams
from slipway.kinds.registry import Task, is_table
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.strategies import Placement


def check_execution(params: TrainParams, placement: Placement, task: Task) -> None:
    """ParamsError or UnavailableError where `train.channels_last` or `train.compile` cannot be had."""
    if params.channels_last is True:
        if is_table(task):
            raise ParamsError(
                "train.channels_last is true, but rows of a table have no channels. Use 'auto'."
            )
        if placement.zero_stage is not None:
            raise ParamsError(
                f"train.channels_last is true, but strategy {placement.strategy!r} views weights as flat bytes, which this layout "
                "forbids. Use 'auto', or the strategy 'single' or 'ddp'."
            )
    if not params.compile:
        return
    if placement.zero_stage == 3:
        raise ParamsError(
            "train.compile is true, but under deepspeed_stage_3 a layer's weights come and go with each call, which torch's compiler "
            "does not see. Use false, or another strategy."
        )
    if missing := missing_compiler(placement.accelerator):
        raise UnavailableError(f"train.compile is true, but {missing}. Install it, or use false.")


def missing_compiler(accelerator: str) -> str:
    """What torch would need to compile for a "cpu" or "gpu" and does not find here; "" if nothing."""
    if accelerator == "gpu":
        return (
            ""
            if importlib.util.find_spec("triton")
            else "triton, which compiles for GPUs, is not installed"
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++), with which torch compiles for the CPU"
    return ""


def arrange(network: nn.Module, params: TrainParams, placement: Placement, task: Task) -> None:
    """Lay out the weights as `params` ask, and have the network compiled when it is first called.

    It compiles in place: names of weights stay, and so does what is saved.
    """
    automatic = placement.zero_stage is None and not is_table(
        task
    )  # images arrive as NHWC, so no layout is ever changed
    if params.channels_last is True or (params.channels_last == "auto" and automatic):
        network.to(memory_format=torch.channels_last)
    if params.compile:
        network.compile(dynamic=False)
