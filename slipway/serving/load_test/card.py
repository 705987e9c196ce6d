"""Writes the capacity card: the goal, the verdict, the best settings, and the measurements.

artifacts/capacity.json   for tools
reports/capacity.md       for people
"""

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipway.runtimes.onnx_runtime import version_of
from slipway.serving.load_test.figures import CLIENT_IS_FULL, Figures
from slipway.serving.load_test.tuner import NUM_ROUNDS, Outcome, Tried
from slipway.system.cores import cpu_model

FORMAT_VERSION = 1
_PACKAGES = ("bentoml", "numpy", "onnxruntime", "onnxruntime-gpu", "uvicorn", "uvloop")
_BUSY = 0.5  # load average per core before the test above which the machine counts as busy
USABLE = 0.7  # usable fraction of the capacity; the rest is for bursts, other machines, other days
_COLUMNS = [
    "workers",
    "threads",
    "batch",
    "requests/s within the limit",
    "p99 ms at the goal's load",
    "failed",
]


def machine(load_before: float, cores: int) -> dict[str, Any]:
    """Return facts about the machine as JSON: processor, cores, system and package versions.

    `load_before` is the load average before the test.
    """
    versions = {name: version_of(name) for name in _PACKAGES}
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "load_before": round(load_before, 2),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: found for name, found in versions.items() if found},
    }


def card(
    outcome: Outcome, model: dict[str, Any], samples: str, hardware: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of capacity.json. `model` is the response of `GET /model`."""
    best, actual = outcome.best, model["execution"]["actual"]
    at_rate = _summary(best.rounds)
    return {
        "format_version": FORMAT_VERSION,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "goal": asdict(outcome.goal),
        "is_met": outcome.is_met,
        "verdict": verdict(outcome),
        "model": {
            "version": model["model_version"],
            **{name: actual[name] for name in ("backend", "provider", "variant", "precision")},
        },
        "settings": best.candidate.settings(),
        "carried": {"rate": best.confirmed, "figures": at_rate},
        "headroom": outcome.headroom,
        "at_load": _summary(best.load_rounds),
        "candidates": [_described(tried) for tried in outcome.all_tried],
        "requests": samples,
        "seconds": round(outcome.seconds, 1),
        "remarks": remarks(outcome, hardware),
        "hardware": hardware,
    }


def verdict(outcome: Outcome) -> str:
    """Return a sentence that says whether the goal is met; if not, with the closest result."""
    best, goal = outcome.best, outcome.goal
    p99 = _milliseconds(_middle(best.load_rounds, "p99_ms"))
    if best.confirmed is None:
        most = f"No rate was sustained within {goal.p99_ms:g} ms in most rounds"
    else:
        most = f"{best.confirmed:,.1f} requests/s are sustained within {goal.p99_ms:g} ms"
        more = outcome.headroom is not None and outcome.headroom >= 0.01
        most += f", {outcome.headroom:.0%} above the goal" if more and outcome.is_met else ""
    if outcome.is_met:
        return f"The goal is met: {goal}; the p99 is {p99}. {most}."
    failed = _failed(best.load_rounds)
    asked = {figures.target_rate for figures in best.load_rounds}
    at = (
        f"{goal}"
        if asked <= {goal.rate} or goal.rate is None
        else f"{goal}, of which {max(rate or 0 for rate in asked):,.0f}/s were sent"
    )
    shown = f"{p99}, {failed}" if failed else p99
    closest = most[0].lower() + most[1:]
    return f"The goal cannot be met here: {at}; the p99 is {shown}. The closest: {closest}."


def remarks(outcome: Outcome, hardware: dict[str, Any]) -> list[str]:
    """Return sentences with the reasons why the figures may not hold in production."""
    best, cores = outcome.best, hardware["cores"]
    fractions = [figures.client_fraction for figures in (*best.rounds, *best.load_rounds)]
    client = statistics.median(fractions)
    found = [
        f"The client ran on the same {cores} cores and took {client:.2f} of one; with a client on "
        "another machine the service sustains more."
    ]
    if client >= CLIENT_IS_FULL:
        found.append(
            "The client was near its limit: the service may sustain more than it could send."
        )
    if hardware["load_before"] > _BUSY * cores:
        found.append(
            f"The machine was busy before the test (load average {hardware['load_before']:.1f}): "
            "measure again when it is idle."
        )
    if best.confirmed is not None:
        found.append(
            f"Plan with {USABLE:.0%} of the capacity, {USABLE * best.confirmed:,.1f} requests/s: "
            "bursts need the rest."
        )
    left = [tried for tried in outcome.all_tried if tried.rate is None and not tried.problem]
    if len(left) == len(outcome.all_tried):
        found.append(
            "No candidate sustained any rate: a single request may take longer than the limit."
        )
    return found


def environment_lines(settings: dict[str, str]) -> str:
    """Return settings as the lines of a serving.env."""
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def page(content: dict[str, Any]) -> str:
    """Return the card's content as Markdown, for people."""
    model, hardware = content["model"], content["hardware"]
    lines = [
        "# Capacity",
        "",
        content["verdict"],
        "",
        "```",
        environment_lines(content["settings"]).rstrip(),
        "```",
        "",
    ]
    lines += _markdown(_COLUMNS, [_cells(row) for row in content["candidates"]])
    lines += [
        "",
        *_markdown(
            [
                "",
                "requested",
                "answers/s",
                "p50 ms",
                "p95 ms",
                "p99 ms",
                "p99 ms, lowest to highest",
                "failed",
            ],
            _loads(content),
        ),
    ]
    lines += ["", *(f"* {remark}" for remark in content["remarks"]), ""]
    lines.append(
        f"Model {model['version']}, {model['variant']} on {model['provider']}. "
        f"Requests sent, {content['requests']}. Medians of {NUM_ROUNDS} alternating rounds. "
        f"{content['date']}, {content['seconds']:.0f} s, {hardware['cores']} cores of "
        f"{hardware['cpu']}, {hardware['system']}, "
        + ", ".join(f"{name} {found}" for name, found in hardware["versions"].items())
        + "."
    )
    return "\n".join(lines) + "\n"


def describe_trial(tried: Tried) -> str:
    """Return the results of one candidate as a line of text."""
    candidate = tried.candidate
    name = (
        f"{candidate.workers} workers, {candidate.num_threads} threads, "
        f"batches of {candidate.max_batch_size}"
    )
    if tried.problem or tried.at_load is None:
        return f"{name}: {tried.problem}"
    carried = "no rate" if tried.rate is None else f"{tried.rate:,.1f} requests/s"
    p99 = _milliseconds(tried.at_load.p99_ms)
    return f"{name}: {carried} within the limit; p99 at the goal's load {p99}"


def with_settings(path: Path, settings: dict[str, str]) -> str:
    """Return the text of the file `path` with settings changed or added; other lines stay."""
    present = path.read_text().splitlines() if path.exists() else []
    kept = [
        line
        for line in present
        if line.partition("=")[0].removeprefix("export ").strip() not in settings
    ]
    return "\n".join([*kept, environment_lines(settings).rstrip()]) + "\n"


def _described(tried: Tried) -> dict[str, Any]:
    shown = tried.load_rounds or ([tried.at_load] if tried.at_load else [])
    return {
        **asdict(tried.candidate),
        "most": tried.most,
        "carried_when_tried": tried.rate,
        "carried_in_rounds": tried.confirmed,
        "was_in_rounds": bool(tried.load_rounds),
        "at_load": _summary(shown),
        "problem": tried.problem,
    }


def _summary(rounds: Sequence[Figures]) -> dict[str, Any] | None:
    """Return medians of rate and latency, and failures, over rounds of one load.

    Returns None without rounds.
    """
    if not rounds:
        return None
    found = [figures.p99_ms for figures in rounds if figures.p99_ms is not None]
    return {
        "requested": rounds[0].target_rate,
        "connections": rounds[0].connections,
        "rounds": len(rounds),
        "requests": sum(figures.answered + sum(figures.failed.values()) for figures in rounds),
        "answers_per_second": statistics.median(figures.rate for figures in rounds),
        **{name: _middle(rounds, name) for name in ("p50_ms", "p95_ms", "p99_ms")},
        "p99_ms_lowest": min(found, default=None),
        "p99_ms_highest": max(found, default=None),
        "failed": _failed(rounds),
        "client_fraction": statistics.median(figures.client_fraction for figures in rounds),
    }


def _middle(rounds: Sequence[Figures], name: str) -> float | None:
    found = [value for figures in rounds if (value := getattr(figures, name)) is not None]
    return statistics.median(found) if found else None


def _failed(rounds: Sequence[Figures]) -> str:
    """Return the fraction of failed requests by status as text, such as "429: 12.0%".

    Returns "" if no request failed.
    """
    total = sum(figures.answered + sum(figures.failed.values()) for figures in rounds)
    statuses = sorted({status for figures in rounds for status in figures.failed})
    return ", ".join(
        f"{status}: {sum(figures.failed.get(status, 0) for figures in rounds) / total:.1%}"
        for status in statuses
    )


def _cells(row: dict[str, Any]) -> list[str]:
    rate = row["carried_in_rounds"] if row["was_in_rounds"] else row["carried_when_tried"]
    at_load = row["at_load"]
    p99 = "" if at_load is None else _number(at_load["p99_ms"])
    carried = row["problem"] or (
        "none" if rate is None else f"{rate:,.1f}" + " (rounds)" * row["was_in_rounds"]
    )
    return [
        str(row["workers"]),
        str(row["num_threads"]),
        str(row["max_batch_size"]),
        carried,
        p99,
        at_load["failed"] if at_load else "",
    ]


def _loads(content: dict[str, Any]) -> list[list[str]]:
    rows = [
        ("the goal's load", content["at_load"]),
        (
            "the capacity" if content["carried"]["rate"] else "not sustained",
            content["carried"]["figures"],
        ),
    ]
    return [[name, *_load_cells(summary)] for name, summary in rows if summary]


def _load_cells(summary: dict[str, Any]) -> list[str]:
    asked = (
        f"{summary['requested']:,.1f}/s"
        if summary["requested"] is not None
        else f"{summary['connections']} connections"
    )
    numbers = [
        _number(summary[name]) for name in ("answers_per_second", "p50_ms", "p95_ms", "p99_ms")
    ]
    return [
        asked,
        *numbers,
        f"{_number(summary['p99_ms_lowest'])} to {_number(summary['p99_ms_highest'])}",
        summary["failed"],
    ]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}"


def _milliseconds(value: float | None) -> str:
    return "unknown, because nothing was answered" if value is None else f"{value:,.1f} ms"


def _markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
