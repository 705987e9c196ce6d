"""Thresholds of an int8 graph are refitted to its own predictions, so that its coverage holds."""

import numpy as np
import pytest

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration
from slipway.export.precision.thresholds import own_coverage, own_thresholds
from slipway.kinds.registry import kind_of
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.training.batches.row_selection import select
from slipway.training.uncertainty.calibration import fitting_half
from tests.export.conftest import RESAMPLING, Project

pytestmark = pytest.mark.process


def asked(project: Project, ood_fraction: float) -> Calibration:
    """Return the project's calibration with an OOD fraction for which its few rows suffice."""
    found = project.calibration()
    return found.model_copy(update={"ood": found.ood.model_copy(update={"fraction": ood_fraction})})


def test_refitted_thresholds_of_the_fp32_graph_equal_those_of_the_network(
    classifier: Project,
) -> None:
    bundle, calibration = classifier.bundle(), classifier.calibration()
    found = own_thresholds(
        bundle.model_bytes("fp32"),
        calibration,
        classifier.task,
        classifier.split("val"),
        RESAMPLING.seed,
    )
    assert found.conformal.threshold == pytest.approx(calibration.conformal.threshold, abs=1e-5)
    assert (found.conformal.rows, found.ood.rows) == (
        calibration.conformal.rows,
        calibration.ood.rows,
    )
    assert found.temperature == calibration.temperature


@pytest.mark.parametrize("variant", ["int8", "int8_tensorrt"])
def test_refitted_int8_graph_flags_at_most_the_requested_fraction_of_rows(
    classifier: Project, variant: str
) -> None:
    graph, val, share = classifier.bundle().model_bytes(variant), classifier.split("val"), 0.2
    found = own_thresholds(graph, asked(classifier, share), classifier.task, val, RESAMPLING.seed)
    held_out = val.inputs[np.flatnonzero(~fitting_half(val.keys, RESAMPLING.seed))]
    answers = run_in_batches(
        open_onnx(graph, variant=variant, precision="int8", provider="cpu", num_threads=1).run,
        held_out,
        32,
    )
    assert 0 < found.is_ood(answers.scores).mean() <= share


def test_only_int8_variants_have_their_own_thresholds(
    classifier: Project, regressor: Project
) -> None:
    for project in (classifier, regressor):
        models, shared = project.bundle().manifest.models, project.calibration()
        assert models["fp32"].calibration is models["fp16"].calibration is None
        for variant in ("int8", "int8_tensorrt"):
            own = models[variant].calibration
            assert own is not None
            assert (own.temperature, own.ood.statistics_sha256) == (
                shared.temperature,
                shared.ood.statistics_sha256,
            )
            assert own.conformal.threshold != shared.conformal.threshold


def test_thresholds_are_not_refitted_without_rows_to_check_them(classifier: Project) -> None:
    calibration, val = classifier.calibration(), classifier.split("val")
    fitted = np.flatnonzero(fitting_half(val.keys, RESAMPLING.seed))
    few = select([val], fitted, classifier.bundle().manifest.input.shape)
    assert (
        own_thresholds(
            classifier.bundle().model_bytes("int8"),
            calibration,
            classifier.task,
            few,
            RESAMPLING.seed,
        )
        == calibration
    )


def test_a_bundle_states_the_test_coverage_of_each_calibration(
    classifier: Project, regressor: Project
) -> None:
    for project in (classifier, regressor):
        test = project.split("test")
        bundle = project.bundle()
        graph, own = bundle.model_bytes("int8"), bundle.manifest.models["int8"].calibration
        assert own is not None
        found = own_coverage(graph, own, project.task, test, RESAMPLING)
        answers = run_in_batches(
            open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=1).run,
            test.inputs,
            32,
        )
        held = (
            kind_of(project.task)
            .target.load_part("uncertainty")
            .is_held(own, answers.outputs, test.targets)
        )
        assert found is not None
        assert held is not None
        assert (found.value, found.rows) == (held.mean(), len(test))


def test_variant_with_refitted_thresholds_never_states_the_networks_coverage(
    classifier: Project,
) -> None:
    network = Metric(value=0.8, low=0.72, high=0.86, confidence=0.95, rows=138)
    manifest = classifier.bundle().manifest.model_copy(update={"coverage": network})
    assert manifest.coverage_of("fp32") == manifest.coverage_of("fp16") == network
    int8 = manifest.models["int8"].model_copy(update={"coverage": None})
    assert (
        manifest.model_copy(update={"models": manifest.models | {"int8": int8}}).coverage_of("int8")
        is None
    )
