"""Measures the cost of the request log: requests per second if 0, 10 or 100 % are logged.

`python -m bench.request_log_overhead` starts three services of one tiny graph, sends requests to
them in turns over 32 connections, and prints and writes one table. The client shares the cores with
the services. The cost is relatively smaller for a real model.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx

from bench.serving_overhead import (
    ROUND_SECONDS,
    Measured,
    http_request,
    measure,
    measured_under,
    started_service,
    table,
)
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import Server
from tests.serving.test_service import cpu_seconds

NUM_ROUNDS = 7
RESULT = Path("bench/results/request_log_overhead.md")
SHARES = {"off": None, "a tenth of the requests": 0.1, "every request": 1.0}


@contextmanager
def started(folder: Path, number: int, share: float | None) -> Iterator[Server]:
    """Start a service that logs the fraction `share` of its requests."""
    settings = (
        {}
        if share is None
        else {
            "request_log_directory": folder / f"logged-{number}",
            "request_log_sampling_rate": share,
            "request_log_bytes": 64 << 20,
        }
    )
    with started_service(folder, f"home-{number}", **settings) as server:
        yield server


def outcomes(url: str) -> str:
    """Return the number of sampled requests by outcome."""
    lines = [
        line
        for line in httpx.get(url + "/metrics").text.splitlines()
        if line.startswith("slipway_logged_requests_total{")
    ]
    return ", ".join(f"{float(line.split()[-1]):,.0f} {line.split(chr(34))[1]}" for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        folder = Path(temporary)
        certify(folder / "certificate.json", write_bundle(folder / "bundle"))
        request = http_request("/predict", "image/png", picture())
        servers = [
            services.enter_context(started(folder, number, share))
            for number, share in enumerate(SHARES.values())
        ]
        all_measured = [
            Measured(f"logged: {name}", server.url, request)
            for name, server in zip(SHARES, servers, strict=True)
        ]
        cpu: dict[str, list[float]] = {one.name: [] for one in all_measured}
        for _ in range(NUM_ROUNDS):
            for measured, server in zip(all_measured, servers, strict=True):
                before = cpu_seconds(server.worker())
                measure(measured)
                answered = measured.requests_per_second[-1] * ROUND_SECONDS
                cpu[measured.name].append((cpu_seconds(server.worker()) - before) / answered * 1e6)
        costs = "\n".join(
            f"* {one.name}: {median(cpu[one.name]):.0f} µs, {outcomes(one.url)}"
            for one in all_measured
        )
        text = (
            f"# Overhead of the request log\n\n{table(all_measured)}\n\n"
            "Median processor time of the worker for each request, and the requests by outcome:\n\n"
            f"{costs}\n\n{measured_under(NUM_ROUNDS)}\n"
        )
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
