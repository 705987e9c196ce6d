"""Compares latencies while models are swapped continuously with latencies without swaps.

`python -m bench.swapping` starts the service with a network of 35 MB and swaps between two of them
at least 60 times. It sends requests over 8 connections, checks every answer against the model that
it names, and prints and writes one table. `--quick` tries a few swaps and writes nothing. The
client and the swapping command share the cores with the service.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bench.conditions import conditions
from bench.serving_overhead import Caller, http_request
from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.uncertainty import Answers
from slipway.inputs.images import array_from_bytes
from slipway.runtimes.runtime import open_onnx
from slipway.serving.rollout import commands
from slipway.serving.settings import Settings, read_settings
from slipway.system import files
from tests.serving.bundles import CONTRACT, WEIGHTS, classifier, picture
from tests.serving.rolling import write_candidate
from tests.serving.rollout.test_rollout_processes import resident_mib
from tests.serving.server import Server, environment, running

NUM_CONNECTIONS = 8
PAUSE_S = 0.01  # pause of a caller after an answer: normal load, not an overload
NUM_ROUNDS = 7
NUM_SWAPS = 9  # in a round: 63 in all
HIDDEN = 2048
RESULT = Path("bench/results/swapping.md")
ROW = picture(1)


@dataclass
class Round:
    """The answers and latencies of the callers."""

    latencies: list[float] = field(default_factory=list)  # seconds
    wrong: int = 0  # answers that differ from those of the model that they name
    versions: set[str] = field(default_factory=set)


class CheckingCaller(Caller):
    """Sends a request, checks the answer, pauses. Refusals and lost connections count as wrong."""

    def __init__(self, request: bytes, seen: Round, expected: dict[str, list[float]]) -> None:
        super().__init__(request, seen.latencies)
        self._seen, self._expected = seen, expected
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < int(
            head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        ):
            return
        self._latencies.append(time.perf_counter() - self._asked)
        self._received = b""
        self._check(json.loads(body))
        asyncio.get_running_loop().call_later(PAUSE_S, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        self._seen.wrong += not self.is_over

    def _check(self, answer: dict[str, Any]) -> None:
        version, found = (
            answer.get("model_version", "none"),
            list(answer.get("probabilities", {}).values()),
        )
        self._seen.versions.add(version)
        self._seen.wrong += not (
            version in self._expected and np.allclose(found, self._expected[version], atol=1e-5)
        )

    def _ask(self) -> None:
        if not self.is_over:
            super()._ask()


def large_classifier(seed: int) -> onnx.ModelProto:
    """Make `classifier` with two layers of HIDDEN units: a ResNet-18's size, 2 ms per row."""
    graph = classifier()
    draws = np.random.default_rng(seed)
    shapes = [
        (WEIGHTS.shape[0], HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN, WEIGHTS.shape[1]),
    ]
    layers = [(draws.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes]
    layers[0] /= np.float32(128)
    matmul = next(node for node in graph.graph.node if node.op_type == "MatMul")
    softmax = graph.graph.node.pop()
    graph.graph.node.remove(matmul)
    graph.graph.initializer.pop(0)
    taken = "flat"
    for number, layer in enumerate(layers):
        graph.graph.initializer.append(numpy_helper.from_array(layer, f"layer{number}"))
        made = "logits" if number == len(layers) - 1 else f"sum{number}"
        graph.graph.node.append(helper.make_node("MatMul", [taken, f"layer{number}"], [made]))
        if made != "logits":
            graph.graph.node.append(helper.make_node("Relu", [made], [f"hidden{number}"]))
            taken = f"hidden{number}"
    graph.graph.node.append(softmax)
    return graph


def expected_answer(bundle: Path) -> list[float]:
    """Return the bare runtime's answer to ROW."""
    runner = open_onnx(
        load_bundle(bundle).model_bytes("fp32"),
        variant="fp32",
        precision="fp32",
        provider="cpu",
        num_threads=1,
    )
    pixels: NDArray[np.uint8] = array_from_bytes(ROW, CONTRACT)
    answers: Answers = runner.run(pixels[np.newaxis])
    probabilities: list[float] = answers.outputs[0].tolist()
    return probabilities


async def _asked(
    server: Server, expected: dict[str, list[float]], is_over: threading.Event
) -> Round:
    seen, url = Round(), httpx.URL(server.url)
    request = http_request("/predict", "image/png", ROW)
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(
            lambda: CheckingCaller(request, seen, expected), url.host, url.port or 80
        )
        for _ in range(NUM_CONNECTIONS)
    ]
    await asyncio.to_thread(is_over.wait)
    for transport, caller in made:
        caller.is_over = True
        transport.abort()
    return seen


def swap_to(work: list[Path], settings: Settings, worker: int) -> tuple[list[float], list[float]]:
    """Swap to each model by the command; return the seconds and the worker's MiB after each."""
    seconds, memory = [], []
    for bundle in work:
        started = time.perf_counter()
        commands.propose(settings, "deploy", bundle)
        rollout, late = commands.wait(settings, 60)
        assert (rollout.candidate, late) == (None, []), rollout.events[-1]
        seconds.append(time.perf_counter() - started)
        memory.append(resident_mib(worker))
    return seconds, memory


def measured(
    server: Server, expected: dict[str, list[float]], swapping: Future[Any] | None
) -> Round:
    """Measure one round: as long as `swapping` takes, or for a fixed time without swaps."""
    is_over = threading.Event()
    if swapping:
        swapping.add_done_callback(lambda _: is_over.set())
    else:
        threading.Timer(NUM_SWAPS * 0.7, is_over.set).start()
    return asyncio.run(_asked(server, expected, is_over))


def main(num_rounds: int, num_swaps: int) -> str:
    """Measure all rounds and write the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundles = [write_candidate(folder / f"{seed}", large_classifier(seed)) for seed in (1, 2)]
        write_candidate(folder, large_classifier(0))
        expected = {
            load_bundle(bundle).version: expected_answer(bundle)
            for bundle in (*bundles, folder / "bundle")
        }
        settings = read_settings(
            environment={
                name: value
                for name, value in environment(folder).items()
                if name.startswith("SLIPWAY_")
            }
        )
        # The commands run in a separate process, because here they would block the callers.
        with running(folder) as server, ProcessPoolExecutor(1, get_context("spawn")) as commanding:
            server.wait()
            quiet: list[Round] = []
            swapping: list[Round] = []
            durations: list[float] = []
            memory: list[float] = []
            for _ in range(num_rounds):
                quiet.append(measured(server, expected, None))
                work = [
                    bundles[number % 2] for number in range(len(memory), len(memory) + num_swaps)
                ]
                commanding.submit(time.sleep, 0).result()  # it has started
                swaps = commanding.submit(swap_to, work, settings, server.worker())
                swapping.append(measured(server, expected, swaps))
                durations += swaps.result()[0]
                memory += swaps.result()[1]
    return report(quiet, swapping, durations, memory)


def listed(figures: list[float]) -> str:
    return ", ".join(f"{figure:.0f}" for figure in figures)


def report(
    quiet: list[Round], swapping: list[Round], durations: list[float], memory: list[float]
) -> str:
    lines = [
        (
            "| | requests | wrong or failed | p50 ms | p99 ms, median of the rounds | lowest | "
            "highest | longest ms |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    p99s = {}
    for name, rounds in (("no swap", quiet), ("swaps one after the other", swapping)):
        p50, p99 = (
            [float(np.percentile(one.latencies, share)) * 1e3 for one in rounds]
            for share in (50, 99)
        )
        p99s[name] = p99
        num_requests, wrong = (
            sum(len(one.latencies) for one in rounds),
            sum(one.wrong for one in rounds),
        )
        longest = max(max(one.latencies) for one in rounds) * 1e3
        figures = (
            f"{statistics.median(p50):.1f} | {statistics.median(p99):.1f} | {min(p99):.1f} | "
            f"{max(p99):.1f} | {longest:.0f}"
        )
        lines.append(f"| {name} | {num_requests:,} | {wrong} | {figures} |")
    quiet_p99, swapping_p99 = p99s.values()
    ratios = [after / before for after, before in zip(swapping_p99, quiet_p99, strict=True)]
    notes = (
        f"p99 while swapping is {statistics.median(ratios):.2f} times the one without (median of "
        f"{len(ratios)} rounds, "
        f"{min(ratios):.2f} to {max(ratios):.2f}). {len(durations)} swaps, each "
        f"{statistics.median(durations):.2f} s from the command "
        f"until the worker serves it (longest {max(durations):.2f} s). Memory of the worker after "
        "the first swaps "
        f"{listed(memory[:5])} MiB, after the last {listed(memory[-5:])} MiB."
    )
    where = conditions("onnxruntime-gpu", "bentoml", "uvicorn")
    megabytes = 4 * (WEIGHTS.shape[0] * HIDDEN + 2 * HIDDEN**2 + HIDDEN * 3) / 1e6
    size = (
        f"A network of {megabytes:.0f} MB, {NUM_CONNECTIONS} callers with pauses of "
        f"{PAUSE_S * 1e3:.0f} ms."
    )
    return (
        "# Swaps of models under load\n\n" + "\n".join(lines) + f"\n\n{notes}\n\n{size} {where}\n"
    )


if __name__ == "__main__":
    is_quick = "--quick" in sys.argv
    text = main(2, 3) if is_quick else main(NUM_ROUNDS, NUM_SWAPS)
    print(text)
    if not is_quick:
        files.write_text(RESULT, text)
