"""Hops and predictions for tests of the comparison."""

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.certificate import Execution, Hop
from slipway.export.certification.comparison import HopComparison, Tolerance
from slipway.export.certification.measurement import Measurement, TestRows
from slipway.metrics.scores import Resampling

RESAMPLING = Resampling(seed=1, num_samples=100, confidence=0.95)


TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")


FP16 = Execution(backend="onnxruntime", provider="cpu", precision="fp16", variant="fp16")


STRICT, BUDGET = Tolerance(max_difference=1e-5), Tolerance(max_metric_loss=0.1)


CLASSES = ["a", "b"]


IDS = [f"row{number}" for number in range(10)]


def rows(task: str = "image_classification") -> TestRows:
    targets = np.arange(10) % 2 if task == "image_classification" else np.linspace(100, 1000, 10)
    images = np.zeros((10, 1, 1, 1), dtype=np.uint8)
    return TestRows(
        task,
        CLASSES if task == "image_classification" else [],
        IDS,
        IDS,
        images,
        targets.astype(np.float64),
    )


def right() -> NDArray[np.float32]:
    """Return probabilities that predict every label right, with 0.75."""
    outputs = np.full((10, 2), 0.25, dtype=np.float32)
    outputs[np.arange(10), np.arange(10) % 2] = 0.75
    return outputs


def measured(outputs: NDArray[np.float32], actual: Execution = FP16) -> Measurement:
    return Measurement(actual, outputs, latency_ms=1.0, rows_per_second=2.0)


def compare(outputs: NDArray[np.float32], tolerance: Tolerance, actual: Execution = FP16) -> Hop:
    comparison = HopComparison(rows(), RESAMPLING)
    before = measured(right(), TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp16", FP16, measured(outputs, actual), (first, before), tolerance)


def compare_values(outputs: NDArray[np.float32], tolerance: Tolerance) -> Hop:
    comparison = HopComparison(rows("image_regression"), RESAMPLING)
    before = measured((rows("image_regression").targets + 10)[:, None].astype(np.float32), TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp16", FP16, measured(outputs), (first, before), tolerance)
