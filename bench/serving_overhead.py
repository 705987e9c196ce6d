"""Compares requests per second of the service with an ordinary BentoML API of the same graph.

`python -m bench.serving_overhead` starts both, sends requests in turns over 32 connections on this
machine, and prints and writes one table. The client shares the cores with the services.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx

from bench.conditions import conditions
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import Server, environment, free_port

NUM_CONNECTIONS = 32
NUM_ROUNDS = 5
ROUND_SECONDS = 4.0
RESULT = Path("bench/results/serving_overhead.md")
PACKAGES = ("bentoml", "uvicorn", "uvloop", "httptools", "onnxruntime-gpu", "starlette")


@dataclass
class Measured:
    """One server, with its figures by round."""

    name: str
    url: str
    request: bytes
    requests_per_second: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)


class Caller(asyncio.Protocol):
    """One connection that sends its next request as soon as it has an answer."""

    def __init__(self, request: bytes, latencies: list[float]) -> None:
        self._request, self._latencies = request, latencies
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if separator and len(body) >= int(
            head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        ):
            assert head.startswith(b"HTTP/1.1 200"), self._received
            self._latencies.append(time.perf_counter() - self._asked)
            self._received = b""
            self._ask()

    def _ask(self) -> None:
        self._asked = time.perf_counter()
        self._transport.write(self._request)


async def one_round(measured: Measured, num_connections: int, seconds: float) -> list[float]:
    """Return the latencies, in seconds, of all answers within `seconds`."""
    url = httpx.URL(measured.url)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(num_connections):
        connections.append(
            await loop.create_connection(
                lambda: Caller(measured.request, latencies), url.host, url.port or 80
            )
        )
    await asyncio.sleep(seconds)
    for transport, _ in connections:
        transport.abort()
    return latencies


def measure(measured: Measured) -> None:
    """Measure one more round."""
    latencies = asyncio.run(one_round(measured, NUM_CONNECTIONS, ROUND_SECONDS))
    measured.requests_per_second.append(len(latencies) / ROUND_SECONDS)
    percentiles = statistics.quantiles(latencies, n=100)
    measured.p50_ms.append(percentiles[49] * 1000)
    measured.p99_ms.append(percentiles[98] * 1000)


def http_request(path: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"{content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def started(target: str, folder: Path) -> Iterator[str]:
    """Start a service, and yield its address once it is ready."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "bentoml", "serve", target, "--port", url.rpartition(":")[2]]
    variables = environment(folder) | {
        "STOCK_BUNDLE": str(folder / "bundle"),
        "BENTOML_HOME": str(folder / target.partition(":")[0]),
    }
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        wait_until_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def started_service(folder: Path, home: str, **settings: object) -> Iterator[Server]:
    """Start the service of the bundle in `folder`; `home` is the name of its BENTOML_HOME."""
    url = f"http://127.0.0.1:{free_port()}"
    variables = environment(folder, **settings) | {"BENTOML_HOME": str(folder / home)}
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "slipway.serving.service:Slipway",
        "--port",
        url.rpartition(":")[2],
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        wait_until_ready(url)
        yield Server(process, url, folder / "log")
    finally:
        process.terminate()
        process.wait(20)


def wait_until_ready(url: str) -> None:
    for _ in range(600):
        try:
            if httpx.get(url + "/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} is not ready after 60 s")


def table(all_measured: list[Measured]) -> str:
    lines = [
        "| Served by | requests/s, median | lowest | highest | p50 ms | p99 ms |",
        "|---|---|---|---|---|---|",
    ]
    for one in all_measured:
        rates = one.requests_per_second
        figures = f"{statistics.median(rates):,.0f} | {min(rates):,.0f} | {max(rates):,.0f}"
        lines.append(
            f"| {one.name} | {figures} | {statistics.median(one.p50_ms):.2f} | "
            f"{statistics.median(one.p99_ms):.2f} |"
        )
    return "\n".join(lines)


def measured_under(num_rounds: int = NUM_ROUNDS) -> str:
    return (
        f"{conditions(*PACKAGES)}\n"
        f"{NUM_CONNECTIONS} connections, client on the same cores, n = {num_rounds} rounds of "
        f"{ROUND_SECONDS:g} s in turns. A tiny linear graph on 8x8 RGB PNGs, one worker."
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        folder = Path(temporary)
        certify(folder / "certificate.json", write_bundle(folder / "bundle"))
        front = services.enter_context(started("slipway.serving.service:Slipway", folder))
        stock = services.enter_context(started("bench.stock_service:Stock", folder))
        raw = http_request("/predict", "image/png", picture())
        part = (
            b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n'
            b"Content-Type: image/png\r\n\r\n"
        )
        form = http_request(
            "/predict", "multipart/form-data; boundary=b", part + picture() + b"\r\n--b--\r\n"
        )
        empty = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
        all_measured = [
            Measured("the front, nothing to do (`/livez`)", front, empty),
            Measured("the front, image as the body", front, raw),
            Measured("the front, image in a form", front, form),
            Measured("an ordinary BentoML API, image in a form", stock, form),
        ]
        for _ in range(NUM_ROUNDS):
            for measured in all_measured:
                measure(measured)
        text = f"# Serving overhead\n\n{table(all_measured)}\n\n{measured_under()}\n"
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
