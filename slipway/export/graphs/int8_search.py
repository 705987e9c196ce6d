"""How to quantise a graph so that it loses no more than its budget: the simplest way that does, found in bounded time.

First ranges from the smallest to the largest value, then ranges that leave rare values out, then the layers that quantising hurts
most stay in fp32: one, two, four, and so on. Ranges and the order of the layers come from training rows; what each attempt loses
is measured on validation rows. Where nothing is within the budget, the attempt that loses least is taken, and the loss is told.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.export.graphs.quantization import (
    CALIBRATORS,
    Calibrator,
    StaticQuantizer,
    largest_batch,
)
from slipway.reports.pages.leaderboard_page import Attempt, loss_of
from slipway.runtimes.runtime import open_onnx

Loss = Callable[[bytes], float]
LIMIT_S = 60.0
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary
_SENSITIVITY_ROWS = 64
_MOST_IN_FP32 = 0.5  # of the layers; beyond it little is left to gain


def search(
    quantizer: StaticQuantizer,
    fp32: bytes,
    rows: NDArray[Any],
    loss: Loss,
    budget: float,
    limit_s: float = LIMIT_S,
) -> tuple[bytes, list[Attempt]]:
    """The first graph whose `loss` is at most `budget`, else the one that loses least, and every attempt with its loss.

    No attempt but the first begins after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    attempts: list[Attempt] = []
    best: tuple[float, bytes] | None = None

    def is_enough(calibrator: Calibrator, in_fp32: list[str]) -> bool:
        nonlocal best
        graph = quantizer.graph(calibrator, in_fp32)
        lost = loss(graph)
        attempts.append(
            Attempt(
                calibrator=calibrator,
                in_fp32=in_fp32,
                metric_loss=lost if math.isfinite(lost) else None,
            )
        )
        if best is None or lost < best[0]:
            best = lost, graph
        return lost <= budget + _ROUNDING

    for calibrator in CALIBRATORS:
        if (not attempts or time.monotonic() < deadline) and is_enough(calibrator, []):
            break
    else:
        chosen = min(attempts, key=loss_of).calibrator
        order = most_sensitive_first(quantizer, chosen, fp32, rows, deadline)
        for number in _doubling(int(_MOST_IN_FP32 * len(order))):
            if time.monotonic() > deadline or is_enough(chosen, order[:number]):
                break
    assert best is not None, "the first attempt is always made"
    return best[1], attempts


def most_sensitive_first(
    quantizer: StaticQuantizer,
    calibrator: Calibrator,
    fp32: bytes,
    rows: NDArray[Any],
    deadline: float,
) -> list[str]:
    """The layers by how far the answers move, as a mean square, where that layer alone is quantised; those that time left out last."""
    some = np.ascontiguousarray(rows[:_SENSITIVITY_ROWS])
    reference = _answers(fp32, some)
    moved: dict[str, float] = {}
    for layer in quantizer.layers:
        if time.monotonic() > deadline:
            break
        answers = _answers(quantizer.graph(calibrator, only=layer), some)
        moved[layer] = float(np.square(answers.astype(np.float64) - reference).mean())
    return sorted(quantizer.layers, key=lambda layer: -moved.get(layer, 0.0))


def _answers(graph: bytes, rows: NDArray[Any]) -> NDArray[np.float32]:
    runner, size = (
        open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=0),
        largest_batch(graph),
    )
    return np.concatenate(
        [runner.run(rows[start : start + size]).outputs for start in range(0, len(rows), size)]
    )


def _doubling(largest: int) -> list[int]:
    return [2**power for power in range(largest.bit_length())]
