"""Measures waiting and throughput at four times the capacity.

`python -m bench.overload` compares three servers of the same model: the service, the service with
only a limit of the queue, and an ordinary BentoML API. It measures them in turns, and prints and
writes one table. Requests come at random times, independent of the answers. A latency counts from
the time at which the request was due. The service has one core and the callers the other.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.conditions import conditions
from bench.serving_overhead import started
from slipway.serving.load_test.load import (
    REFUSED,
    Answer,
    by_status,
    closed_loop,
    http_request,
    latency,
    open_loop,
    run,
)
from slipway.system import files
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.server import running

NUM_ROUNDS = 5
PEAK_SECONDS, NORMAL_SECONDS, OVERLOAD_SECONDS, REST_SECONDS = 3.0, 8.0, 10.0, 4.0
FACTOR = 4
RESULT = Path("bench/results/overload.md")
LIVEZ = http_request("/livez", method="GET")
PART = (
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n'
    b"Content-Type: image/png\r\n\r\n"
)
FORM = http_request(
    body=PART + picture() + b"\r\n--b--\r\n", content_type="multipart/form-data; boundary=b"
)


@dataclass
class Measured:
    """One server, with its figures by round."""

    name: str
    peak: list[float] = field(default_factory=list)  # answers per second
    normal_ms: list[float] = field(default_factory=list)  # p99 at 80 % of the peak
    overload_ms: list[float] = field(
        default_factory=list
    )  # p99 of accepted requests, without the first second
    onset_ms: list[float] = field(default_factory=list)  # p99 of all accepted requests
    goodput: list[float] = field(default_factory=list)  # fraction of the peak
    livez_ms: list[float] = field(default_factory=list)  # p99 of /livez
    after_ms: list[float] = field(
        default_factory=list
    )  # p99 at 80 % of the peak, seconds after the overload
    other: set[str] = field(default_factory=set)  # statuses other than 200 during the overload

    def row(self) -> str:
        middle = [
            statistics.median(figures)
            for figures in (self.peak, self.normal_ms, self.overload_ms, self.onset_ms)
        ]
        ratio = statistics.median(
            over / normal for over, normal in zip(self.overload_ms, self.normal_ms, strict=True)
        )
        cells = [f"{value:,.0f}" for value in middle] + [
            f"{ratio:.1f}",
            f"{statistics.median(self.goodput):.0%}",
        ]
        cells += [
            f"{min(self.goodput):.0%}",
            f"{statistics.median(self.livez_ms):.0f}",
            f"{statistics.median(self.after_ms):.0f}",
        ]
        return f"| {self.name} | {' | '.join(cells)} | {', '.join(sorted(self.other))} |"


async def _load(
    url: str, rate: float, seconds: float, seed: int
) -> tuple[list[Answer], list[Answer]]:
    return await asyncio.gather(
        open_loop(url, lambda number: FORM, rate, seconds, seed),
        open_loop(url, lambda number: LIVEZ, 20, seconds, seed + 1),
    )


def measure(measured: Measured, url: str, seed: int) -> None:
    """Measure one more round."""
    run(closed_loop(url, lambda number: FORM, 32, seconds=1))
    answers = run(closed_loop(url, lambda number: FORM, 32, seconds=PEAK_SECONDS))
    peak = by_status(answers)[200] / PEAK_SECONDS
    normal, _ = run(_load(url, 0.8 * peak, NORMAL_SECONDS, seed))
    overload, livez = run(_load(url, FACTOR * peak, OVERLOAD_SECONDS, seed))
    began = min(answer.due for answer in overload)
    time.sleep(REST_SECONDS)
    after, _ = run(_load(url, 0.8 * peak, REST_SECONDS, seed))
    lasting = [answer for answer in overload if answer.due > began + 1]
    measured.peak.append(peak)
    measured.normal_ms.append(1000 * latency(normal))
    measured.overload_ms.append(1000 * latency(lasting))
    measured.onset_ms.append(1000 * latency(overload))
    measured.goodput.append(by_status(overload)[200] / OVERLOAD_SECONDS / peak)
    measured.livez_ms.append(1000 * latency(livez))
    measured.after_ms.append(1000 * latency(after))
    measured.other |= {
        "broken connections" if status == REFUSED else str(status)
        for status in by_status(overload)
        if status != 200
    }


@contextmanager
def serving(name: str, folder: Path) -> Iterator[str]:
    if name == "an ordinary BentoML API":
        with started("bench.stock_service:Stock", folder) as url:
            yield url
        return
    settings: dict[str, Any] = {} if name == "the service" else {"max_wait_s": 600}
    with running(folder, num_threads=1, **settings) as server:
        server.wait()
        yield server.url


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROUNDS
    names = ["the service", "the service with SLIPWAY_MAX_QUEUE alone", "an ordinary BentoML API"]
    all_measured = [Measured(name) for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        certify(folder / "certificate.json", write_bundle(folder / "bundle", slow_classifier(24)))
        for number in range(num_rounds):
            for measured in all_measured:
                with serving(measured.name, folder) as url:
                    httpx.get(url + "/livez")
                    measure(measured, url, seed=number)
    head = (
        "| Served by | peak, answers/s | p99 ms at 80 % | p99 ms of the accepted at 400 % | the "
        "first second included | ratio "
        "| goodput of the peak | lowest | `/livez` p99 ms | p99 ms at 80 % afterwards | other "
        "answers |"
    )
    lines = [head, "|" + "---|" * 11, *(measured.row() for measured in all_measured)]
    notes = (
        f"n = {num_rounds} rounds in turns, medians, each with a new process: peak over 32 "
        "connections in a closed loop, then random "
        f"arrivals (Poisson) at 80 %, at {FACTOR} times the peak for {OVERLOAD_SECONDS:g} s, and "
        "after a rest at 80 %. A model of several "
        "milliseconds for an image that batches do not help, one thread. "
        f"{conditions('bentoml', 'uvicorn', 'uvloop', 'onnxruntime-gpu')}"
    )
    text = "# Overload\n\n" + "\n".join(lines) + f"\n\n{notes}\n"
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
