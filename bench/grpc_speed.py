"""Compares rows per second over gRPC and HTTP: `python -m bench.grpc_speed`.

Triton's clients send the same batches of pixels by both protocols, in turns, to one service of a
small network. Several threads of one process send them, on the cores of the service.

`python -m bench.grpc_speed gateway` sends single calls to the gRPC port of the gateway and to that
of the service behind it, in turns, and writes bench/results/grpc_gateway.md.
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
_PROTOCOLS = "The Open Inference Protocol over gRPC and HTTP"
THREADS, ROUNDS, SECONDS = 4, 7, 3.0
BATCHES = (1, 8, 64)
PAIRS = 1000  # calls to each of the two ports, in turns


def tensor_of(rows: int, module: Any) -> Any:
    """Return a batch of random pixels as the input of a client in `module`."""
    pixels = np.random.default_rng(0).integers(0, 256, (rows, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    tensor = module.InferInput("image", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    return tensor


def rate(make_client: Callable[[], Any], module: Any, rows: int) -> float:
    """Return the rows per second of one round."""
    tensor = tensor_of(rows, module)
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


def compare_protocols(folder: Path) -> list[str]:
    """Compare HTTP and gRPC of one service, all batch sizes, in turns; return the table."""
    lines = [
        "| Rows of a request | HTTP, rows/s | gRPC, rows/s | gRPC to HTTP | Lowest to highest |",
        "|---|---|---|---|---|",
    ]
    port = free_port()
    with ready_service(folder, grpc_port=port) as server:
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
    rounds = f"{ROUNDS} rounds of {SECONDS:.0f} s each, medians; {THREADS} threads of one client on"
    return [*lines, "", f"{rounds} the cores of the service. {_conditions()}"]


def compare_gateway(folder: Path) -> list[str]:
    """Compare the gRPC port of a service with the gateway's port in front; return the table."""
    lines = [
        "| Rows of a request | Service, ms | Gateway, ms | Difference, ms | Its quartiles |",
        "|---|---|---|---|---|",
    ]
    port = free_port()
    write_models(folder, images=None)
    with running_gateway(folder, "--grpc-port", str(port)) as server:
        server.wait("/models/images/readyz")
        (service,) = psutil.Process(server.process.pid).children()
        ports = (service.environ()["SLIPWAY_GRPC_PORT"], port)
        clients = [grpc.InferenceServerClient(f"127.0.0.1:{one}") for one in ports]
        for rows in BATCHES:
            tensor = tensor_of(rows, grpc)
            pairs = [[seconds_of(one, tensor) for one in clients] for _ in range(PAIRS + 20)][20:]
            medians = [1000 * statistics.median(column) for column in zip(*pairs, strict=True)]
            low, middle, high = statistics.quantiles(
                [1000 * (second - first) for first, second in pairs], n=4
            )
            lines.append(
                f"| {rows} | {medians[0]:.2f} | {medians[1]:.2f} | {middle:.2f} "
                f"| {low:.2f} to {high:.2f} |"
            )
            print(lines[-1], flush=True)
    return [*lines, "", f"{PAIRS} pairs of calls by one client, medians. {_conditions()}"]


def seconds_of(client: grpc.InferenceServerClient, tensor: grpc.InferInput) -> float:
    """Return the time of one call."""
    begin = time.perf_counter()
    client.infer("images", [tensor])
    return time.perf_counter() - begin


def _conditions() -> str:
    return conditions("grpcio", "tritonclient", "bentoml")


def main() -> None:
    """Measure one of the two comparisons, and write its table."""
    is_gateway = sys.argv[1:] == ["gateway"]
    name = "grpc_gateway" if is_gateway else "grpc_speed"
    title = "gRPC through the gateway" if is_gateway else _PROTOCOLS
    with tempfile.TemporaryDirectory() as folder:
        lines = (compare_gateway if is_gateway else compare_protocols)(Path(folder))
    files.write_text(RESULTS / f"{name}.md", "\n".join([f"# {title}", "", *lines, ""]))


if __name__ == "__main__":
    main()
