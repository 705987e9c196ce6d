"""Measures the cost of monitoring: requests per second and processor time of the event loop.

`python -m bench.monitoring_overhead [small|large]...` sends requests over 32 connections to a
service whose bundle has a reference for drift. It writes one table for each bundle of
bench/serving_speed.py (bench/results/monitoring_overhead_small.md, and so on).

The service itself switches its monitoring on and off (bench/monitoring_service.py), so that both
cases share the process and the state of the machine; two services measured one after the other
differ by a third. The monitoring's own thread costs the same in all turns and is listed separately.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import numpy as np

from bench.conditions import conditions
from bench.monitoring_turns import FILE, ORDER, SECONDS, Turn
from bench.serving_models import write_large, write_small
from bench.serving_overhead import Measured, http_request
from bench.serving_speed import (
    LONGEST_WAIT_S,
    NUM_CONNECTIONS,
    PACKAGES,
    WARM_UP_S,
    digit,
    measure,
    photograph,
)
from slipway.artifacts.bundle import LoadedBundle
from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.runtimes.runtime import open_onnx
from slipway.system import files
from tests.drift.populations import ReferenceRows
from tests.serving.monitoring.monitored import with_reference
from tests.serving.server import running

NUM_REFERENCE, LARGEST_BATCH = 512, 32
SETTLE_S = 5.0  # until the monitoring's sampling rate is stable
ALWAYS_S = 24.0  # seconds with monitoring on, to measure its thread
IN_TURNS = "1001"  # on, off, off, on: a machine that slows down favours neither


class Case(NamedTuple):
    """One bundle with a drift reference, and its requests."""

    title: str
    write: Callable[[Path], LoadedBundle]
    image: Callable[[], bytes]
    media_type: str
    turn_seconds: float
    num_turns: int


def with_drift_reference(
    write: Callable[[Path], LoadedBundle], image: bytes
) -> Callable[[Path], LoadedBundle]:
    """Return a writer that adds a drift reference, of noisy copies of the request's image."""

    def written(folder: Path) -> LoadedBundle:
        bundle = write(folder)
        taken = bundle.manifest.input
        assert isinstance(taken, ImageContract)
        random = np.random.default_rng(7)
        noise = random.integers(-20, 21, (NUM_REFERENCE, *taken.shape))
        rows = np.clip(array_from_bytes(image, taken).astype(np.int64) + noise, 0, 255).astype(
            np.uint8
        )
        runner = open_onnx(
            bundle.model_bytes("fp32"),
            variant="fp32",
            precision="fp32",
            provider="cpu",
            num_threads=0,
        )
        answers = [
            runner.run(rows[begin : begin + LARGEST_BATCH])
            for begin in range(0, NUM_REFERENCE, LARGEST_BATCH)
        ]
        outputs, scores = (np.concatenate(parts) for parts in zip(*answers, strict=True))
        targets = random.integers(0, outputs.shape[1], NUM_REFERENCE).astype(np.float64)
        return with_reference(folder, bundle, ReferenceRows(rows, outputs, scores, targets))

    return written


CASES = {
    "small": Case(
        "A small CNN, PNGs of 28 px",
        with_drift_reference(write_small, digit()),
        digit,
        "image/png",
        0.05,
        1600,
    ),
    "large": Case(
        "resnet18, JPEGs of 224 px",
        with_drift_reference(write_large, photograph()),
        photograph,
        "image/jpeg",
        2.0,
        72,
    ),
}


def turns_of(case: Case, folder: Path, order: str, seconds: float) -> tuple[list[Turn], str]:
    """Return the service's turns during `seconds` of requests, and the number of monitored rows."""
    os.environ |= {FILE: str(folder / "turns.json"), ORDER: order, SECONDS: str(case.turn_seconds)}
    with running(
        folder,
        "bench.monitoring_service:Slipway",
        state=folder / "state",
        max_wait_s=LONGEST_WAIT_S,
    ) as server:
        server.wait()
        asked = Measured(
            "monitoring", server.url, http_request("/predict", case.media_type, case.image())
        )
        measure(asked, NUM_CONNECTIONS, SETTLE_S + seconds)
        rows = looked_at(server.url)
    turns = [Turn(*one) for one in json.loads((folder / "turns.json").read_text())]
    asked_in = [place for place, turn in enumerate(turns) if turn.answered]
    begin = asked_in[0] + math.ceil((WARM_UP_S + SETTLE_S) / case.turn_seconds)
    whole = len(
        IN_TURNS
    )  # whole orders only, without the last turn, which the end of the requests cut
    return turns[-(-begin // whole) * whole : asked_in[-1] // whole * whole], rows


def looked_at(url: str) -> str:
    """Return the number of monitored rows by outcome."""
    lines = [
        line
        for line in httpx.get(url + "/metrics").text.splitlines()
        if line.startswith("slipway_monitored_rows_total{")
    ]
    return ", ".join(f"{float(line.split()[-1]):,.0f} {line.split(chr(34))[1]}" for line in lines)


def values_of(
    turns: list[Turn], value: Callable[[float, float, float], float]
) -> dict[bool, list[float]]:
    """Compute a value for each group of four turns, with and without the monitoring.

    The arguments of `value` are the sums of answers, seconds and processor time.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    for begin in range(0, len(turns), len(IN_TURNS)):
        for is_monitored, values in found.items():
            own = [
                turn
                for turn in turns[begin : begin + len(IN_TURNS)]
                if turn.is_monitored == is_monitored
            ]
            sums = (
                sum(getattr(turn, name) for turn in own)
                for name in ("answered", "seconds", "loop_seconds")
            )
            values.append(value(*sums))
    return found


def compared(what: str, values: dict[bool, list[float]]) -> str:
    """Format a line of the table: medians, and the median ratio of neighbours with its interval.

    The 95 % interval comes from order statistics.
    """
    ratios = sorted(on / off for on, off in zip(values[True], values[False], strict=True))
    around, reach = len(ratios) / 2, 0.98 * math.sqrt(len(ratios))
    low, high = (
        ratios[max(0, math.floor(around - reach))],
        ratios[min(len(ratios) - 1, math.ceil(around + reach))],
    )
    return (
        f"| {what} | {median(values[False]):,.1f} | {median(values[True]):,.1f} "
        f"| {median(ratios):.3f} ({low:.3f} to {high:.3f}) |"
    )


def run_case(case: Case) -> str:
    """Measure the service with its monitoring on, then in turns, and return the report."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        case.write(folder)
        always, rows = turns_of(case, folder, "1", ALWAYS_S)
        in_turns, _ = turns_of(case, folder, IN_TURNS, case.turn_seconds * case.num_turns)
    rates = values_of(in_turns, lambda answered, seconds, loop_seconds: answered / seconds)
    costs = values_of(
        in_turns, lambda answered, seconds, loop_seconds: loop_seconds / max(answered, 1) * 1e6
    )
    thread, seconds, answered = (
        sum(getattr(one, name) for one in always)
        for name in ("monitor_seconds", "seconds", "answered")
    )
    lines = [
        f"# Overhead of monitoring\n\n{case.title}",
        "\n".join(
            [
                "| | monitoring off | monitoring on "
                "| ratio of neighbours, median (95 % interval) |",
                "|---|---|---|---|",
                compared("requests/s", rates),
                compared("µs of the event loop's thread for each request", costs),
            ]
        ),
        f"The monitoring's own thread takes {thread / seconds:.2%} of one core in addition, "
        f"{thread / answered * 1e6:.2f} µs for each request. "
        f"Rows while it was on all the time: {rows}.",
        f"{NUM_CONNECTIONS} connections, the client on the same cores, "
        f"n = {len(rates[True])} times four turns of {case.turn_seconds:g} s, "
        f"two of each, one worker. {conditions(*PACKAGES)}",
    ]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    for name in sys.argv[1:] or CASES:
        text = run_case(CASES[name])
        print(text, flush=True)
        files.write_text(Path(f"bench/results/monitoring_overhead_{name}.md"), text)


if __name__ == "__main__":
    main()
