"""Compares networks that four processes divide twice with the same networks on one process.

`torchrun --nproc_per_node 4 -m tests.training.distributed.divided_twice FOLDER NETWORK ...` divides
each network by `fsdp` over two copies, each shared by two processes, and takes three steps of
two accumulated batches.
"""

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_

from slipway.training.distributed.collectives import gather_objects
from slipway.training.distributed.divided import DividedStrategy
from slipway.training.distributed.fully_sharded import FullyShardedStrategy
from slipway.training.distributed.shards import (
    by_division,
    divided_from,
    divided_like,
    load_optimizer,
    local,
    total_norm,
    whole,
)
from slipway.training.networks.networks import Network
from tests.encoder_folders import tiny_encoder
from tests.training.networks.test_encoders import loaded, rows
from tests.training.networks.test_text_networks import network

NUM_ROWS = 32  # of each step


def built(name: str, folder: Path) -> tuple[Network, Tensor]:
    """Return a network, equal on all processes, and its rows."""
    if name == "small_transformer":
        answer = network(name, width=32, num_layers=2, num_heads=4)
        torch.manual_seed(2)
        return answer, torch.randint(1, 200, (NUM_ROWS, 64), dtype=torch.uint8)
    family, _, rank = name.partition("-lora-")
    own = folder / name
    if distributed.get_rank() == 0:
        own.mkdir()
        tiny_encoder(own, family)
    distributed.barrier()
    torch.manual_seed(2)  # the head is new
    encoder, _ = loaded(own, lora_rank=int(rank) if rank else None)
    return encoder, rows(*(f"the soup of row {row} " * (1 + row % 3) for row in range(NUM_ROWS)))


def trained(
    answer: Network, optimizer: Any, batches: list[tuple[Tensor, Tensor]], num_steps: int
) -> list[float]:
    """Return the norm of the gradient of each step."""
    norms, weights = [], [weight for weight in answer.parameters() if weight.requires_grad]
    for _ in range(num_steps):
        answer.zero_grad()
        for texts, targets in batches:
            loss = cross_entropy(answer(texts), targets) / len(batches)
            penalty = [whole(weight.abs().sum()) for weight in weights if weight.ndim > 1]
            loss = loss + 1e-4 * torch.stack(penalty).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        norm = total_norm([weight.grad for weight in weights if weight.grad is not None])
        for group in by_division(weights):
            clip_grads_with_norm_(group, 0.5, norm)
        optimizer.step()
        norms.append(norm.item())
    return norms


def compare(name: str, folder: Path) -> None:
    alone, texts = built(name, folder)
    answer = copy.deepcopy(alone)
    targets = torch.arange(len(texts)) % 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    divide(answer, FullyShardedStrategy(2, 2, None), mesh)
    require_close(answer, dict(alone.named_parameters()), 0)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, answer)
    ]
    reader = mesh["data_parallel"].get_local_rank()
    batches = list(zip(texts.chunk(2), targets.chunk(2), strict=True))
    own = [(part.chunk(2)[reader], right.chunk(2)[reader]) for part, right in batches]
    expected = trained(alone, optimizers[0], batches, 3)
    found = trained(answer, optimizers[1], own, 3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    require_close(answer, dict(alone.named_parameters()), 1e-6)
    require_the_same_parts_after_a_checkpoint(answer, optimizers[1])


def divide(answer: Network, strategy: DividedStrategy, mesh: Any) -> None:
    strategy._device_mesh = mesh
    strategy.divide(answer)


def require_close(answer: nn.Module, expected: Mapping[str, Tensor], atol: float) -> None:
    """Require gathered weights that are equal on all processes, and close to those of one."""
    values = {name: whole(weight.detach()) for name, weight in answer.named_parameters()}
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=atol)
    first, *others = gather_objects({name: value.numpy() for name, value in values.items()})
    for other in others:
        assert all((first[name] == value).all() for name, value in other.items())


def require_the_same_parts_after_a_checkpoint(answer: nn.Module, optimizer: Any) -> None:
    """Require that gathering tensors and dividing them again gives the same bits."""
    saved = optimizer.state_dict()
    state = {
        index: {key: whole(value) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    moments = [values["momentum_buffer"] for values in optimizer.state.values()]
    parts = [local(moment).clone() for moment in moments]
    assert any(part.abs().sum() for part in parts)
    load_optimizer(optimizer, {**saved, "state": state})
    moments = [values["momentum_buffer"] for values in optimizer.state.values()]
    assert all(torch.equal(local(m), part) for m, part in zip(moments, parts, strict=True))
    for weight in answer.parameters():
        value, part = whole(weight.detach()), local(weight)
        assert torch.equal(local(divided_like(value, weight)), part)
        assert torch.equal(whole(divided_from(part.clone(), weight)), value)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        compare(each, Path(sys.argv[1]))
        if distributed.get_rank() == 0:
            print(f"equal {each}", flush=True)
    distributed.destroy_process_group()
