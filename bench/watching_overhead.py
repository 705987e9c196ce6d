"""What does watching cost? Requests a second, and processor time of the worker, with watching off and on, in turns.

`python -m bench.watching_overhead [smallest|small|large]...` asks two services of one bundle with a reference for drift over 32
connections on this machine, and writes one table for each bundle (bench/results/watching_overhead_smallest.md, and so on). The smallest
graph there is makes a request cost little beside the watching; small and large are those of bench/serving_speed.py. Each service is asked
for some seconds before each of its rounds, which are not counted: the watching's allowance of processor time, which it saved up while the
other service had its turn, is spent in them.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import numpy as np

from bench.conditions import conditions
from bench.serving_models import write_large, write_small
from bench.serving_overhead import Measured, http_request, started_service, table
from bench.serving_speed import LONGEST_WAIT_S, NUM_CONNECTIONS, PACKAGES, digit, measure, photograph
from slipway import files
from slipway.bundle import LoadedBundle
from slipway.drift.reference import ReferenceRows
from slipway.preprocess import ImageContract, array_from_bytes
from slipway.runtime import open_onnx
from tests.serving.test_service import cpu_seconds
from tests.serving.watched import pictures, watched_bundle, with_reference

NUM_REFERENCE, LARGEST_BATCH = 512, 32
SETTLE_S = 3.0
WATCH = {"off": False, "on": True}


class Case(NamedTuple):
    """One bundle with a reference, and what it is asked about."""

    title: str
    write: Callable[[Path], LoadedBundle]
    image: Callable[[], bytes]
    media_type: str
    num_rounds: int
    round_seconds: float


def watched(write: Callable[[Path], LoadedBundle], image: bytes) -> Callable[[Path], LoadedBundle]:
    """`write`'s bundle with a reference of noisy copies of the image that it is asked about."""

    def written(folder: Path) -> LoadedBundle:
        bundle = write(folder)
        taken = bundle.manifest.input
        assert isinstance(taken, ImageContract)
        random = np.random.default_rng(7)
        noise = random.integers(-20, 21, (NUM_REFERENCE, *taken.shape))
        rows = np.clip(array_from_bytes(image, taken).astype(np.int64) + noise, 0, 255).astype(np.uint8)
        runner = open_onnx(bundle.model_bytes("fp32"), variant="fp32", precision="fp32", provider="cpu", num_threads=0)
        answers = [runner.run(rows[begin : begin + LARGEST_BATCH]) for begin in range(0, NUM_REFERENCE, LARGEST_BATCH)]
        outputs, scores = (np.concatenate(parts) for parts in zip(*answers, strict=True))
        targets = random.integers(0, outputs.shape[1], NUM_REFERENCE).astype(np.float64)
        return with_reference(folder, bundle, ReferenceRows(rows, outputs, scores, targets))

    return written


CASES = {
    "smallest": Case("A linear graph, PNGs of 8 px", watched_bundle, lambda: pictures(1, 1)[0], "image/png", 9, 4.0),
    "small": Case("A small CNN, PNGs of 28 px", watched(write_small, digit()), digit, "image/png", 9, 4.0),
    "large": Case("resnet18, JPEGs of 224 px", watched(write_large, photograph()), photograph, "image/jpeg", 7, 15.0),
}


def looked_at(url: str) -> str:
    """What became of the rows."""
    lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith("slipway_watched_rows_total{")]
    return ", ".join(f"{float(line.split()[-1]):,.0f} {line.split(chr(34))[1]}" for line in lines)


def run_case(case: Case) -> str:
    """All rounds of one bundle, and what they say."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        folder = Path(temporary)
        case.write(folder)
        request = http_request("/predict", case.media_type, case.image())
        servers = {
            name: services.enter_context(
                started_service(folder, f"home-{name}", watch=watch, state=folder / "state", max_wait_s=LONGEST_WAIT_S)
            )
            for name, watch in WATCH.items()
        }
        all_measured = {name: Measured(f"watching {name}", server.url, request) for name, server in servers.items()}
        cpu: dict[str, list[float]] = {name: [] for name in WATCH}
        for _ in range(case.num_rounds):
            for name, server in servers.items():
                measure(Measured("not counted", server.url, request), NUM_CONNECTIONS, SETTLE_S)
                before = worker_seconds(server.url, server.worker())
                measure(all_measured[name], NUM_CONNECTIONS, case.round_seconds)
                spent, answered = (now - then for now, then in zip(worker_seconds(server.url, server.worker()), before, strict=True))
                cpu[name].append(spent / answered * 1e6)
        rates = zip(*(all_measured[name].requests_per_second for name in ("on", "off")), strict=True)
        ratios = [on / off for on, off in rates]
        spread = f"median {median(ratios):.1%}, {min(ratios):.1%} to {max(ratios):.1%}"
        costs = [on / off for on, off in zip(cpu["on"], cpu["off"], strict=True)]
        times = ", ".join(f"{name} {median(values):,.0f} µs" for name, values in cpu.items())
        lines = [
            f"# Overhead of watching\n\n{case.title}\n\n{table(list(all_measured.values()))}",
            f"Throughput with watching, of that without it in the same turn: {spread}.",
            f"Processor time of the worker for each request, median: {times}; on of off in the same turn {median(costs):.3f}, "
            f"{min(costs):.3f} to {max(costs):.3f}. Rows: {looked_at(servers['on'].url)}.",
            f"{NUM_CONNECTIONS} connections, the client on the same cores, n = {case.num_rounds} rounds of {case.round_seconds:g} s in "
            f"turns, {SETTLE_S:g} s before each not counted, one worker. {conditions(*PACKAGES)}",
        ]
        return "\n\n".join(lines) + "\n"


def worker_seconds(url: str, worker: int) -> tuple[float, float]:
    """Processor time of a worker, and the predictions it answered."""
    counted = [
        line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith('slipway_predictions_total{slot="stable"}')
    ]
    return cpu_seconds(worker), float(counted[0].split()[-1]) if counted else 0.0


def main() -> None:
    for name in sys.argv[1:] or CASES:
        text = run_case(CASES[name])
        print(text, flush=True)
        files.write_text(Path(f"bench/results/watching_overhead_{name}.md"), text)


if __name__ == "__main__":
    main()
