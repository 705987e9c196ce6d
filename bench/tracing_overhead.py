"""Measures the cost of access log and traces: processor time of a worker for each request.

`python -m bench.tracing_overhead` asks models in short turns, with and without access log and
traces. The models are a tiny graph, a small network at 28 px and resnet18 at 224 px. Processor time
depends far less on other load than request rates do. There are two tables:

* With HTTP: a service gets requests over 32 connections (bench/tracing_service.py), and all
  processor time of its worker counts. A user pays this.
* Without HTTP: an application in this process answers requests that do not come from sockets. HTTP
  would add the same time to both sides, so the relative cost is higher than in a service.

The threads that write lines and export spans finish the work of earlier turns, so their time is
taken from all turns together. The base is the time of all threads without both, including those of
the model.
"""

import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop
from starlette.types import Message, Receive, Scope, Send

from bench import serving_models
from bench.conditions import conditions
from bench.serving_overhead import Measured, http_request, one_round
from bench.tracing_service import FILE, ORDER, TURN_S, Turn, seconds_beside
from slipway.serving.app import Application
from slipway.serving.extensions import EXTENSIONS, SECTIONS
from slipway.serving.http.request_body import RequestBody
from slipway.serving.http.routes import Request, new_request_id
from slipway.serving.process.worker_process import freeze_gc, set_switch_interval
from slipway.serving.settings import read_settings
from slipway.serving.worker import ModelWorker
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import running
from tests.serving.tracing.test_extension import collector

RESULT = Path("bench/results/tracing_overhead.md")
SETTLE_S = 5.3  # the threads gather for up to five seconds
NUM_CONNECTIONS, NUM_FOURS, WARM_UP_S = 32, 60, 2.0
PACKAGES = ("bentoml", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "orjson")
CASES: dict[str, dict[str, object]] = {
    "access log of every request": {"access_log_sampling_rate": 1.0},
    "access log of 10 %, the default": {"access_log_sampling_rate": 0.1},
    "traces, as by default": {"tracing_sampling_rate": 0.01},
    "both, the log of every request": {
        "access_log_sampling_rate": 1.0,
        "tracing_sampling_rate": 0.01,
    },
    "both, as by default": {"access_log_sampling_rate": 0.1, "tracing_sampling_rate": 0.01},
}


class Load(NamedTuple):
    """One model, its request, and the number of requests."""

    name: str
    write: Callable[[Path], object]  # bundle and certificate into a folder
    body: bytes
    together: int  # concurrent requests
    num_requests: int  # requests in a turn
    num_pairs: int  # pairs of turns, one with and one without


def _tiny(folder: Path) -> None:
    certify(folder / "certificate.json", write_bundle(folder / "bundle"))


LOADS = (
    Load("tiny linear graph, 8 px", _tiny, picture(), 32, 640, 60),
    Load("small CNN, 28 px", serving_models.write_small, picture(0, (28, 28)), 32, 640, 40),
    Load("resnet18, 224 px", serving_models.write_large, picture(0, (224, 224)), 4, 8, 20),
)


class Costs(NamedTuple):
    """Processor time of a request in µs."""

    base: float  # all threads, without access log and traces
    more: tuple[float, float, float]  # added to the other threads: median and 95 % interval
    beside: float  # of the threads that write lines and export spans

    @property
    def share(self) -> float:
        """Total cost as a fraction of the base."""
        return (self.more[0] + self.beside) / self.base


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing in place of BentoML's application."""


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


async def _turn(application: Application, load: Load) -> tuple[float, float]:
    """Return the µs of a request: of the event loop's thread, and of the whole process."""
    own, every = time.thread_time(), time.process_time()
    for _ in range(load.num_requests // load.together):
        await asyncio.gather(*(_answer(application, load.body) for _ in range(load.together)))
    ended = time.thread_time() - own, time.process_time() - every
    return ended[0] / load.num_requests * 1e6, ended[1] / load.num_requests * 1e6


def _settings(folder: Path, url: str, sampled: dict[str, object]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "state": folder / "state",
        "monitoring": "false",
        # Other load on the machine must not be taken for an overload of the service.
        "max_wait_s": 600,
        "request_timeout_s": 600,
        **sampled,
    }
    if "access_log_sampling_rate" in sampled:
        own["access_log_directory"] = folder / "access"
    if "tracing_sampling_rate" in sampled:
        own["tracing_endpoint"] = url
    return own


def _measure_service(folder: Path, url: str, sampled: dict[str, object], load: Load) -> Costs:
    os.environ[FILE] = str(folder / "turns.json")
    target, settings = "bench.tracing_service:Slipway", _settings(folder, url, sampled)
    with running(folder, target, **settings) as server:
        server.wait(seconds=120)
        asked = Measured("", server.url, http_request("/predict", "image/png", load.body))
        uvloop.run(one_round(asked, NUM_CONNECTIONS, WARM_UP_S + NUM_FOURS * len(ORDER) * TURN_S))
    turns = [Turn(*one) for one in json.loads((folder / "turns.json").read_text())]
    asked_in = [place for place, turn in enumerate(turns) if turn.answered]
    begin = asked_in[0] + math.ceil(WARM_UP_S / TURN_S)
    begin += -begin % len(ORDER)
    turns = turns[begin : asked_in[-1] // len(ORDER) * len(ORDER)]
    bases, differences = [], []
    for first in range(0, len(turns), len(ORDER)):
        four = turns[first : first + len(ORDER)]
        found = {is_on: _per_answer(four, is_on) for is_on in (True, False)}
        bases.append(found[False])
        differences.append(found[True] - found[False])
    beside = sum(turn.beside_s for turn in turns) * 1e6
    answered = sum(turn.answered for turn in turns if turn.is_on)
    return Costs(median(bases), _interval(differences), beside / answered)


def _per_answer(turns: list[Turn], is_on: bool) -> float:
    """µs of processor time for each answer, without the threads of the two."""
    own = [turn for turn in turns if turn.is_on == is_on]
    return sum(turn.process_s for turn in own) / sum(turn.answered for turn in own) * 1e6


async def _measure(folder: Path, url: str, sampled: dict[str, object], load: Load) -> Costs:
    own = _settings(folder, url, sampled) | {
        "bundle": folder / "bundle",
        "certificate": folder / "certificate.json",
    }
    environment = {f"SLIPWAY_{name.upper()}": str(value) for name, value in own.items()}
    worker = ModelWorker(read_settings(SECTIONS, environment), EXTENSIONS)
    worker.start()
    await worker.loaded()
    set_switch_interval()
    application = Application(_nothing, worker, "only")
    on = worker._readers

    async def turn(is_on: bool) -> tuple[float, float]:
        worker._readers = on if is_on else ()
        return await _turn(application, load)

    try:
        for _ in range(4):
            await turn(True)  # warm-up
        freeze_gc()
        await asyncio.sleep(SETTLE_S)
        before, differences, bases = seconds_beside(), [], []
        for pair in range(load.num_pairs):
            found = {is_on: await turn(is_on) for is_on in (pair % 2 == 0, pair % 2 == 1)}
            differences.append(found[True][0] - found[False][0])
            bases.append(found[False][1])
        await asyncio.sleep(SETTLE_S)
        beside = (seconds_beside() - before) / load.num_requests / load.num_pairs * 1e6
    finally:
        worker._readers = on
        await worker.stop()
    return Costs(median(bases), _interval(differences), beside)


def _interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by order statistics."""
    ordered = sorted(values)
    around, reach = len(ordered) / 2, 0.98 * math.sqrt(len(ordered))
    low = ordered[max(0, math.floor(around - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(around + reach))]
    return median(ordered), low, high


def described(what: str, load: Load, costs: Costs) -> str:
    """Format a line of the table."""
    more, low, high = costs.more
    return (
        f"| {what} | {load.name} | {costs.base:,.0f} | {more:.1f} ({low:.1f} to {high:.1f}) | "
        f"{costs.beside:.1f} | {100 * costs.share:.1f} % |"
    )


def table(name: str, loads: tuple[Load, ...], measure: Callable[..., Costs]) -> str:
    """Measure all cases. `name` is that of the column of the time that is needed more."""
    lines = [
        f"| | Model | base, µs | {name}, µs more (95 % interval) | threads, µs | cost |",
        "|---|---|---|---|---|---|",
    ]
    for load in loads:
        for case, sampled in CASES.items():
            with tempfile.TemporaryDirectory() as temporary, collector() as (url, _):
                folder = Path(temporary)
                load.write(folder)
                costs = measure(folder, url, sampled, load)
            lines.append(described(case, load, costs))
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    service = table("process", LOADS[:2], _measure_service)
    alone = table("event loop", LOADS, lambda *given: asyncio.run(_measure(*given)))
    turns = "; ".join(
        f"{one.name}: {one.together} at a time, {one.num_pairs} pairs of turns of "
        f"{one.num_requests} requests"
        for one in LOADS
    )
    text = (
        "# Overhead of access log and traces\n\n"
        "Processor time of a worker for each request. The base is that of all threads with both "
        "off, the model's included. The cost is the time that the rest of the process or the event "
        "loop needs more, and that of the threads that write and export, as a share of the base."
        f"\n\n## A running service, with HTTP\n\n{service}\n\n"
        f"{NUM_CONNECTIONS} connections, the client on the same cores; {NUM_FOURS} times four "
        f"turns of {TURN_S:g} s, two of each.\n\n"
        f"## Without HTTP and sockets\n\n{alone}\n\n{turns}.\n\n"
        "PNGs. Turns with and without alternate; monitoring off. "
        f"{conditions(*PACKAGES)}\n"
    )
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
