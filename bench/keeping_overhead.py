"""What does keeping requests cost? Requests a second of one tiny graph with keeping off, of a tenth, and of all requests.

`python -m bench.keeping_overhead` starts three services, asks them in turns over 32 connections on this machine, and prints and
writes one table. The client shares the cores with the services, and the graph is as small as can be: a real model hides more.
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
    conditions,
    http_request,
    measure,
    started_service,
    table,
)
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import Server
from tests.serving.test_service import cpu_seconds

NUM_ROUNDS = 7
RESULT = Path("bench/results/keeping_overhead.md")
SHARES = {"off": None, "a tenth of the requests": 0.1, "every request": 1.0}


@contextmanager
def started(folder: Path, number: int, share: float | None) -> Iterator[Server]:
    """A service that keeps that share."""
    settings = (
        {}
        if share is None
        else {
            "keep_directory": folder / f"kept-{number}",
            "keep_share": share,
            "keep_bytes": 64 << 20,
        }
    )
    with started_service(folder, f"home-{number}", **settings) as server:
        yield server


def outcomes(url: str) -> str:
    """What became of the sampled requests."""
    lines = [
        line
        for line in httpx.get(url + "/metrics").text.splitlines()
        if line.startswith("slipway_kept_requests_total{")
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
            Measured(f"kept: {name}", server.url, request)
            for name, server in zip(SHARES, servers, strict=True)
        ]
        cpu: dict[str, list[float]] = {one.name: [] for one in all_measured}
        for _ in range(NUM_ROUNDS):
            for measured, server in zip(all_measured, servers, strict=True):
                before = cpu_seconds(server.worker())
                measure(measured)
                answered = measured.requests_per_second[-1] * ROUND_SECONDS
                cpu[measured.name].append((cpu_seconds(server.worker()) - before) / answered * 1e6)
        kept = "\n".join(
            f"* {one.name}: {median(cpu[one.name]):.0f} µs, {outcomes(one.url)}"
            for one in all_measured
        )
        cost = f"Processor time of the worker for each request, median, and what became of the requests:\n\n{kept}"
        text = f"# Overhead of keeping requests\n\n{table(all_measured)}\n\n{cost}\n\n{conditions(NUM_ROUNDS)}\n"
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
