"""The drift reference of a real bundle, for every variant, with rows in their served form."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.bundle import DRIFT
from slipway.data.store.packed import PackedSplit
from slipway.drift.features import extract
from slipway.drift.quality_estimate import estimate_quality
from slipway.drift.reference import parse_references, read_reference
from slipway.drift.verdict import judge
from slipway.drift.window import Window
from slipway.export.drift_reference import DriftRows, choose_rows, has_served_form, write_drift
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.system.errors import BundleError
from tests.export.conftest import Project

pytestmark = pytest.mark.process


def test_drift_reference_of_each_variant_has_that_variants_predictions(classifier: Project) -> None:
    bundle = classifier.bundle()
    payload = bundle.drift_bytes()
    assert payload is not None
    references = parse_references(payload)
    assert references.answers.keys() == bundle.manifest.models.keys()
    num_rows = {name: len(classifier.split(name)) for name in ("train", "val")}
    assert references.inputs.rows == sum(num_rows.values())
    assert {answers.rows for answers in references.answers.values()} == {num_rows["val"]}
    with pytest.raises(BundleError, match="no variant 'fp64'"):
        references.of("fp64")


def test_drift_reference_flags_inverted_rows_but_not_its_own_rows(
    classifier: Project,
) -> None:
    bundle, inputs = classifier.bundle(), classifier.split("val").inputs[:]
    runner = open_onnx(
        bundle.model_bytes("int8"), variant="int8", precision="int8", provider="cpu", num_threads=1
    )
    reference = read_reference(bundle, "int8")
    assert reference is not None
    verdicts = []
    for pixels in (inputs, 255 - inputs):
        answers, window = run_in_batches(runner.run, pixels, 16), Window(reference)
        for _ in range(4):  # val is small: as if its rows came four times
            window.add(extract(bundle.manifest.input, pixels, *answers))
        verdicts.append(judge(reference, window))
        estimate = estimate_quality(reference, window)
        assert estimate.metric in ("accuracy", None)
    assert [verdict.drifted for verdict in verdicts] == [False, True], verdicts


def test_the_drift_reference_of_a_regressor_describes_its_values(regressor: Project) -> None:
    reference = read_reference(regressor.bundle(), "fp32")
    assert reference is not None
    assert [feature.name for feature in reference.features][-2:] == ["value", "ood_score"]


def test_a_changed_byte_in_the_drift_reference_makes_the_bundle_unusable(
    classifier: Project, tmp_path: Path
) -> None:
    bundle = classifier.bundle()
    path = bundle.root / DRIFT
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    try:
        with pytest.raises(BundleError, match=r"drift\.json was altered"):
            bundle.verify()
    finally:
        path.write_bytes(whole)


def test_training_rows_stored_larger_than_served_are_left_out_of_the_drift_reference(
    classifier: Project,
) -> None:
    split, contract = classifier.split("train"), classifier.bundle().manifest.input
    assert has_served_form(split.inputs, contract)
    assert not has_served_form(split.inputs[:, :-1], contract)


def test_the_choice_of_reference_rows_depends_only_on_seed_and_ids(classifier: Project) -> None:
    split = classifier.split("train")
    assert choose_rows(split, 7, 10).tolist() == choose_rows(split, 7, 10).tolist()
    assert choose_rows(split, 7, 10).tolist() != choose_rows(split, 8, 10).tolist()
    assert choose_rows(split, 7).tolist() == list(range(len(split)))
    assert (np.diff(choose_rows(split, 7, 10)) > 0).all()


def test_the_drift_reference_is_made_of_recent_rows_if_there_are_enough(
    classifier: Project, tmp_path: Path
) -> None:
    bundle = classifier.bundle()
    models = {"fp32": bundle.manifest.models["fp32"]}
    shutil.copy(bundle.root / models["fp32"].file, tmp_path)
    manifest = bundle.manifest
    num_old = 30

    def thrice(split: PackedSplit) -> PackedSplit:
        return PackedSplit(
            inputs=np.concatenate([split.inputs[:]] * 3),
            targets=np.tile(split.targets, 3),
            ids=split.ids * 3,
            sources=[f"{row}:image" for row in range(3 * len(split))],
            weights=np.tile(split.weights, 3),
            leaked=np.tile(split.leaked, 3),
        )

    train, val = (thrice(classifier.split(name)) for name in ("train", "val"))

    def rows_in_reference(recent_from: int | None) -> tuple[int, int]:
        rows = DriftRows(val, train, 7, 16, recent_from)
        write_drift(tmp_path, manifest.input, manifest.output, manifest.calibration, models, rows)
        found = parse_references((tmp_path / DRIFT).read_bytes())
        return found.inputs.rows, found.answers["fp32"].rows

    every = len(train) + len(val)
    assert rows_in_reference(None) == (every, len(val))
    assert rows_in_reference(num_old) == (every - 2 * num_old, len(val) - num_old)
    assert rows_in_reference(len(val) - 5) == (every, len(val))  # too few recent rows
