"""Thresholds of a graph whose answers are not the trained network's: rounding moves every outlier score and every probability."""

import numpy as np

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.export.graphs.quantization import largest_batch
from slipway.export.graphs.variants import run_in_batches
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.scores import Resampling
from slipway.metrics.uncertainty import with_thresholds
from slipway.reports.evaluation.uncertainty import share_of
from slipway.runtimes.runtime import open_onnx
from slipway.training.uncertainty.calibration import fitting_half


def own_thresholds(
    graph: bytes, calibration: Calibration, task: Task, validation: PackedSplit, seed: int
) -> Calibration:
    """`calibration` with the thresholds of what an int8 graph answers on the CPU to the validation rows that evaluate took for them."""
    rows = np.flatnonzero(~fitting_half(validation.keys, seed))
    if not len(rows):
        return calibration  # whose thresholds promise nothing either
    answers = _answers(graph, validation.inputs[rows])
    return with_thresholds(
        calibration, answers, validation.targets[rows], of_classes=is_classification(task)
    )


def own_coverage(
    graph: bytes, calibration: Calibration, task: Task, test: PackedSplit, resampling: Resampling
) -> Metric | None:
    """The share of the test rows whose set or interval, with the graph's own `calibration`, holds the truth; None without intervals."""
    outputs = _answers(graph, test.inputs).outputs
    held = calibration.holds_truth(outputs, test.targets, of_classes=is_classification(task))
    return None if held is None else share_of(held, resampling.confidence)


def _answers(graph: bytes, inputs: Inputs) -> Answers:
    runner = open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=0)
    return run_in_batches(runner, inputs, largest_batch(graph))
