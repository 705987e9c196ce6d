"""Searches for the simplest int8 quantization of a graph whose loss is within the budget.

The search first tries quantization ranges from the smallest to the largest activation, then ranges
that clip rare values. Then it leaves the most sensitive layers in fp32: one, two, four, and so on.
Ranges and sensitivities come from training rows; the loss of each attempt is measured on validation
rows. If no attempt is within the budget, the result is the one with the smallest loss.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.leaderboard import Attempt
from slipway.export.graphs.graph import onnx_answers
from slipway.export.graphs.quantization import RANGE_METHODS, RangeMethod, StaticQuantizer

Loss = Callable[[bytes], float]
LIMIT_S = 60.0
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary
_SENSITIVITY_ROWS = 64
_MAX_FRACTION_IN_FP32 = 0.5  # fraction of the layers; beyond it little is left to gain


def search(
    quantizer: StaticQuantizer,
    fp32: bytes,
    rows: NDArray[Any],
    loss: Loss,
    budget: float,
    limit_s: float = LIMIT_S,
) -> tuple[bytes, list[Attempt]]:
    """Return the first graph whose `loss` is at most `budget`, with the list of all attempts.

    If no graph meets the budget, returns the one with the smallest loss. Only the first attempt may
    start after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    attempts: list[Attempt] = []
    graphs: list[tuple[float, bytes]] = []

    def is_enough(range_method: RangeMethod, in_fp32: list[str]) -> bool:
        graph = quantizer.graph(range_method, in_fp32)
        lost = loss(graph)
        metric_loss = lost if math.isfinite(lost) else None
        attempts.append(
            Attempt(range_method=range_method, in_fp32=in_fp32, metric_loss=metric_loss)
        )
        graphs.append((lost, graph))
        graphs[:] = [min(graphs, key=lambda found: found[0])]  # a graph may be large
        return lost <= budget + _ROUNDING

    for range_method in RANGE_METHODS:
        if (not attempts or time.monotonic() < deadline) and is_enough(range_method, []):
            break
    else:
        best = min(attempts, key=lambda attempt: attempt.loss).range_method
        order = most_sensitive_first(quantizer, best, fp32, rows, deadline)
        for power in range(int(_MAX_FRACTION_IN_FP32 * len(order)).bit_length()):
            if time.monotonic() > deadline or is_enough(best, order[: 2**power]):
                break
    return graphs[0][1], attempts


def most_sensitive_first(
    quantizer: StaticQuantizer,
    range_method: RangeMethod,
    fp32: bytes,
    rows: NDArray[Any],
    deadline: float,
) -> list[str]:
    """Sort the layers by sensitivity: the outputs' mean squared change if only one is quantized.

    Layers that were not tried before the deadline come last.
    """
    sample = rows[:_SENSITIVITY_ROWS]
    reference = onnx_answers(fp32, sample).outputs
    changes: dict[str, float] = {}
    for layer in quantizer.layers:
        if time.monotonic() > deadline:
            break
        answers = onnx_answers(quantizer.graph(range_method, only=layer), sample).outputs
        changes[layer] = float(np.square(answers.astype(np.float64) - reference).mean())
    return sorted(quantizer.layers, key=lambda layer: -changes.get(layer, 0.0))
