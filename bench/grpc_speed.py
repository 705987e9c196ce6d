"""Compares rows per second over gRPC and HTTP: `python -m bench.grpc_speed`.

Triton's clients send the same batches of pixels by both protocols, in turns, to one service of a
small network. Several threads of one process send them, on the cores of the service.

`python -m bench.grpc_speed gateway` compares the gRPC port of the gateway with that of the service
behind it, and writes bench/results/grpc_gateway.md.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tritonclient import grpc, http

from bench.conditions import conditions
from slipway.system import files
from tests.serving.bundles import SIZE_PX
from tests.serving.gateway.started import running_gateway, write_models
from tests.serving.ready_service import ready_service
from tests.serving.server import free_port

RESULTS = Path("bench/results")
THREADS, ROUNDS, SECONDS = 4, 7, 3.0
BATCHES = (1, 8, 64)


def rate(make_client: Callable[[], Any], module: Any, rows: int, model: str = "slipway") -> float:
    """Return the rows per second of one round."""
    pixels = np.random.default_rng(0).integers(0, 256, (rows, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    tensor = module.InferInput("image", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    counts = [0] * THREADS
    end = time.perf_counter() + SECONDS

    def ask(place: int) -> None:
        client = make_client()
        while time.perf_counter() < end:
            answer = client.infer(model, [tensor])
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


def compared(one: Callable[[int], float], other: Callable[[int], float]) -> list[str]:
    """Measure all batch sizes, both ways in turns; return the rows of a table."""
    lines = []
    for rows in BATCHES:
        found = [(one(rows), other(rows)) for _ in range(ROUNDS + 1)][1:]  # the first warms up
        ratios = [second / first for first, second in found]
        medians = [statistics.median(column) for column in zip(*found, strict=True)]
        lines.append(
            f"| {rows} | {medians[0]:,.0f} | {medians[1]:,.0f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def over_grpc(address: str, model: str) -> Callable[[int], float]:
    """Return a function that measures the rows per second at a gRPC port."""
    return lambda rows: rate(lambda: grpc.InferenceServerClient(address), grpc, rows, model)


def compare_protocols(folder: Path) -> list[str]:
    """Compare HTTP and gRPC of one service."""
    port = free_port()
    with ready_service(folder, grpc_port=port) as server:
        address = server.url.removeprefix("http://")
        return compared(
            lambda rows: rate(lambda: http.InferenceServerClient(address), http, rows),
            over_grpc(f"127.0.0.1:{port}", "slipway"),
        )


def compare_gateway(folder: Path) -> list[str]:
    """Compare the gRPC port of a service with the gateway's port in front of it."""
    port = free_port()
    write_models(folder, images=None)
    with running_gateway(folder, "--grpc-port", str(port)) as server:
        server.wait("/models/images/readyz")
        (service,) = psutil.Process(server.process.pid).children()
        own = service.environ()["SLIPWAY_GRPC_PORT"]
        return compared(
            over_grpc(f"127.0.0.1:{own}", "images"), over_grpc(f"127.0.0.1:{port}", "images")
        )


def main() -> None:
    """Measure one of the two comparisons, and write its table."""
    is_gateway = sys.argv[1:] == ["gateway"]
    measure, columns, title, name = (
        (compare_gateway, ("Service", "Gateway"), "gRPC through the gateway", "grpc_gateway")
        if is_gateway
        else (
            compare_protocols,
            ("HTTP", "gRPC"),
            "The Open Inference Protocol over gRPC and HTTP",
            "grpc_speed",
        )
    )
    first, second = columns
    head = (
        f"| Rows of a request | {first}, rows/s | {second}, rows/s | {second} to {first} "
        "| Lowest to highest |"
    )
    with tempfile.TemporaryDirectory() as folder:
        table = "\n".join([head, "|---|---|---|---|---|", *measure(Path(folder))])
    note = (
        f"{ROUNDS} rounds of {SECONDS:.0f} s each, medians; {THREADS} threads of one client on the "
        f"cores of the service. {conditions('grpcio', 'tritonclient', 'bentoml')}"
    )
    files.write_text(RESULTS / f"{name}.md", f"# {title}\n\n{table}\n\n{note}\n")


if __name__ == "__main__":
    main()
