"""Predicts the test rows with an ensemble's members and its student, for the report."""

from collections.abc import Callable, Mapping
from pathlib import Path

from slipway.data.store.packed import PackedSplit
from slipway.reports.evaluation.members import (
    ENSEMBLE_NAME,
    EnsembleAnswers,
    MemberAnswers,
    Speed,
    StudentAnswers,
)
from slipway.training.networks.ensemble import EnsembleNetwork
from slipway.training.networks.networks import ENSEMBLE, STUDENT, Network, load_network
from slipway.training.uncertainty.prediction import predict


def ensemble_answers(
    model: Path,
    served: Network,
    rows: PackedSplit,
    batch_size: int,
    device: str,
    measured: Callable[[Mapping[str, Network]], Mapping[str, Speed]],
) -> EnsembleAnswers | None:
    """Return the predictions of an ensemble's members, and of its student if there is one.

    Args:
        model: folder of the network `served`, with the ensemble or the student next to it.
        measured: measures the speed of networks by name.

    Without an ensemble, the result is None. Raises what `load_network` raises.
    """
    is_served = (model / ENSEMBLE).is_dir()
    ensemble = load_network(model / ENSEMBLE) if is_served else served
    if not isinstance(ensemble, EnsembleNetwork):
        return None
    facts = ensemble.arguments
    networks = dict(zip([fact.label for fact in facts.members], ensemble.members, strict=True))
    student, folder = None, model if is_served else model / STUDENT
    timed: dict[str, Network] = {**networks, ENSEMBLE_NAME: ensemble}
    if folder.is_dir():
        student = served if is_served else load_network(folder)
        timed[STUDENT] = student
    speeds = measured(timed)
    members = [
        MemberAnswers(
            name=fact.label,
            weight=weight,
            loss=fact.loss,
            num_bytes=len(networks[fact.label].payload()),
            outputs=predict(networks[fact.label], rows.inputs, batch_size, device),
            speed=speeds[fact.label],
        )
        for fact, weight in zip(facts.members, facts.weights, strict=True)
    ]
    if student is None:
        return EnsembleAnswers(members, speeds[ENSEMBLE_NAME])
    taught = StudentAnswers(
        name=f"{STUDENT} {student.spec.name}",
        is_served=is_served,
        num_bytes=len(student.payload()),
        outputs=predict(student, rows.inputs, batch_size, device),
        ensemble=predict(ensemble, rows.inputs, batch_size, device),
        speed=speeds[STUDENT],
    )
    return EnsembleAnswers(members, speeds[ENSEMBLE_NAME], taught)
