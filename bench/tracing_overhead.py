"""The cost of access log and traces: requests per second and processor time, on and off.

`python -m bench.tracing_overhead` sends requests over 32 connections to a service of a small CNN,
which switches both off and on in turns of half a second (bench/tracing_service.py): their threads
deliver every tenth of a second. A small receiver on the same cores takes the spans.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.conditions import conditions
from bench.monitoring_overhead import IN_TURNS, compared
from bench.monitoring_turns import FILE, ORDER, SECONDS, Turn
from bench.serving_models import write_small
from bench.serving_overhead import Measured, http_request
from bench.serving_speed import LONGEST_WAIT_S, NUM_CONNECTIONS, WARM_UP_S, digit, measure
from slipway.system import files
from tests.serving.server import running
from tests.serving.tracing.test_extension import collector

RESULT = Path("bench/results/tracing_overhead.md")
TURN_S, NUM_TURNS = 0.5, 120
PACKAGES = ("bentoml", "uvicorn", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
LOG, TRACES = "access log of every request", "traces of 1 %"
CASES: dict[str, dict[str, Any]] = {
    LOG: {"access_log_sampling_rate": 1.0},
    TRACES: {"tracing_sampling_rate": 0.01},
    "both, as by default": {"access_log_sampling_rate": 1.0, "tracing_sampling_rate": 0.01},
    "access log of 10 %, traces of 1 %": {
        "access_log_sampling_rate": 0.1,
        "tracing_sampling_rate": 0.01,
    },
    "both, of every request": {"access_log_sampling_rate": 1.0, "tracing_sampling_rate": 1.0},
}


def turns_of(folder: Path, url: str, sampled: dict[str, Any]) -> tuple[list[Turn], str]:
    """The turns after the warm-up, in whole orders, and what became of lines and spans."""
    settings = dict(sampled)
    if "access_log_sampling_rate" in settings:
        settings["access_log_directory"] = folder / "access"
    if "tracing_sampling_rate" in settings:
        settings["tracing_endpoint"] = url
    turns_file = folder / "turns.json"
    os.environ |= {FILE: str(turns_file), ORDER: IN_TURNS, SECONDS: str(TURN_S)}
    with running(
        folder,
        "bench.tracing_service:Slipway",
        state=folder / "state",
        max_wait_s=LONGEST_WAIT_S,
        monitoring="false",
        **settings,
    ) as server:
        server.wait()
        request = http_request("/predict", "image/png", digit())
        asked = Measured("tracing", server.url, request)
        measure(asked, NUM_CONNECTIONS, WARM_UP_S + NUM_TURNS * TURN_S)
        metrics = httpx.get(server.url + "/metrics").text
    counted = ("slipway_access_log_lines_total{", "slipway_spans_total{")
    found = [line for line in metrics.splitlines() if line.startswith(counted)]
    outcomes = ", ".join(
        f"{float(line.split()[-1]):,.0f} {'spans' if 'spans' in line else 'lines'} "
        f"{line.split(chr(34))[1]}"
        for line in found
        if not line.endswith(" 0.0")
    )
    turns = [Turn(*one) for one in json.loads(turns_file.read_text())]
    asked_in = [place for place, turn in enumerate(turns) if turn.answered]
    begin, whole = asked_in[0] + math.ceil(WARM_UP_S / TURN_S), len(IN_TURNS)
    return turns[-(-begin // whole) * whole : asked_in[-1] // whole * whole], outcomes


def rows_of(name: str, turns: list[Turn]) -> list[str]:
    """Two lines of the table: rate, and processor time of the whole worker."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[bool, list[float]] = {True: [], False: []}
    for begin in range(0, len(turns), len(IN_TURNS)):
        for is_on in (True, False):
            own = [one for one in turns[begin : begin + len(IN_TURNS)] if one.is_monitored == is_on]
            answered = max(1, sum(one.answered for one in own))
            rates[is_on].append(answered / sum(one.seconds for one in own))
            costs[is_on].append(sum(one.monitor_seconds for one in own) / answered * 1e6)
    return [
        compared(f"{name}: requests/s", rates),
        compared(f"{name}: µs of the worker for each request", costs),
    ]


def main() -> None:
    lines, outcomes, numbers = [], [], []
    for name, sampled in CASES.items():
        with tempfile.TemporaryDirectory() as temporary, collector() as (url, _):
            folder = Path(temporary)
            write_small(folder)
            turns, found = turns_of(folder, url, sampled)
        lines += rows_of(name, turns)
        outcomes.append(f"* {name}: {found}")
        numbers.append(len(turns) // len(IN_TURNS))
        print(*lines[-2:], outcomes[-1], sep="\n", flush=True)
    head = "| | off | on | ratio of neighbours, median (95 % interval) |\n|---|---|---|---|"
    text = (
        "# Overhead of access log and traces\n\nA small CNN, PNGs of 28 px\n\n"
        f"{head}\n" + "\n".join(lines) + "\n\n" + "\n".join(outcomes) + "\n\n"
        f"{NUM_CONNECTIONS} connections, client and collector on the same cores, n = "
        f"{median(numbers):.0f} times four turns of {TURN_S:g} s, two of each, one worker, "
        f"monitoring off. The time of the worker includes the threads that write and export. "
        f"{conditions(*PACKAGES)}\n"
    )
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
