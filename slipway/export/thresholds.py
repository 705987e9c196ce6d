"""Thresholds of a graph whose answers are not the trained network's: rounding moves every outlier score and every probability."""

import numpy as np

from slipway.artifacts.uncertainty import Calibration
from slipway.data.store.packed import PackedSplit
from slipway.export.quantization import largest_batch
from slipway.export.variants import run_in_batches
from slipway.metrics.uncertainty_fitting import with_thresholds
from slipway.runtimes.runtime import open_onnx
from slipway.system.contract import Task, is_classification
from slipway.training.uncertainty.calibrating import fitting_half


def own_thresholds(graph: bytes, calibration: Calibration, task: Task, validation: PackedSplit, seed: int) -> Calibration:
    """`calibration` with the thresholds of what an int8 graph answers on the CPU to the validation rows that evaluate took for them."""
    rows = np.flatnonzero(~fitting_half(validation.keys, seed))
    if not len(rows):
        return calibration  # whose thresholds promise nothing either
    runner = open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=0)
    answers = run_in_batches(runner, validation.inputs[rows], largest_batch(graph))
    return with_thresholds(calibration, answers, validation.targets[rows], of_classes=is_classification(task))
