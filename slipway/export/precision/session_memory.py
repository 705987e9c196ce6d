"""What a graph takes of a process's memory: a fresh one loads it, answers one batch and tells its own peak.

Counted is what the process grows by once ONNX Runtime is imported: the file's own bytes, the weights as the session keeps them, its
arena, and what it then touches of the library for the first time. The interpreter is not in it.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.runtimes.runtime import open_onnx
from slipway.system.errors import BundleError

_STATUS = Path("/proc/self/status")


def session_peak_bytes(graph: Path, batch: NDArray[Any]) -> int | None:
    """Bytes that loading `graph` on the CPU and one run of `batch` add to a process at most; None where the system does not tell."""
    try:
        # A new interpreter, because a fork begins with the memory of this process.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_grow, graph, batch).result()
    except BrokenProcessPool as error:
        raise BundleError(
            f"the process that loaded {graph.name} was ended. Is there enough memory for it?"
        ) from error


def _grow(graph: Path, batch: NDArray[Any]) -> int | None:
    import_onnxruntime()  # before the first figure

    before = _status_bytes("VmRSS")
    open_onnx(
        graph.read_bytes(), variant=graph.stem, precision="", provider="cpu", num_threads=0
    ).run(np.ascontiguousarray(batch))
    # Not `ru_maxrss`, which begins with the peak of the process that started this one.
    peak = _status_bytes("VmHWM")
    return peak - before if before and peak else None


def _status_bytes(key: str) -> int:
    """A size of /proc/self/status; 0 where there is none."""
    if not _STATUS.exists():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
