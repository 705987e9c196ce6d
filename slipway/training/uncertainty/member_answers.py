"""Answers of an ensemble's members to the test rows, for the report."""

from slipway.data.store.packed import PackedSplit
from slipway.reports.evaluation.members import MemberAnswers
from slipway.training.networks.ensemble import EnsembleNetwork
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.prediction import predict


def member_answers(
    network: Network, rows: PackedSplit, batch_size: int, device: str
) -> list[MemberAnswers]:
    """Return the answers of an ensemble's members for the report; empty for one network."""
    if not isinstance(network, EnsembleNetwork):
        return []
    facts = network.arguments
    return [
        MemberAnswers(
            name=fact.label,
            weight=weight,
            loss=fact.loss,
            num_bytes=len(member.payload()),
            outputs=predict(member, rows.inputs, batch_size, device),
        )
        for member, fact, weight in zip(network.members, facts.members, facts.weights, strict=True)
    ]
