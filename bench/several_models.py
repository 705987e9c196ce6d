"""Measures models behind one address: the price of the gateway, and an overloaded neighbour.

`python -m bench.several_models [ROUNDS]` serves a quick model of table rows and a slow one of
images. In each round, one connection asks the quick model directly and through the gateway. Then
requests for the quick model come at random times: alone, while the slow one gets half of what it
can answer, and while it gets twice what it can. A third model is the slow one again, with a
niceness. Rounds interleave. The callers have the same cores as the models and the gateway.

A request waits for a core up to five times: as its caller sends it, in the gateway, in the service,
and on the way back in the gateway and in the caller. Linux counts the time that each thread waits.
"""

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import psutil

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
RATE, SECONDS, NUM_SINGLE, NUM_CALLERS, NICENESS = 100, 8.0, 300, 16, 5
RESULT = Path("bench/results/several_models.md")
ROWS = json.dumps({"rows": [table_row(0)]}).encode()
DIRECT = http_request("/predict", ROWS, "application/json")
QUICK = http_request("/models/quick/predict", ROWS, "application/json")
SLOW, YIELDING = (
    http_request(f"/models/{name}/predict", picture()) for name in ("slow", "yielding")
)
Turns = dict[int, int]  # of each process on a request's way: how often it passes it


def ask(url: str, request: bytes, rate: float, seed: int) -> list[Answer]:
    """Send `request` `rate` times a second, at random times, for some seconds."""
    answers: list[Answer] = run(open_loop(url, bytes_of(request), rate, SECONDS, seed))
    return answers


def waited(turns: Turns) -> dict[int, tuple[int, int]]:
    """For each process, how long and how often its main thread waited for a core, in ns."""
    found = {}
    for process in turns:
        _, delay, number = Path(f"/proc/{process}/schedstat").read_text().split()
        found[process] = int(delay), int(number)
    return found


def phase(
    url: str, seed: int, turns: Turns, request: bytes = b"", rate: float = 0
) -> tuple[dict[str, float], list[Answer]]:
    """Return the quick model's figures in milliseconds, and the answers to `request`.

    `request` comes `rate` times a second from a process of its own, so that the callers of the
    quick model wait for no event loop but theirs.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as caller:
        caller.submit(os.getpid).result()  # has started
        before = waited(turns)
        beside = caller.submit(ask, url, request, rate, seed + 1) if rate else None
        quick = ask(url, QUICK, RATE, seed)
        after = waited(turns)
        others = beside.result() if beside else []
    assert by_status(quick).keys() == {200}, by_status(quick)
    cores = 0.0
    for process, number in turns.items():
        delay, times = (
            now - then for now, then in zip(after[process], before[process], strict=True)
        )
        cores += number * delay / max(times, 1) / 1e6
    mean = statistics.fmean(answer.seconds for answer in quick)
    found = {"p99": 1000 * latency(quick), "mean": 1000 * mean, "cores": cores}
    return found, others


def measure(url: str, direct: str, seed: int, turns: Turns) -> dict[str, float]:
    """Return the figures of one round; times in milliseconds."""
    singles = {
        "direct": run(closed_loop(direct, lambda number: DIRECT, 1, num_requests=NUM_SINGLE)),
        "gateway": run(closed_loop(url, lambda number: QUICK, 1, num_requests=NUM_SINGLE)),
    }
    found = {name: 1000 * latency(answers, 0.5) for name, answers in singles.items()}
    alone, _ = phase(url, seed, turns)
    found |= {f"alone {name}": value for name, value in alone.items()}
    for name, request in (("slow", SLOW), ("yielding", YIELDING)):
        capacity = run(closed_loop(url, bytes_of(request), NUM_CALLERS, seconds=2.0))
        peak = by_status(capacity)[200] / 2.0
        usual, _ = phase(url, seed, turns, request, peak / 2)
        besides, answers = phase(url, seed, turns, request, 2 * peak)
        found |= {f"{name} {figure}": value for figure, value in besides.items()}
        found[f"{name} usual"] = usual["p99"]
        found[f"{name} ratio"] = besides["p99"] / alone["p99"]
        found[f"{name} ratio to usual"] = besides["p99"] / usual["p99"]
        found[f"{name} peak"] = peak
        found[f"{name} refused"] = 1 - by_status(answers)[200] / max(len(answers), 1)
    return found | {"price": found["gateway"] - found["direct"]}


def bytes_of(request: bytes) -> Callable[[int], bytes]:
    """Return a function that gives the same request for each number."""
    return lambda number: request


def main() -> None:
    """Write the table of all rounds."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROUNDS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slow = slow_classifier(24)
        write_models(folder, quick=row_classifier(), slow=slow, yielding=slow)
        with (folder / "models.toml").open("a") as file:
            file.write(f"niceness = {NICENESS}\n")  # of the last one
        with running_gateway(folder) as server:
            for name in ("quick", "slow", "yielding"):
                server.wait(f"/models/{name}/readyz")
            services = psutil.Process(server.process.pid).children()
            (quick,) = (one for one in services if one.cwd().endswith("/quick"))
            turns = {os.getpid(): 2, server.process.pid: 2, quick.children()[0].pid: 1}
            ports = re.findall(r"\[quick\] .* (http://127[.]0[.]0[.]1:\d+)", server.log.read_text())
            rounds = [measure(server.url, ports[-1], seed, turns) for seed in range(num_rounds)]
            metrics = httpx.get(f"{server.url}/metrics").text
    memory = re.findall(r'slipway_model_memory_bytes\{model="\w+"\} (\S+)', metrics)
    write(rounds, [float(value) / 1e6 for value in memory])


def write(rounds: list[dict[str, float]], memory: list[float]) -> None:
    """Write medians and ranges."""
    named = (
        ("one connection, directly: median, ms", "direct"),
        ("through the gateway: median, ms", "gateway"),
        ("difference, ms", "price"),
        (f"quick model alone at {RATE} requests a second: p99, ms", "alone p99"),
        ("its mean, ms", "alone mean"),
        ("of that, waiting for a core", "alone cores"),
        ("beside a slow model at half its peak: p99, ms", "slow usual"),
        ("beside the overloaded model: p99, ms", "slow p99"),
        ("its mean, ms", "slow mean"),
        ("of that, waiting for a core", "slow cores"),
        ("ratio of the p99 to that alone", "slow ratio"),
        ("ratio of the p99 to that at half the peak", "slow ratio to usual"),
        ("overloaded model at its peak, answers a second", "slow peak"),
        ("refused of its requests at twice the peak", "slow refused"),
        (f"beside the overloaded model with niceness {NICENESS}: p99, ms", "yielding p99"),
        ("its mean, ms", "yielding mean"),
        ("of that, waiting for a core", "yielding cores"),
        (f"ratio of the p99 with niceness {NICENESS} to that alone", "yielding ratio"),
        (f"ratio with niceness {NICENESS} to that at half the peak", "yielding ratio to usual"),
        (f"peak of the model with niceness {NICENESS}, answers a second", "yielding peak"),
        ("refused of its requests at twice the peak", "yielding refused"),
    )
    lines = [f"| {label} | {middle(rounds, key)} |" for label, key in named]
    sizes = " and ".join(f"{size:.0f}" for size in memory)
    note = (
        f"n = {len(rounds)} rounds, medians with ranges. Callers, gateway and all models share "
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
