"""An int8 graph is held to what it answers itself, so that its sets and its outliers keep what they promise."""

import numpy as np
import pytest

from slipway.artifacts.uncertainty import Calibration
from slipway.export.thresholds import own_thresholds
from slipway.export.variants import run_in_batches
from slipway.runtimes.runtime import open_onnx
from slipway.training.batches.row_selection import select
from slipway.training.uncertainty.calibrating import fitting_half
from tests.export.conftest import RESAMPLING, Project


def asked(project: Project, outlier_share: float) -> Calibration:
    """The project's calibration, with a share for which its few validation rows are enough."""
    found = project.calibration()
    return found.model_copy(update={"outlier": found.outlier.model_copy(update={"share": outlier_share})})


def test_of_the_fp32_graph_the_thresholds_are_the_networks(classifier: Project) -> None:
    bundle, calibration = classifier.bundle(), classifier.calibration()
    found = own_thresholds(bundle.model_bytes("fp32"), calibration, classifier.task, classifier.split("val"), RESAMPLING.seed)
    assert found.conformal.threshold == pytest.approx(calibration.conformal.threshold, abs=1e-5)
    assert (found.conformal.rows, found.outlier.rows) == (calibration.conformal.rows, calibration.outlier.rows)
    assert found.temperature == calibration.temperature


@pytest.mark.parametrize("variant", ["int8", "int8_tensorrt"])
def test_no_more_rows_than_promised_are_outliers_of_an_int8_graph(classifier: Project, variant: str) -> None:
    graph, val, share = classifier.bundle().model_bytes(variant), classifier.split("val"), 0.2
    found = own_thresholds(graph, asked(classifier, share), classifier.task, val, RESAMPLING.seed)
    held_out = val.inputs[np.flatnonzero(~fitting_half(val.keys, RESAMPLING.seed))]
    answers = run_in_batches(open_onnx(graph, variant=variant, precision="int8", provider="cpu", num_threads=1), held_out, 32)
    assert 0 < found.is_outlier(answers.scores).mean() <= share


def test_in_a_bundle_int8_has_its_own_and_the_others_the_networks(classifier: Project, regressor: Project) -> None:
    for project in (classifier, regressor):
        models, shared = project.bundle().manifest.models, project.calibration()
        assert models["fp32"].calibration is models["fp16"].calibration is None
        for variant in ("int8", "int8_tensorrt"):
            own = models[variant].calibration
            assert own is not None
            assert (own.temperature, own.outlier.statistics_sha256) == (shared.temperature, shared.outlier.statistics_sha256)
            assert own.conformal.threshold != shared.conformal.threshold


def test_without_a_row_that_nothing_was_fitted_on_nothing_is_promised(classifier: Project) -> None:
    calibration, val = classifier.calibration(), classifier.split("val")
    fitted = np.flatnonzero(fitting_half(val.keys, RESAMPLING.seed))
    few = select([val], fitted, classifier.bundle().manifest.input.shape)
    assert own_thresholds(classifier.bundle().model_bytes("int8"), calibration, classifier.task, few, RESAMPLING.seed) == calibration
