"""Measures models behind one address: the price of the gateway, and an overloaded neighbour.

`python -m bench.several_models [ROUNDS]` serves a quick model of table rows and a slow one of
images. In each round, one connection asks the quick model directly and through the gateway. Then
requests for the quick model come at random times: alone, and while the slow one gets twice what it
can answer. Rounds interleave. The callers have the same two cores as both models and the gateway.
"""

import asyncio
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

import httpx

from bench.conditions import conditions
from slipway.serving.load_test.load import (
    Answer,
    by_status,
    closed_loop,
    http_request,
    latency,
    open_loop,
    run,
)
from slipway.system import files
from tests.serving.bundles import picture, row_classifier, slow_classifier, table_row
from tests.serving.gateway.started import running_gateway, write_models

NUM_ROUNDS = 5
RATE, SECONDS, NUM_SINGLE, NUM_CALLERS = 50, 6.0, 300, 16
RESULT = Path("bench/results/several_models.md")
ROWS = json.dumps({"rows": [table_row(0)]}).encode()
DIRECT = http_request("/predict", ROWS, "application/json")
QUICK = http_request("/models/quick/predict", ROWS, "application/json")
SLOW = http_request("/models/slow/predict", picture())


async def beside(url: str, overload: float, seed: int) -> list[list[Answer]]:
    """Ask the quick model for some seconds, and the slow one `overload` times a second."""
    loads = [open_loop(url, lambda number: QUICK, RATE, SECONDS, seed)]
    if overload:
        loads.append(open_loop(url, lambda number: SLOW, overload, SECONDS, seed + 1))
    return await asyncio.gather(*loads)


def measure(url: str, direct: str, seed: int) -> dict[str, float]:
    """Return the figures of one round; times in milliseconds."""
    singles = {
        "direct": run(closed_loop(direct, lambda number: DIRECT, 1, num_requests=NUM_SINGLE)),
        "gateway": run(closed_loop(url, lambda number: QUICK, 1, num_requests=NUM_SINGLE)),
    }
    capacity = run(closed_loop(url, lambda number: SLOW, NUM_CALLERS, seconds=2.0))
    peak = by_status(capacity)[200] / 2.0
    (alone,) = run(beside(url, 0, seed))
    besides, slow = run(beside(url, 2 * peak, seed))
    assert by_status(besides).keys() == {200}, by_status(besides)
    found = {name: 1000 * latency(answers, 0.5) for name, answers in singles.items()}
    return found | {
        "peak": peak,
        "alone": 1000 * latency(alone),
        "besides": 1000 * latency(besides),
        "refused": 1 - by_status(slow)[200] / len(slow),
    }


def main() -> None:
    """Write the table of all rounds."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROUNDS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(folder, quick=row_classifier(), slow=slow_classifier(24))
        with running_gateway(folder) as server:
            for name in ("quick", "slow"):
                server.wait(f"/models/{name}/readyz")
            ports = re.findall(r"\[quick\] .* (http://127[.]0[.]0[.]1:\d+)", server.log.read_text())
            rounds = [measure(server.url, ports[-1], seed) for seed in range(num_rounds)]
            metrics = httpx.get(f"{server.url}/metrics").text
    memory = re.findall(r'slipway_model_memory_bytes\{model="\w+"\} (\S+)', metrics)
    write(rounds, [float(value) / 1e6 for value in memory])


def write(rounds: list[dict[str, float]], memory: list[float]) -> None:
    """Write medians and ranges."""
    rounds = [
        one | {"price": one["gateway"] - one["direct"], "ratio": one["besides"] / one["alone"]}
        for one in rounds
    ]
    lines = [
        f"| {label} | {middle(rounds, key)} |"
        for label, key in (
            ("one connection, directly: median, ms", "direct"),
            ("through the gateway: median, ms", "gateway"),
            ("difference, ms", "price"),
            (f"quick model alone at {RATE} requests a second: p99, ms", "alone"),
            ("beside the overloaded model: p99, ms", "besides"),
            ("ratio of these two", "ratio"),
            ("slow model at its peak, answers a second", "peak"),
            ("refused of its requests at twice the peak", "refused"),
        )
    ]
    sizes = " and ".join(f"{size:.0f}" for size in memory)
    note = (
        f"n = {len(rounds)} rounds, medians with ranges. Callers, gateway and both models share "
        f"the cores; each model has one thread. Memory of the processes of the models: {sizes} MB. "
        f"{conditions('bentoml', 'uvicorn', 'aiohttp', 'onnxruntime-gpu')}"
    )
    table = "\n".join(["| Figure | Median (range) |", "|---|---|", *lines])
    files.write_text(RESULT, f"# Several models at one address\n\n{table}\n\n{note}\n")
    print(RESULT.read_text())


def middle(rounds: list[dict[str, float]], key: str) -> str:
    """Return the median of a figure and its range."""
    values = [one[key] for one in rounds]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
