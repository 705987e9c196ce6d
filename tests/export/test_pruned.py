"""Variants of a pruned network: predictions, calibration, and the choice among variants."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.config.params import load_params
from slipway.export.bundle_writer import ExportRows, Pruned, write_bundle
from slipway.export.certification.lineage import trace_lineage
from slipway.export.graphs.graph import torch_answers
from slipway.export.graphs.variants import MEANT_FOR, OF_PRUNED, PRECISION
from slipway.runtimes.runtime import open_onnx
from slipway.system import files
from slipway.system.errors import BundleError
from slipway.training.pruning.channels import prune_channels
from slipway.training.pruning.result import pruned_network
from slipway.training.targets.classes import ClassHead
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.calibration import Calibrator
from tests.export.conftest import QUICK, RESAMPLING, Project, trained

pytestmark = pytest.mark.process
PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")


@pytest.fixture(name="smaller", scope="module")
def _smaller(classifier: Project) -> Pruned:
    """Return the network with half of its channels and another temperature."""
    weights, _ = prune_channels(classifier.network(), 0.5)
    network = pruned_network(classifier.network().spec, weights)
    fitted = Calibrator(network, PARAMS.evaluate, 7, "cpu").fit(
        classifier.split("train"), classifier.split("val")
    )
    calibration = fitted.calibration.model_copy(update={"temperature": 0.5})
    return Pruned(
        "structured",
        CalibratedNetwork(network, ClassHead, 0.5, fitted.score).eval(),
        "a" * 64,
        calibration,
    )


def bundle_of(project: Project, root: Path, pruned: Pruned | None) -> LoadedBundle:
    params = PARAMS.export.model_copy(
        update={"variants": ["fp32", *OF_PRUNED], "max_batch_size": 32}
    )
    rows = ExportRows(project.split("train").inputs[:], project.split("val"))
    with files.new_directory(root) as folder:
        write_bundle(
            folder,
            replace(trained(project), pruned=pruned),
            rows,
            params,
            RESAMPLING,
            trace_lineage({}, []),
            QUICK,
        )
    return load_bundle(root)


@pytest.fixture(name="bundle", scope="module")
def _bundle(
    classifier: Project, smaller: Pruned, tmp_path_factory: pytest.TempPathFactory
) -> LoadedBundle:
    return bundle_of(classifier, tmp_path_factory.mktemp("pruned") / "bundle", smaller)


@pytest.mark.parametrize(("variant", "most"), [("pruned", 1e-5), ("pruned_int8", 0.1)])
def test_pruned_graph_predicts_as_the_pruned_network_does(
    bundle: LoadedBundle, smaller: Pruned, classifier: Project, variant: str, most: float
) -> None:
    rows = classifier.split("test").inputs[:20]
    runner = open_onnx(
        bundle.model_bytes(variant),
        variant=variant,
        precision=PRECISION[variant],
        provider="cpu",
        num_threads=1,
    )
    found, expected = runner.run(rows), torch_answers(smaller.network, rows)
    assert np.abs(found.outputs - expected.outputs).max() <= most
    if variant == "pruned":
        assert np.abs(found.scores - expected.scores).max() <= 1e-5 * expected.scores.max()
    assert (
        np.abs(found.outputs - torch_answers(classifier.calibrated(), rows).outputs).max() > 1e-3
    )  # it is another network


def test_only_pruned_variants_have_their_own_calibration(
    bundle: LoadedBundle, smaller: Pruned
) -> None:
    manifest = bundle.manifest
    assert manifest.calibration_of("pruned") == smaller.calibration
    rounded = manifest.calibration_of("pruned_int8")  # has thresholds of its own on top
    assert (rounded.temperature, rounded.ood.statistics_sha256) == (
        0.5,
        smaller.calibration.ood.statistics_sha256,
    )
    assert (
        manifest.calibration_of("fp32")
        == manifest.calibration_of("an engine's")
        == manifest.calibration
    )
    assert manifest.calibration.temperature != 0.5


def test_structured_pruned_graph_is_smaller_and_can_be_chosen(
    bundle: LoadedBundle,
) -> None:
    models = bundle.manifest.models
    assert models["pruned_int8"].bytes < models["pruned"].bytes < models["fp32"].bytes
    assert set(bundle.manifest.choice["cpu"].figures) == {"fp32", *OF_PRUNED}
    assert {variant: models[variant].meant_for for variant in OF_PRUNED} == {
        variant: MEANT_FOR[variant] for variant in OF_PRUNED
    }


def test_a_magnitude_pruned_variant_is_never_chosen(
    classifier: Project, smaller: Pruned, tmp_path: Path
) -> None:
    """The choice ignores magnitude pruning even if the graph happens to be faster."""
    bundle = bundle_of(classifier, tmp_path / "bundle", replace(smaller, kind="magnitude"))
    assert [bundle.manifest.models[variant].meant_for for variant in OF_PRUNED] == [[], []]
    choice = bundle.manifest.choice["cpu"]
    assert choice.variant == "fp32"
    assert {choice.figures[variant].verdict for variant in OF_PRUNED} == {"not meant for cpu"}


def test_pruned_variants_without_a_pruned_network_are_refused(
    classifier: Project, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="has variants of a pruned network, but there is none"):
        bundle_of(classifier, tmp_path / "bundle", None)
