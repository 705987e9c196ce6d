"""A step of Llama 3.1 8B as torchtitan trains it, traced on tensors without content.

Selective activation checkpointing keeps every second matrix product and the attention's output, and
computes the rest again: torchtitan's option `op`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from slipway.planning.memory_plan import Traces
from slipway.planning.step_memory import StepMemory, _LiveStorages

WIDTH, HEADS, KEY_HEADS, WIDE, VOCABULARY, LAYERS = 4096, 32, 8, 14336, 128_256, 32
_ATTENTION = "_scaled_dot_product"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.queries, self.attended = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(WIDTH, KEY_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length, _ = tokens.shape
        normed = self.norms[0](tokens)
        layers = (self.queries, self.keys, self.values)
        queries, keys, values = (
            layer(normed).view(rows, length, -1, WIDTH // HEADS) for layer in layers
        )
        queries, keys = (_rotated(part) for part in (queries, keys))
        keys, values = (
            part.repeat_interleave(HEADS // KEY_HEADS, dim=2) for part in (keys, values)
        )
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(
            1, 2
        )
        tokens = tokens + self.attended(found.reshape(rows, length, WIDTH))
        normed = self.norms[1](tokens)
        answer: Tensor = tokens + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return answer


def _rotated(part: Tensor) -> Tensor:
    """Mix the halves of queries or keys in float32, which takes as much as a rotation."""
    first, second = part.float().chunk(2, dim=3)
    return torch.cat([first - second, first + second], dim=3).to(part.dtype)


def _contexts() -> Any:
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.mm.default
        counts[context.is_recompute] += is_product
        keeps = is_product and counts[context.is_recompute] % 2 == 1
        keeps = keeps or _ATTENTION in str(operation)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def traces(rows: int, length: int) -> Traces:
    """Trace a step on `rows` rows of `length` tokens, with weights in bfloat16."""
    with FakeTensorMode():
        network = nn.ModuleList(
            [
                nn.Embedding(VOCABULARY, WIDTH),
                *(_Block() for _ in range(LAYERS)),
                nn.RMSNorm(WIDTH),
                nn.Linear(WIDTH, VOCABULARY, bias=False),
            ]
        )
        for weight in network.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        embedding, *blocks, norm, head = network
        targets = torch.zeros((rows, length), dtype=torch.int64)
        for weight in network.parameters():
            weight.grad = torch.zeros_like(weight)
        own = sum(weight.nbytes for weight in network.parameters())
        with _LiveStorages(network) as live:
            live.start(network.parameters())
            live.start(weight.grad for weight in network.parameters() if weight.grad is not None)
            tokens = embedding(targets)
            for block in blocks:
                tokens = checkpoint(block, tokens, use_reentrant=False, context_fn=_contexts)
            logits = head(norm(tokens))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            del logits, tokens
            loss.backward()  # type: ignore[no-untyped-call]
    num_weights = own // 2
    activations = live.peak - 2 * own
    outside = sum(weight.numel() for weight in (*embedding.parameters(), *head.parameters()))
    full = StepMemory(4 * num_weights, 4 * num_weights, 8 * num_weights, 0, activations)
    cast = StepMemory(own, own, 0, 0, activations)
    return Traces(full, full, cast, block=4 * outside)
