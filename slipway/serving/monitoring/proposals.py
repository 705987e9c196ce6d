"""Writes a remediation proposal after a drift alarm: figures, and commands for a person to run.

Nothing is trained or deployed automatically.
"""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipway.system import files
from slipway.system.errors import linked
from slipway.traffic.monitoring_records import PROPOSALS

MAX_PROPOSALS = 50  # most proposal files; the oldest are removed
_MAX_FEATURES = 10


def proposal_path(state: Path, closed: float, model: str) -> Path:
    """Return the path of the proposal for a drift window, which is equal in all workers."""
    moment = f"{datetime.fromtimestamp(closed, UTC):%Y%m%dT%H%M%S.%fZ}"
    return state / PROPOSALS / f"{moment}-{model.partition('/')[0]}.md"


def write_proposal(
    state: Path,
    request_log: Path | None,
    model: str,
    opened: float,
    closed: float,
    num_rows: int,
    judgement: dict[str, Any],
) -> Path:
    """Write a proposal and remove the oldest beyond MAX_PROPOSALS; OSError if that fails."""
    path = proposal_path(state, closed, model)
    files.make_private_directory(path.parent)
    rows = [
        f"| {one['name']} | {one['statistic']} | {one['value']:.4g} | {one['threshold']:.4g} |"
        for one in judgement["features"]
        if one["drifted"]
    ]
    table = ["| Feature | Statistic | Value | Threshold |", "|---|---|---|---|"]
    sections = [
        "# Drift detected",
        f"Model {model}, {num_rows} rows from {_moment(opened)} to {_moment(closed)}.",
        "\n".join(table + rows[:_MAX_FEATURES]),
        _quality(judgement["estimate"]),
        "First look at these rows: a broken sensor or a changed client is repaired at its source, "
        "not by training.",
        _next_data_set(state, request_log),
        "Nothing has been trained or deployed, and nothing will be without you.",
    ]
    files.write_text(path, "\n\n".join(sections) + "\n", files.PRIVATE)
    for old in sorted(path.parent.glob("*.md"))[:-MAX_PROPOSALS]:
        old.unlink(missing_ok=True)
    return path


def _next_data_set(state: Path, request_log: Path | None) -> str:
    if request_log is None:
        return linked(
            "Requests are not logged, so they cannot become training data. Set "
            "`SLIPWAY_REQUEST_LOG_DIRECTORY` (docs/reference/monitoring.md), send the true labels "
            "to `POST /feedback` as they become known, and collect both with "
            "`slipway dataset collect`."
        )
    collect = (
        "slipway dataset collect data/collected.parquet "
        f"--request-log {shlex.quote(str(request_log))} --state {shlex.quote(str(state))}"
    )
    commands = [
        collect,
        "slipway dataset merge data/next.parquet",
        "slipway run data.path=data/next.parquet",
        "slipway compare",
        "slipway release",
    ]
    return (
        "Send the labels of such rows to `POST /feedback`, or label the file that "
        "`slipway dataset collect ... --unlabelled` writes. Then merge them with the "
        "previous data, in the project's folder: alone they rarely train a model that passes its "
        "gates. The second command prints the next one, usually the third:\n\n```bash\n"
        + "\n".join(commands)
        + "\n```"
    )


def _quality(estimate: dict[str, Any]) -> str:
    if not estimate["valid"]:
        return (
            f"Its quality on these rows cannot be estimated without labels: {estimate['reason']}."
        )
    value, low, high = (f"{estimate[name]:.4g}" for name in ("value", "low", "high"))
    return f"Without labels its quality on these rows is estimated at {value} ({low} to {high})."


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
