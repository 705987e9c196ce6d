"""Compares rows per second over gRPC and HTTP: `python -m bench.grpc_speed`.

Triton's clients send the same batches of pixels by both protocols, in turns, to one service of a
small network. Several threads of one process send them, on the cores of the service.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient import grpc, http

from bench.conditions import conditions
from slipway.system import files
from tests.serving.bundles import SIZE_PX
from tests.serving.ready_service import ready_service
from tests.serving.server import free_port

RESULT = Path("bench/results/grpc_speed.md")
THREADS, ROUNDS, SECONDS = 4, 7, 3.0
BATCHES = (1, 8, 64)


def rate(make_client: Callable[[], Any], module: Any, rows: int) -> float:
    """Return the rows per second of one round."""
    pixels = np.random.default_rng(0).integers(0, 256, (rows, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    tensor = module.InferInput("image", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    counts = [0] * THREADS
    end = time.perf_counter() + SECONDS

    def ask(place: int) -> None:
        client = make_client()
        while time.perf_counter() < end:
            answer = client.infer("slipway", [tensor])
            assert len(answer.as_numpy("label")) == rows
            counts[place] += rows
        client.close()

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def main() -> None:
    """Measure all batch sizes, both protocols in turns, and write the table."""
    lines = [
        "| Rows of a request | HTTP, rows/s | gRPC, rows/s | gRPC to HTTP | Lowest to highest |",
        "|---|---|---|---|---|",
    ]
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        ready_service(Path(folder), grpc_port=port) as server,
    ):
        over_http = server.url.removeprefix("http://")
        for rows in BATCHES:
            found: list[tuple[float, float]] = []
            for _ in range(ROUNDS + 1):
                first = rate(lambda: http.InferenceServerClient(over_http), http, rows)
                second = rate(lambda: grpc.InferenceServerClient(f"127.0.0.1:{port}"), grpc, rows)
                found.append((first, second))
            del found[0]  # the warm-up
            ratios = [second / first for first, second in found]
            medians = [statistics.median(column) for column in zip(*found, strict=True)]
            lines.append(
                f"| {rows} | {medians[0]:,.0f} | {medians[1]:,.0f} "
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
            )
            print(lines[-1], flush=True)
    note = (
        f"{ROUNDS} rounds of {SECONDS:.0f} s each, medians; {THREADS} threads of one client on the "
        f"cores of the service. {conditions('grpcio', 'tritonclient', 'bentoml')}"
    )
    table = "\n".join(lines)
    files.write_text(
        RESULT, f"# The Open Inference Protocol over gRPC and HTTP\n\n{table}\n\n{note}\n"
    )


if __name__ == "__main__":
    main()
