"""Refits an int8 graph's thresholds, because rounding changes OOD scores and probabilities."""

import numpy as np

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration
from slipway.data.store.packed import PackedSplit
from slipway.export.graphs.graph import onnx_answers
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Resampling, fraction_of
from slipway.metrics.uncertainty import with_thresholds
from slipway.training.uncertainty.calibration import fitting_half


def own_thresholds(
    graph: bytes, calibration: Calibration, task: Task, validation: PackedSplit, seed: int
) -> Calibration:
    """Refit the thresholds of `calibration` to the outputs of an int8 graph on the CPU.

    Uses the validation rows on which `evaluate` fitted the thresholds of the network.
    """
    rows = np.flatnonzero(~fitting_half(validation.keys, seed))
    if not len(rows):
        return calibration  # the thresholds in it promise nothing either
    answers = onnx_answers(graph, validation.inputs[rows])
    targets = validation.targets[rows]
    return with_thresholds(task, calibration, answers, targets)


def own_coverage(
    graph: bytes, calibration: Calibration, task: Task, test: PackedSplit, resampling: Resampling
) -> Metric | None:
    """Return the fraction of test rows whose prediction set or interval contains the true target.

    Returns None if the calibration has neither.
    """
    outputs = onnx_answers(graph, test.inputs).outputs
    uncertainty = kind_of(task).target.load_part("uncertainty")
    held = uncertainty.is_held(calibration, outputs, test.targets)
    return None if held is None else fraction_of(held, resampling.confidence)
