"""The cost of access log and traces: processor time of a worker for each request, on and off.

`python -m bench.tracing_overhead` lets an application in this process answer images, 32 at a time,
in blocks with and without the two. A block lasts until its lines are written and its spans
exported, so that their threads count. The requests come from no socket: HTTP would add the same
time to both sides, so the ratios are above those of a service. Processor time hardly depends on
other load, which rates of requests do.
"""

import asyncio
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from bench.conditions import conditions
from slipway.serving.app import Application
from slipway.serving.extensions import EXTENSIONS, SECTIONS
from slipway.serving.http.request_body import RequestBody
from slipway.serving.http.routes import Request, new_request_id
from slipway.serving.settings import read_settings
from slipway.serving.worker import ModelWorker
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.tracing.test_extension import collector

RESULT = Path("bench/results/tracing_overhead.md")
ORDER = (True, False, False, True)
NUM_ORDERS, REQUESTS, TOGETHER = 9, 3200, 32
SETTLE_S = 1.3  # the threads gather for up to a second
PACKAGES = ("bentoml", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "orjson")
CASES: dict[str, dict[str, object]] = {
    "access log of every request": {"access_log_sampling_rate": 1.0},
    "traces of 1 %, the default": {"tracing_sampling_rate": 0.01},
    "both, as by default": {"access_log_sampling_rate": 1.0, "tracing_sampling_rate": 0.01},
}


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand for BentoML's application."""


async def _answer(application: Application, body: bytes) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def pass_on(label: str) -> None:
        raise AssertionError(label)

    headers = {b"content-type": b"image/png", b"content-length": str(len(body)).encode()}
    request = Request(
        new_request_id(),
        "POST",
        "/predict",
        b"",
        headers,
        RequestBody(receive),
        time.perf_counter(),
    )
    response = await application.respond(request, pass_on)
    assert response is not None
    assert response.status == 200, response.body


async def _block(application: Application, body: bytes) -> float:
    """µs of processor time for each request, those of all threads included."""
    before = time.process_time()
    for _ in range(REQUESTS // TOGETHER):
        await asyncio.gather(*(_answer(application, body) for _ in range(TOGETHER)))
    await asyncio.sleep(SETTLE_S)
    return (time.process_time() - before) / REQUESTS * 1e6


async def _measure(folder: Path, url: str, sampled: dict[str, object]) -> dict[bool, list[float]]:
    """The costs on and off, one of each for every order."""
    own: dict[str, Any] = {
        "bundle": folder / "bundle",
        "certificate": folder / "certificate.json",
        "state": folder / "state",
        "monitoring": "false",
        # A machine with other load must not look like an overload of the service.
        "max_wait_s": 600,
        "request_timeout_s": 600,
        **sampled,
    }
    if "access_log_sampling_rate" in sampled:
        own["access_log_directory"] = folder / "access"
    if "tracing_sampling_rate" in sampled:
        own["tracing_endpoint"] = url
    environment = {f"SLIPWAY_{name.upper()}": str(value) for name, value in own.items()}
    worker = ModelWorker(read_settings(SECTIONS, environment), EXTENSIONS)
    worker.start()
    await worker.loaded()
    application, body = Application(_nothing, worker, "only"), picture()
    everyone = worker._on_response
    costs: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(2):
            await _block(application, body)  # warm-up
        for _ in range(NUM_ORDERS):
            found: dict[bool, list[float]] = {True: [], False: []}
            for is_on in ORDER:
                worker._on_response = everyone if is_on else ()
                found[is_on].append(await _block(application, body))
            for is_on, values in found.items():
                costs[is_on].append(sum(values) / len(values))
    finally:
        worker._on_response = everyone
        await worker.stop()
    return costs


def compared(what: str, costs: dict[bool, list[float]]) -> str:
    """A line of the table. The 95 % interval of the median ratio comes from order statistics."""
    ratios = sorted(on / off for on, off in zip(costs[True], costs[False], strict=True))
    around, reach = len(ratios) / 2, 0.98 * math.sqrt(len(ratios))
    low = ratios[max(0, math.floor(around - reach))]
    high = ratios[min(len(ratios) - 1, math.ceil(around + reach))]
    return (
        f"| {what} | {median(costs[False]):.1f} | {median(costs[True]):.1f} | "
        f"{median(ratios):.3f} ({low:.3f} to {high:.3f}) |"
    )


def main() -> None:
    lines = [
        "| | off, µs | on, µs | ratio of neighbours, median (95 % interval) |",
        "|---|---|---|---|",
    ]
    for name, sampled in CASES.items():
        with tempfile.TemporaryDirectory() as temporary, collector() as (url, _):
            folder = Path(temporary)
            certify(folder / "certificate.json", write_bundle(folder / "bundle"))
            lines.append(compared(name, asyncio.run(_measure(folder, url, sampled))))
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    text = (
        "# Overhead of access log and traces\n\n"
        "Processor time of a worker for each request, without reading HTTP and sockets. A tiny "
        f"linear graph on 8x8 RGB PNGs.\n\n{table}\n\n"
        f"{TOGETHER} requests at a time, n = {NUM_ORDERS} times four blocks of {REQUESTS}, on, "
        f"off, off, on; monitoring off. The collector shares the process, so its work counts too. "
        f"{conditions(*PACKAGES)}\n"
    )
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
