"""What does watching cost? Requests a second, and processor time of the worker, with watching off and on, in turns.

`python -m bench.watching_overhead` asks two services of one bundle with a reference for drift over 32 connections on this machine, and
writes one table. The graph is as small as can be, so that a request costs little beside the watching: a real model hides more. The first
round of each is not counted: an allowance of processor time that was saved up while idle is spent in it.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx

from bench.serving_overhead import ROUND_SECONDS, Measured, conditions, http_request, measure, started_service, table
from slipway import files
from tests.serving.test_service import cpu_seconds
from tests.serving.watched import pictures, watched_bundle

NUM_ROUNDS = 9
RESULT = Path("bench/results/watching_overhead.md")
WATCH = {"off": False, "on": True}


def looked_at(url: str) -> str:
    """What became of the rows."""
    lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith("slipway_watched_rows_total{")]
    return ", ".join(f"{float(line.split()[-1]):,.0f} {line.split(chr(34))[1]}" for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        folder = Path(temporary)
        watched_bundle(folder)
        request = http_request("/predict", "image/png", pictures(1, 1)[0])
        servers = {
            name: services.enter_context(started_service(folder, f"home-{watch}", watch=watch, state=folder / "state"))
            for name, watch in WATCH.items()
        }
        all_measured = {name: Measured(f"watching {name}", server.url, request) for name, server in servers.items()}
        cpu: dict[str, list[float]] = {name: [] for name in WATCH}
        for number in range(NUM_ROUNDS + 1):
            for name, server in servers.items():
                before = cpu_seconds(server.worker())
                measured = all_measured[name] if number else Measured(name, server.url, request)
                measure(measured)
                if number:
                    answered = measured.requests_per_second[-1] * ROUND_SECONDS
                    cpu[name].append((cpu_seconds(server.worker()) - before) / answered * 1e6)
        rates = zip(*(all_measured[name].requests_per_second for name in ("on", "off")), strict=True)
        ratios = [on / off for on, off in rates]
        spread = f"median {median(ratios):.1%}, {min(ratios):.1%} to {max(ratios):.1%}"
        ratio = f"Throughput with watching, of that without it in the same turn: {spread}."
        times = ", ".join(f"{name} {median(values):.0f} µs" for name, values in cpu.items())
        cost = f"Processor time of the worker for each request, median: {times}. Rows: {looked_at(servers['on'].url)}."
        text = f"# Overhead of watching\n\n{table(list(all_measured.values()))}\n\n{ratio}\n\n{cost}\n\n{conditions(NUM_ROUNDS)}\n"
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
