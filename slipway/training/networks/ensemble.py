"""Several networks whose outputs are combined, behind the interface of one network.

One safetensors file holds the weights of all members. Boosted trees are stored in it as LightGBM's
text, in a tensor of bytes.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from slipway.kinds.registry import are_trees, kind_of
from slipway.system.contract import Contract
from slipway.training.networks.networks import (
    ENSEMBLE,
    Network,
    NetworkSpec,
    build_network,
    serialize_tensors,
)

_TREES = "trees."  # prefix of the name of a tensor that holds a member's trees as text


class MemberSpec(Contract):
    """The fields of the network's spec that differ between members of an ensemble."""

    network: str
    arguments: dict[str, object]
    mean: list[float]
    std: list[float]
    label: str  # name in reports
    loss: float  # loss on the validation rows, for reports


class EnsembleArguments(Contract):
    """The arguments of an ensemble in model.json: its members and the weights of their outputs."""

    method: Literal["average", "vote", "greedy", "stack"]
    members: list[MemberSpec]
    weights: list[float]  # positive with sum 1; all equal for a vote; any number for a stack
    bias: list[float]  # (K,) for a stack, else empty


def ensemble_spec(
    members: Sequence[NetworkSpec],
    names: Sequence[str],
    method: str,
    weights: Sequence[float],
    losses: Sequence[float],
    bias: Sequence[float] = (),
) -> NetworkSpec:
    """Return the spec of an ensemble; `losses` are the members' losses on validation rows."""
    arguments = {
        "method": method,
        "members": [
            {
                "network": spec.name,
                "arguments": spec.arguments,
                "mean": spec.mean,
                "std": spec.std,
                "label": name,
                "loss": loss,
            }
            for spec, name, loss in zip(members, names, losses, strict=True)
        ],
        "weights": list(weights),
        "bias": list(bias),
    }
    return members[0].model_copy(update={"name": ENSEMBLE, "arguments": arguments})


class EnsembleNetwork(Network):
    """Maps (rows, ...) to (rows, K) logits, or (rows, 1) in the target's unit."""

    weights: Tensor
    bias: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        arguments = EnsembleArguments.model_validate(spec.arguments)
        members = [build_network(member_spec(spec, member)) for member in arguments.members]
        super().__init__(nn.ModuleList(members), spec)
        self.arguments = arguments
        self._head = kind_of(spec.task).target.load_part("head")
        for name in ("weights", "bias"):
            values = torch.tensor(getattr(arguments, name), dtype=torch.float32)
            self.register_buffer(name, values, persistent=False)

    @property
    def members(self) -> list[Network]:
        """The networks of the members, in the order of their weights."""
        assert isinstance(self.backbone, nn.ModuleList)
        return [member for member in self.backbone if isinstance(member, Network)]

    def forward(self, rows: Tensor) -> Tensor:
        """Map inputs (B, ...) to the combined outputs (B, K) float32."""
        return self.combine(torch.stack([member(rows) for member in self.members], dim=1))

    def combine(self, answers: Tensor) -> Tensor:
        """Combine the members' outputs (B, members, K) into outputs (B, K) float32."""
        if self.arguments.method == "vote":
            votes: Tensor = self._head.vote(answers)
            return votes
        if self.arguments.method == "stack":
            return (answers.to(torch.float32) * self.weights[:, None]).sum(dim=1) + self.bias
        mean: Tensor = self._head.weighted_mean(answers.to(torch.float32), self.weights)
        return mean

    def adopt(self, networks: Sequence[Network]) -> None:
        """Copy the weights of the trained `networks` into the members; both have the same order."""
        for member, trained in zip(self.members, networks, strict=True):
            member.load_payload(trained.payload())

    @property
    def num_parameters(self) -> int:
        """The number of weights, tree splits and tree leaves of all members."""
        return sum(member.num_parameters for member in self.members)

    def payload(self) -> bytes:
        """Return the content of the weights file."""
        texts = {
            name: torch.from_numpy(np.frombuffer(member.payload(), np.uint8).copy())
            for name, member in self._trees().items()
        }
        return serialize_tensors({**self.state_dict(), **texts})

    def load_payload(self, payload: bytes) -> None:
        """Load the weights of all members. Raises ValueError or RuntimeError if they do not fit."""
        tensors = safetensors.torch.load(payload)
        for name, member in self._trees().items():
            text = tensors.pop(name, None)
            if text is None:
                raise ValueError(f"the tensor {name!r} with the trees of a member is missing.")
            member.load_payload(text.numpy().tobytes())
        self.load_state_dict(tensors, strict=True)

    def _trees(self) -> dict[str, Network]:
        """Return the members that are boosted trees, by the name of their tensor in the file."""
        return {
            f"{_TREES}{place}": member
            for place, member in enumerate(self.members)
            if are_trees(member.spec.name)
        }


def member_spec(spec: NetworkSpec, member: MemberSpec) -> NetworkSpec:
    """Return the complete spec of one member of an ensemble."""
    own = {
        "name": member.network,
        "arguments": member.arguments,
        "mean": member.mean,
        "std": member.std,
    }
    return spec.model_copy(update=own)
