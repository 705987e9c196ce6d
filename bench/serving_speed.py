"""Compares the service with the bare runtime and with other servers.

`BENCH_PEERS=VENV/bin/python python -m bench.serving_speed [small|large|text]...` starts them all on
loopback, sends requests in turns over 32 connections and over one, and prints and writes one table
for each model (bench/results/serving_speed_small.md, _large.md and _text.md). BENCH_PEERS is a
Python that has litserve and fastapi (bench/serving_peers.py). Without it the table says that they
are missing. They do not serve the texts. The client shares the cores with the services.
"""

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from PIL import Image

from bench.conditions import conditions
from bench.serving_models import messages, write_large, write_small, write_text
from bench.serving_overhead import Measured, http_request, one_round
from slipway.artifacts.bundle import LoadedBundle
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.runtimes.runtime import OnnxRunner, open_onnx
from slipway.system import files
from tests.serving.server import environment, free_port

Batch = np.typing.NDArray[Any]
NUM_CONNECTIONS = 32
NUM_ROUNDS = int(os.environ.get("BENCH_ROUNDS", "0"))  # 0: as many as the case has
WARM_UP_S = 1.0  # and a third of what is measured at most
NUM_WORKERS = {"one worker": 1, "two workers": 2}
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
LONGEST_START_S = 60.0
# 32 callers of a large model wait longer than the default, which would count as overload.
LONGEST_WAIT_S = 10.0
PEERS = os.environ.get("BENCH_PEERS", "")
PACKAGES = (
    "bentoml",
    "uvicorn",
    "uvloop",
    "httptools",
    "onnxruntime-gpu",
    "starlette",
    "pillow",
    "simplejpeg",
)
PEER_PACKAGES = ("litserve", "fastapi", "starlette", "uvicorn", "onnxruntime")


@dataclass
class Case:
    """A model, the request that it is sent, and the rounds of the measurement."""

    title: str
    write: Callable[[Path], LoadedBundle]
    body: Callable[[], bytes]
    media_type: str
    round_seconds: float
    num_rounds: int  # many short rounds on a shared machine, whose speed changes within seconds


@dataclass
class Served:
    """One server, measured over many connections and over one."""

    name: str
    many: Measured
    one: Measured


@dataclass
class Bare:
    """The runtime without a service, in this process."""

    runner: OnnxRunner
    make_batch: Callable[[int], Callable[[], Batch]]  # of a size; images are decoded before
    rows_per_second: dict[int, list[float]] = field(
        default_factory=lambda: {size: [] for size in BATCH_SIZES}
    )
    one_row_ms: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        """Measure one more round over all batch sizes."""
        for size, found in self.rows_per_second.items():
            times = self._times(self.make_batch(size), seconds / len(BATCH_SIZES))
            found.append(size * len(times) / sum(times))
            if size == 1:
                self.one_row_ms.append(statistics.median(times) * 1000)

    def best(self) -> tuple[int, float]:
        """Return the batch size with the highest median of rows per second, and that median."""
        medians = {size: statistics.median(found) for size, found in self.rows_per_second.items()}
        size = max(medians, key=lambda one: medians[one])
        return size, medians[size]

    def _times(self, batch: Callable[[], Batch], seconds: float) -> list[float]:
        times: list[float] = []
        while sum(times) < seconds or len(times) < 3:
            started = time.perf_counter()
            self.runner.run(batch())
            times.append(time.perf_counter() - started)
        return times


def photograph() -> bytes:
    """Make a JPEG of 224 px with the detail of a photograph: smooth noise, quality 90."""
    coarse = Image.fromarray(np.random.default_rng(7).integers(0, 256, (56, 56, 3), dtype=np.uint8))
    stream = io.BytesIO()
    coarse.resize((224, 224), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def digit() -> bytes:
    """Make a grey PNG of 28 px, a few strokes on black."""
    pixels = np.zeros((28, 28), dtype=np.uint8)
    pixels[4:24, 12:16], pixels[4:8, 8:20] = 200, 255
    pixels[10:24, 12:16] += np.random.default_rng(7).integers(0, 50, (14, 4), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def message() -> bytes:
    """Return the JSON body with a message of usual length."""
    texts = sorted(messages(), key=len)
    return json.dumps({"text": texts[len(texts) // 2]}).encode()


def image_batch(taken: ImageContract, size: int) -> Callable[[], Batch]:
    """Return (size, ...) random pixels."""
    pixels = np.random.default_rng(size).integers(0, 256, (size, *taken.shape), dtype=np.uint8)
    return lambda: pixels


def text_batch(taken: TextContract, size: int) -> Callable[[], Batch]:
    """Return a function that tokenises a batch of `size` messages."""
    rows = [json.loads(message())] * size
    longest = np.count_nonzero(encode_texts([read_text(rows[0], taken)], taken))

    def batch() -> Batch:
        texts = [read_text(row, taken) for row in rows]
        return np.ascontiguousarray(encode_texts(texts, taken)[:, :longest])

    return batch


CASES = {
    "small": Case("A small CNN, PNGs of 28 px", write_small, digit, "image/png", 0.7, 31),
    "large": Case("resnet18, JPEGs of 224 px", write_large, photograph, "image/jpeg", 10.0, 7),
    "text": Case("A transformer on tokens", write_text, message, "application/json", 4.0, 9),
}


@contextmanager
def started(command: list[str], variables: dict[str, str], url: str, log: Path) -> Iterator[None]:
    """Start a server in its own session, wait for its answer, and end the session afterwards."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + LONGEST_START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} is not ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):  # LitServe leaves its workers behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code < 500
    except httpx.TransportError:
        return False


def form(field_name: str, image: bytes, media_type: str) -> bytes:
    """Build a request with the image as a file of a form."""
    head = (
        f'--b\r\nContent-Disposition: form-data; name="{field_name}"; filename="x"\r\n'
        f"Content-Type: {media_type}\r\n\r\n"
    )
    return http_request(
        "/predict", "multipart/form-data; boundary=b", head.encode() + image + b"\r\n--b--\r\n"
    )


def start_all(case: Case, folder: Path, bundle: LoadedBundle, services: ExitStack) -> list[Served]:
    """Start every server that is available here; yield each with its request."""
    image = case.body()
    peer = {
        "PEER_BUNDLE": str(bundle.root),
        "PEER_CONTRACT": bundle.manifest.input.model_dump_json(),
        "PEER_INPUT": bundle.manifest.input_name,
        "PEER_OUTPUT": bundle.manifest.output_name,
        "PYTHONPATH": str(Path.cwd()),
    }

    def start(
        name: str,
        command: list[str],
        request: bytes,
        ready: str = "/readyz",
        num_peer_workers: int = 1,
        **settings: object,
    ) -> Served:
        url = f"http://127.0.0.1:{free_port()}"
        variables = (
            environment(folder, **settings)
            | peer
            | {"PEER_WORKERS": str(num_peer_workers)}
            | {"BENTOML_HOME": str(folder / name.replace(" ", "_").replace("/", "_"))}
        )
        filled = [url.rpartition(":")[2] if part == "PORT" else part for part in command]
        services.enter_context(started(filled, variables, url + ready, folder / "log"))
        return Served(name, Measured(name, url, request), Measured(name, url, request))

    bentoml = [sys.executable, "-m", "bentoml", "serve"]
    body = http_request("/predict", case.media_type, image)
    ours = [*bentoml, "slipway.serving.service:Slipway", "--port", "PORT"]
    found = [
        *(
            start(f"Slipway, {words}", ours, body, workers=number, max_wait_s=LONGEST_WAIT_S)
            for words, number in NUM_WORKERS.items()
        ),
        start(
            "an empty ASGI application",
            [sys.executable, "-m", "bench.serving_peers", "empty", "PORT"],
            body,
            "/",
        ),
    ]
    if not case.media_type.startswith("image/"):
        return found  # the peers take images
    asked = form("images", image, case.media_type)
    batchable = [*bentoml, "bench.batchable_service:Batchable", "--port", "PORT"]
    for words, number in NUM_WORKERS.items():
        name = f"BentoML, a batchable API, {words}"
        found.append(start(name, batchable, asked, num_peer_workers=number))
    if PEERS:
        asked = form("image", image, case.media_type)
        litserve = [PEERS, "-m", "bench.litserve_peer", "PORT"]
        for words, number in NUM_WORKERS.items():
            name = f"LitServe, batches, {words}"
            found.append(start(name, litserve, asked, "/health", num_peer_workers=number))
        found.append(
            start(
                "FastAPI, one worker",
                [PEERS, "-m", "bench.serving_peers", "fastapi", "PORT"],
                asked,
            )
        )
    return found


def measure(measured: Measured, num_connections: int, seconds: float) -> None:
    """Measure one more round, after a short warm-up."""
    uvloop.run(one_round(measured, num_connections, min(WARM_UP_S, seconds / 3)))
    latencies = uvloop.run(one_round(measured, num_connections, seconds))
    if not latencies:
        raise RuntimeError(f"{measured.name} answered nothing in {seconds:g} s")
    measured.requests_per_second.append(len(latencies) / seconds)
    percentiles = (
        statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [float("nan")] * 99
    )
    measured.p50_ms.append(percentiles[49] * 1000)
    measured.p99_ms.append(percentiles[98] * 1000)


def ratio(served: Served, other: list[float]) -> str:
    """Format the ratios of requests per second in the same round: median and quartiles."""
    low, middle, high = statistics.quantiles(
        [mine / its for mine, its in zip(served.many.requests_per_second, other, strict=True)]
    )
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(all_served: list[Served], bare: Bare) -> str:
    """Format one row for each way of serving."""
    size, _ = bare.best()
    best = bare.rows_per_second[size]
    empty = next(served for served in all_served if "empty" in served.name).many.requests_per_second
    lines = [
        (
            "| Served by | requests/s | of the bare runtime | of the empty application | p50 ms | "
            "p99 ms | one connection, p50 ms |"
        ),
        "|---|---|---|---|---|---|---|",
        (
            f"| ONNX Runtime alone, batches of {size} | {_spread(best)} rows/s | 1 | | | | "
            f"{statistics.median(bare.one_row_ms):.2f} |"
        ),
    ]
    for served in all_served:
        p50, p99 = statistics.median(served.many.p50_ms), statistics.median(served.many.p99_ms)
        one = statistics.median(served.one.p50_ms)
        shares = f"{ratio(served, best)} | {ratio(served, empty)}"
        lines.append(
            f"| {served.name} | {_spread(served.many.requests_per_second)} | {shares} | {p50:.2f} "
            f"| {p99:.2f} | {one:.2f} |"
        )
    return "\n".join(lines)


def _spread(rates: list[float]) -> str:
    low, middle, high = statistics.quantiles(rates)
    digits = 0 if middle > 100 else 1
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def notes(all_served: list[Served], bare: Bare) -> str:
    """Format the ratios that have targets."""
    by_name = {served.name: served for served in all_served}
    lines = []
    for words in NUM_WORKERS:
        ours = by_name[f"Slipway, {words}"]
        for name, other in by_name.items():
            if name.endswith(words) and other is not ours:
                found = ratio(ours, other.many.requests_per_second)
                lines.append(f"* {found} times {name}")
    ours = by_name["Slipway, one worker"]
    bare_ms, empty_ms = (
        statistics.median(bare.one_row_ms),
        statistics.median(by_name["an empty ASGI application"].one.p50_ms),
    )
    extra = statistics.median(ours.one.p50_ms) - bare_ms - empty_ms
    lines.append(
        f"* one connection: {extra:.2f} ms above the bare call ({bare_ms:.2f} ms) and the empty "
        f"request ({empty_ms:.2f} ms)"
    )
    return "Slipway, each ratio of the same round and as many workers:\n\n" + "\n".join(lines)


def run_case(case: Case) -> str:
    """Run all rounds of one model; return its table."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        folder = Path(temporary)
        bundle = case.write(folder)
        taken = bundle.manifest.input
        assert isinstance(taken, (ImageContract, TextContract))
        bare = Bare(
            open_onnx(
                bundle.model_bytes("fp32"),
                variant="fp32",
                precision="fp32",
                provider="cpu",
                num_threads=0,
            ),
            partial(image_batch, taken)
            if isinstance(taken, ImageContract)
            else partial(text_batch, taken),
        )
        all_served = start_all(case, folder, bundle, services)
        num_rounds = NUM_ROUNDS or case.num_rounds
        for number in range(num_rounds):
            for served in all_served:
                measure(served.many, NUM_CONNECTIONS, case.round_seconds)
            bare.measure(case.round_seconds)
            for served in all_served:
                measure(served.one, 1, case.round_seconds / 2)
            print(f"{case.title}: round {number + 1} of {num_rounds}", flush=True)
        part = f"## {case.title}\n\n{table(all_served, bare)}\n\n{notes(all_served, bare)}\n"
        print(part, flush=True)
        return part


def peer_versions() -> str:
    """Return the versions of the peers' packages."""
    if not PEERS:
        return "LitServe and FastAPI were not there (BENCH_PEERS names no Python that has them)."
    code = (
        f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) "
        f"for n in {PEER_PACKAGES!r}}}))"
    )
    found = json.loads(subprocess.run([PEERS, "-c", code], capture_output=True, check=True).stdout)
    return "Peers: " + ", ".join(f"{name} {number}" for name, number in found.items()) + "."


def main() -> None:
    note = (
        f"Medians of rounds in which all take turns, quartiles in brackets; {NUM_CONNECTIONS} "
        "connections on "
        "loopback, the client (uvloop) on the same cores, metrics and every guard on. The empty "
        "application is uvicorn with httptools and "
        "uvloop, asked with the same bytes. Bodies are the image itself; peers take it in a form, "
        "as they ask for it. A text is a row of JSON, and the bare runtime tokenises it."
    )
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        part = run_case(case)
        length = (
            f"{NUM_ROUNDS or case.num_rounds} rounds, {case.round_seconds:g} s for each way of "
            "serving."
        )
        text = "\n".join(
            [
                f"# Speed of the service\n\n{part}",
                note,
                length,
                conditions(*PACKAGES),
                peer_versions(),
                "",
            ]
        )
        files.write_text(Path(f"bench/results/serving_speed_{name}.md"), text)


if __name__ == "__main__":
    main()
