"""Memory layout of the weights (channels_last) and compilation of the network.

Neither changes the saved weights. A setting that is impossible on this machine or with this
strategy is refused before the first step.
"""

import importlib.util

import torch
from torch import nn

from slipway.config.training import TrainParams
from slipway.kinds.registry import Task, kind_of
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.placement import Placement


def check_execution(params: TrainParams, placement: Placement, task: Task) -> None:
    """Raise ParamsError or UnavailableError if an execution setting is impossible here.

    The settings are channels_last, compile, on_loss_spike and repeat_every_steps.
    """
    if params.on_loss_spike == "rewind" and placement.strategy not in ("single", "ddp"):
        raise ParamsError(
            f"train.on_loss_spike is 'rewind', but strategy {placement.strategy!r} divides the "
            "state of the training, which is restored only at the start. Use "
            f"{'null' if placement.strategy == 'pipeline' else repr('skip')}, or the strategy "
            "'single' or 'ddp'."
        )
    if params.on_loss_spike and placement.strategy == "pipeline":
        raise ParamsError(
            f"train.on_loss_spike is {params.on_loss_spike!r}, but strategy 'pipeline' knows the "
            "losses of a step only after its gradients. Use null, or another strategy."
        )
    if params.repeat_every_steps and placement.divides_weights:
        raise ParamsError(
            f"train.repeat_every_steps is {params.repeat_every_steps}, but {placement.strategy} "
            "divides the weights, so no process can run a pass by itself. Use null, or another "
            "strategy."
        )
    if params.channels_last is True:
        if not kind_of(task).input.has_pixels:
            raise ParamsError(
                "train.channels_last is true, but rows without pixels have no channels. Use 'auto'."
            )
        if placement.is_sharded:
            raise ParamsError(
                f"train.channels_last is true, but strategy {placement.strategy!r} views weights "
                "as flat bytes, which this layout forbids. Use 'auto', or the strategy 'single' "
                "or 'ddp'."
            )
    if not params.compile:
        return
    if placement.zero_stage == 3 or placement.strategy == "fsdp":
        raise ParamsError(
            f"train.compile is true, but {placement.strategy} gathers and frees the weights of "
            "each layer as it is called, which Slipway does not compile. Use false, or another "
            "strategy."
        )
    if placement.shares_rows:
        raise ParamsError(
            f"train.compile is true, but train.strategy is {placement.strategy!r}, which exchanges "
            "values between processes within the network; Slipway does not compile that. Use "
            "false, or another strategy."
        )
    if missing := missing_compiler(placement.accelerator):
        raise UnavailableError(f"train.compile is true, but {missing}. Install it, or use false.")


def missing_compiler(accelerator: str) -> str:
    """Return a text on the compiler that torch lacks for an accelerator, "cpu" or "gpu".

    Returns "" if no compiler is missing.
    """
    if accelerator == "gpu":
        if importlib.util.find_spec("triton"):
            return ""
        return "triton, which compiles for GPUs, is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++), with which torch compiles for the CPU"
    return ""


def apply_execution(
    network: nn.Module, params: TrainParams, placement: Placement, task: Task
) -> None:
    """Set the memory layout of the weights, and mark the network for compilation at its first call.

    The network is compiled in place, so the names of its weights stay the same.
    """
    # Images arrive as NHWC, so channels_last never has to convert them.
    automatic = not placement.is_sharded and kind_of(task).input.has_pixels
    if params.channels_last is True or (params.channels_last == "auto" and automatic):
        network.to(memory_format=torch.channels_last)
    if params.compile:
        network.compile(dynamic=False)
