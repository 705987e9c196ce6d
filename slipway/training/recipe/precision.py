"""Adapts networks to weights in half precision: DeepSpeed's fp16 and bf16, FSDP's bf16.

DeepSpeed and FSDP cast every parameter but leave buffers in float32, and BatchNorm refuses such a
mixture (seen in DeepSpeed 0.19.8). So BatchNorm computes in float32, and the inputs of the backbone
and derived buffers (attention masks, rotary tables) get the dtype of the parameters. Names, shapes
and saved weights stay the same.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.training.networks.networks import Network


def adapt_to_half(network: Network, dtype: torch.dtype) -> None:
    """Prepare `network` for parameters of `dtype` (float16 or bfloat16)."""
    network.backbone.register_forward_pre_hook(
        lambda _, inputs: tuple(
            value.to(dtype) if value.is_floating_point() else value for value in inputs
        )
    )
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            _compute_in_float32(module)
    for module in network.backbone.modules():
        _cast_derived_buffers(module, dtype)


def allow_float16_on_cpu() -> None:
    """Make DeepSpeed accept fp16 on the CPU; torch supports it, but oneDNN is slow at it."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda _: True


def _cast_derived_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the buffers that checkpoints do not hold; saved buffers stay float32."""
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set and buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))


def _compute_in_float32(norm: nn.modules.batchnorm._BatchNorm) -> None:
    plain = norm.forward

    def forward(inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float32:
            return plain(inputs)
        return _drop_and_activate(norm, _normalise(norm, inputs.float())).to(inputs.dtype)

    norm.forward = forward  # type: ignore[method-assign,assignment]


def _normalise(norm: nn.modules.batchnorm._BatchNorm, inputs: Tensor) -> Tensor:
    """Compute the forward pass of torch's `_BatchNorm` with weights in float32."""
    average = norm.momentum if norm.momentum is not None else 0.0
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a cumulative mean
            average = 1.0 / float(norm.num_batches_tracked)
    use_batch = norm.training or norm.running_mean is None
    weight = None if norm.weight is None else norm.weight.float()
    bias = None if norm.bias is None else norm.bias.float()
    return F.batch_norm(
        inputs, norm.running_mean, norm.running_var, weight, bias, use_batch, average, norm.eps
    )


def _drop_and_activate(norm: Any, outputs: Tensor) -> Tensor:
    """Apply the dropout and activation that timm's `BatchNormAct2d` includes."""
    for name in ("drop", "act"):
        if isinstance(getattr(norm, name, None), nn.Module):
            outputs = getattr(norm, name)(outputs)
    return outputs
