"""Measures the peak memory of a graph: a new process loads it and runs one batch.

The figure is the growth after ONNX Runtime is imported: the bytes of the file, the session's copy
of the weights, its arena, and library pages touched for the first time. The interpreter is not
included.
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
from slipway.system.memory import status_bytes


def session_peak_bytes(graph: Path, batch: NDArray[Any]) -> int | None:
    """Return the peak growth in bytes of a process that loads `graph` and runs `batch` on the CPU.

    None if the system does not report it.
    """
    try:
        # A new interpreter, because a fork would start with the memory of this process.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_peak_growth, graph, batch).result()
    except BrokenProcessPool as error:
        raise BundleError(
            f"the process that loaded {graph.name} was killed, probably for lack of memory. "
            "Free memory, or choose a smaller network."
        ) from error


def _peak_growth(graph: Path, batch: NDArray[Any]) -> int | None:
    import_onnxruntime()  # imported before the first measurement
    before = status_bytes("VmRSS")
    runner = open_onnx(
        graph.read_bytes(), variant=graph.stem, precision="", provider="cpu", num_threads=0
    )
    runner.run(np.ascontiguousarray(batch))
    # `ru_maxrss` would start with the peak of the process that started this one.
    peak = status_bytes("VmHWM")
    return peak - before if before and peak else None
