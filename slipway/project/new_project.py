"""Implements `slipway init`: creates a project folder for some data, or asks the user."""

from pathlib import Path

from slipway.project.creation import create
from slipway.project.inspection import inspect
from slipway.project.pretrained import Weights, find_weights, weights_file
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import SMALL_PX
from slipway.project.summary import DataSummary


def plan_project(
    folder: Path,
    data: Path,
    task: str | None = None,
    target: str | None = None,
    pretrained: Path | None = None,
) -> ProjectProposal:
    """Inspect `data` and propose the params of a project in `folder`. Writes nothing."""
    summary = inspect(data)
    return propose(summary, task, target, weights=_weights(folder, summary, pretrained))


def create_project(folder: Path, proposal: ProjectProposal) -> str:
    """Write the project.

    Returns a text for the terminal with files, proposed params and findings.
    """
    names = create(folder, proposal)
    lines = [f"looked at {proposal.data}: {'; '.join(proposal.notes)}"]
    lines += [f"  {key}: {proposal.value(key)} ({why})" for key, why in proposal.reasons.items()]
    lines += [f"warning: {text}" for text in proposal.warnings]
    lines += [f"wrote {', '.join(names)} in {folder}", "next: slipway run"]
    return "\n".join(lines)


def _weights(folder: Path, summary: DataSummary, pretrained: Path | None) -> Weights | None:
    """Return pretrained weights if the data is photographs; only these benefit from them."""
    if pretrained is not None:
        return weights_file(pretrained)
    is_photographs = summary.images is not None and min(summary.images.sides) > SMALL_PX
    return find_weights(folder) if is_photographs else None
