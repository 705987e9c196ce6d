"""Measures the start and the memory of the service, with the digits bundle and one CPU worker.

`python -m bench.serving_start` starts the service repeatedly on this machine with the bundle of the
last `dvc repro`, and prints and writes one table. Start: from the command to the first 200 of
/readyz. Memory: VmRSS of both processes after 100 predictions.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pyarrow.parquet as pq

from bench.conditions import conditions
from bench.serving_overhead import PACKAGES
from slipway.artifacts.bundle import load_bundle
from slipway.system import files
from tests.serving.server import ROOT, running

NUM_ROUNDS = 9
NUM_PREDICTIONS = 100
RESULT = Path("bench/results/serving_start.md")
ARTIFACTS = ROOT / "artifacts"


def seconds_to_import(module: str) -> float:
    """Return the seconds of one import in a fresh interpreter, without the interpreter's start."""
    code = (
        f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - "
        "start)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )


def started(folder: Path, payload: bytes) -> dict[str, float]:
    """Measure one start: seconds until alive and until ready, MB of the worker and the server."""
    bundle, certificate = ARTIFACTS / "bundle", ARTIFACTS / "certificate.json"
    begin = time.perf_counter()
    with running(folder, provider="cpu", bundle=bundle, certificate=certificate) as server:
        server.wait("/livez")
        alive = time.perf_counter() - begin
        server.wait("/readyz")
        ready = time.perf_counter() - begin
        with httpx.Client(base_url=server.url, headers={"content-type": "image/png"}) as client:
            for _ in range(NUM_PREDICTIONS):
                client.post("/predict", content=payload).raise_for_status()
        assert "/torch/" not in Path(f"/proc/{server.worker()}/maps").read_text()
        return {
            "alive": alive,
            "ready": ready,
            "worker": resident_mb(server.worker()),
            "server": resident_mb(server.process.pid),
        }


def resident_mb(process: int) -> float:
    """Return the VmRSS of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found.group(1)) * 1024 / 1e6


def line(name: str, values: list[float], form: Callable[[float], str]) -> str:
    return (
        f"| {name} | {form(statistics.median(values))} | {form(min(values))} | "
        f"{form(max(values))} |"
    )


def main() -> None:
    if not (ARTIFACTS / "certificate.json").is_file():
        sys.exit(
            f"error: {ARTIFACTS}/certificate.json is not there, expected the certified digits "
            "bundle. Run `dvc repro` first."
        )
    payload = pq.read_table("data/demo/digits.parquet", columns=["image"])["image"][0].as_py()[
        "bytes"
    ]
    imports, starts = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(NUM_ROUNDS):
            imports.append(seconds_to_import("slipway.serving.service"))
            starts.append(started(Path(temporary), payload))

    def seconds(value: float) -> str:
        return f"{value:.2f} s"

    def megabytes(value: float) -> str:
        return f"{value:.0f} MB"

    rows = [
        "| | median | lowest | highest |\n|---|---|---|---|",
        line("`import slipway.serving.service`", imports, seconds),
        line("command to `/livez`", [start["alive"] for start in starts], seconds),
        line("command to `/readyz`", [start["ready"] for start in starts], seconds),
        line(
            f"resident, worker, after {NUM_PREDICTIONS} predictions",
            [start["worker"] for start in starts],
            megabytes,
        ),
        line(
            "resident, BentoML's server process", [start["server"] for start in starts], megabytes
        ),
    ]
    about = f"n = {NUM_ROUNDS}. Digits bundle {load_bundle(ARTIFACTS / 'bundle').version}"
    text = (
        "# Serving start\n\n"
        + "\n".join(rows)
        + f"\n\n{conditions(*PACKAGES)}\n"
        + f"{about}, one worker, fp32 on the CPU; no torch in its process.\n"
    )
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
