"""Predicts the validation rows with a trial's model, and measures its metric with an interval.

`python -m slipway.search.validation METRIC PATH`, in the folder of a trial, writes the metric to
PATH.json and the predictions to PATH.npz. The search selects by these rows only; the test rows stay
unused.
"""

import sys
from pathlib import Path

import numpy as np

from slipway.artifacts.locations import MODEL, PACKED
from slipway.config.params import load_params
from slipway.data.store.packed import open_split, read_manifest
from slipway.metrics.scores import Resampling, measure
from slipway.system import files
from slipway.system.command_run import run_command


def run() -> None:
    """Predict the validation rows; write the predictions, and the metric if it has an interval."""
    from slipway.training.networks.networks import load_network
    from slipway.training.uncertainty.prediction import default_device, predict

    metric, path = sys.argv[1], Path(sys.argv[2])
    params, manifest = load_params(), read_manifest(PACKED)
    rows = open_split(PACKED, manifest, "val", verify=True)
    settings = params.evaluate
    answers = predict(load_network(MODEL), rows.inputs, settings.batch_size, default_device())
    with files.new_file(path.with_suffix(".npz")) as file:
        np.savez(file, targets=rows.targets, outputs=answers)
    resampling = Resampling(params.seed, settings.bootstrap_samples, settings.confidence)
    found = measure(manifest.task, rows.targets, answers, resampling, top_k=settings.top_k)
    if metric in found:
        files.write_json(path.with_suffix(".json"), found[metric].model_dump(mode="json"))


if __name__ == "__main__":
    run_command(run)
