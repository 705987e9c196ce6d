"""Test-row answers of an ensemble's members and of its student, for the report."""

from collections.abc import Callable, Mapping
from pathlib import Path

from slipway.data.store.packed import PackedSplit
from slipway.reports.evaluation.members import ENSEMBLE_NAME, MemberAnswers, StudentAnswers
from slipway.training.networks.ensemble import EnsembleNetwork
from slipway.training.networks.networks import (
    ENSEMBLE,
    STUDENT,
    Network,
    load_network,
    read_model_manifest,
)
from slipway.training.uncertainty.prediction import predict


def ensemble_answers(
    model: Path,
    served: Network,
    rows: PackedSplit,
    batch_size: int,
    device: str,
    latencies: Callable[[Mapping[str, Network]], Mapping[str, float]],
) -> tuple[list[MemberAnswers], StudentAnswers | None]:
    """Return the answers of an ensemble's members, and of its student if there is one.

    Args:
        model: folder of the network `served`, with the ensemble or the student beside it.
        latencies: measures the latency of networks by name.

        Without an ensemble, the result is empty. Raises what `load_network` raises.
    """
    is_served = (model / ENSEMBLE).is_dir()
    ensemble = load_network(model / ENSEMBLE) if is_served else served
    if not isinstance(ensemble, EnsembleNetwork):
        return [], None
    facts = ensemble.arguments
    members = [
        MemberAnswers(
            name=fact.label,
            weight=weight,
            loss=fact.loss,
            num_bytes=len(member.payload()),
            outputs=predict(member, rows.inputs, batch_size, device),
        )
        for member, fact, weight in zip(ensemble.members, facts.members, facts.weights, strict=True)
    ]
    folder = model if is_served else model / STUDENT
    if not folder.is_dir():
        return members, None
    student = served if is_served else load_network(folder)
    name = f"{STUDENT} {student.spec.name}, seed {read_model_manifest(folder).seed}"
    best = min(range(len(members)), key=lambda place: members[place].loss)
    timed = {
        members[best].name: ensemble.members[best],
        ENSEMBLE_NAME: ensemble,
        name: student,
    }
    return members, StudentAnswers(
        name=name,
        is_served=is_served,
        num_bytes=len(student.payload()),
        outputs=predict(student, rows.inputs, batch_size, device),
        ensemble=predict(ensemble, rows.inputs, batch_size, device),
        latency_ms=latencies(timed),
    )
