"""What a person may do after a drift alarm, with the figures and the commands. Nothing is ever trained or deployed by itself."""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipway.system import files
from slipway.traffic.monitoring_records import PROPOSALS

MAX_PROPOSALS = 50  # files; the oldest make room
_SHOWN_FEATURES = 10


def proposal_path(state: Path, closed: float, model: str) -> Path:
    """Where the proposal about a window goes: the same file whoever writes it, and however often."""
    return (
        state
        / PROPOSALS
        / f"{datetime.fromtimestamp(closed, UTC):%Y%m%dT%H%M%S.%fZ}-{model.partition('/')[0]}.md"
    )


def write_proposal(
    state: Path,
    kept: Path | None,
    model: str,
    opened: float,
    closed: float,
    num_rows: int,
    judgement: dict[str, Any],
) -> Path:
    """Write one, and remove the oldest beyond MAX_PROPOSALS; OSError where the disk refuses."""
    path = proposal_path(state, closed, model)
    files.make_private_directory(path.parent)
    files.write_text(
        path, proposal_text(state, kept, model, opened, closed, num_rows, judgement), files.PRIVATE
    )
    for old in sorted(path.parent.glob("*.md"))[:-MAX_PROPOSALS]:
        old.unlink(missing_ok=True)
    return path


def proposal_text(
    state: Path,
    kept: Path | None,
    model: str,
    opened: float,
    closed: float,
    num_rows: int,
    judgement: dict[str, Any],
) -> str:
    """The proposal, Markdown."""
    drifted = [feature for feature in judgement["features"] if feature["drifted"]][:_SHOWN_FEATURES]
    rows = [
        f"| {one['name']} | {one['statistic']} | {one['value']:.4g} | {one['threshold']:.4g} |"
        for one in drifted
    ]
    sections = [
        "# The traffic has drifted",
        f"Model {model}, {num_rows} rows from {_moment(opened)} to {_moment(closed)}.",
        "\n".join(["| Feature | Statistic | Value | Threshold |", "|---|---|---|---|", *rows]),
        _quality(judgement["estimate"]),
        "Look at these rows before anything else: a broken sensor or a changed client is mended at its source, not by training.",
        _next_data_set(state, kept),
        "Nothing has been trained or deployed, and nothing will be without you.",
    ]
    return "\n\n".join(sections) + "\n"


def commands(state: Path, kept: Path) -> list[str]:
    """From the kept requests to a new certified bundle, as a person would type it in the project's folder."""
    collect = f"python -m slipway.traffic.collect data/collected.parquet --kept {shlex.quote(str(kept))} --state {shlex.quote(str(state))}"
    join, run = (
        "python -m slipway.data.merge data/next.parquet",
        "dvc exp run -S data.path=data/next.parquet",
    )
    return [collect, join, run, "dvc exp show --only-changed --drop '.*/.*'", "make release"]


def _next_data_set(state: Path, kept: Path | None) -> str:
    if kept is None:
        return (
            "The requests themselves were not kept, so they cannot become data: set `SLIPWAY_KEEP_DIRECTORY` (docs/watching.md), tell the "
            "truths to `POST /feedback` as they become known, and collect both with `python -m slipway.traffic.collect`."
        )
    lines = "\n".join(commands(state, kept))
    return (
        "Tell the truths of such rows to `POST /feedback`, or label what `python -m slipway.traffic.collect ... --unlabelled` writes. "
        "Then, in the project's folder, join them with the data of before, since alone they seldom make a model that passes its gates, and "
        f"run what the second command says is next, as a rule the third:\n\n```bash\n{lines}\n```"
    )


def _quality(estimate: dict[str, Any]) -> str:
    if not estimate["valid"]:
        return f"How good the model is on these rows cannot be told without labels: {estimate['reason']}."
    value, low, high = (f"{estimate[name]:.4g}" for name in ("value", "low", "high"))
    return f"Without labels its quality on these rows is estimated at {value} ({low} to {high})."


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
