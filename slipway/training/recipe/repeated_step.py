"""Detects hardware that computes wrong results: equal inputs must give equal bits.

The forward and backward pass of this process run twice on the same rows, with the same random
numbers. Processes that hold the same weights also compare their weights. The optimizer's step is
not repeated.
"""

import socket
from collections.abc import Callable

import torch
import xxhash
from torch import Tensor, nn

from slipway.system.errors import TrainingError
from slipway.training.distributed.collectives import gather_objects

_REMEDY = (
    "No weight was changed by this step, and the checkpoints before it stay. Test the memory and "
    "the processors of this host, or continue on another one. A kernel that does not give equal "
    "bits (train.deterministic) looks the same"
)


def check_equal_bits(network: nn.Module, mean_loss: Callable[[], Tensor], step: str) -> None:
    """Compute `mean_loss` and its gradient twice. Raises TrainingError if a bit differs.

    `mean_loss` must start with the same random state each time. Buffers of the network are
    restored.
    """
    weights = {name: value for name, value in network.named_parameters() if value.requires_grad}
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        torch.clear_autocast_cache()  # casts of weights whose graph is used up
        loss = mean_loss()
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        named = zip(weights, gradients, strict=True)
        values = {f"the gradient of {name}": value for name, value in named if value is not None}
        found.append({"the loss": loss.detach(), **values})
        for buffer, saved in buffers:
            buffer.copy_(saved)
    torch.clear_autocast_cache()
    for name, value in found[0].items():
        if differing := int((_bits(value) != _bits(found[1][name])).sum()):
            raise TrainingError(
                f"{step}, repeated on {socket.gethostname()}, gave other bits: {name} differs in "
                f"{differing:,} of {value.numel():,} numbers, expected none. {_REMEDY}."
            )


def check_equal_weights(network: nn.Module, step: str) -> None:
    """Raise TrainingError unless all ranks hold bit-identical weights; call it on every rank."""
    digest = xxhash.xxh3_128()
    for value in network.parameters():
        digest.update(_bits(value.detach()).cpu().numpy().tobytes())
    found = gather_objects((digest.hexdigest(), socket.gethostname()))
    digests = [own for own, _ in found]
    usual = max(digests, key=digests.count)
    if others := [f"{rank} on {host}" for rank, (own, host) in enumerate(found) if own != usual]:
        raise TrainingError(
            f"before {step} the weights of rank {', '.join(others)} differ from those of the other "
            f"ranks, expected equal bits. {_REMEDY}."
        )


def _bits(value: Tensor) -> Tensor:
    """Return floating-point numbers as integers, which compare equal even if they are NaN."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return value.contiguous().view(kinds[value.element_size()])
