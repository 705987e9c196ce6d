"""Drift reference of a bundle: its content, the rows it describes, and refused files."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts import bundle as bundles
from slipway.artifacts.bundle import DRIFT, LoadedBundle
from slipway.drift.reference import (
    describe_answers,
    describe_inputs,
    parse_references,
    read_reference,
    references_bytes,
)
from slipway.system.errors import BundleError
from slipway.system.files import sha256_bytes
from tests.calibrations import CALIBRATION
from tests.drift.populations import (
    CONTRACT,
    ORDINARY,
    OUTPUT,
    Population,
    answers_of,
    reference_bytes,
    reference_of,
)
from tests.serving.bundles import write_bundle

ROWS = ORDINARY.draw(np.random.default_rng(1), 800)


def _with_reference(root: Path) -> LoadedBundle:
    bundle, payload = write_bundle(root), reference_bytes(reference_of(ROWS))
    (root / DRIFT).write_bytes(payload)
    bundles.write_manifest(
        root, bundle.manifest.model_copy(update={"drift_sha256": sha256_bytes(payload)})
    )
    return bundles.load_bundle(root)


def test_reference_survives_a_round_trip_through_the_bundle(tmp_path: Path) -> None:
    bundle = _with_reference(tmp_path)
    assert read_reference(bundle, "fp32") == reference_of(ROWS)
    assert DRIFT in bundle.file_names
    bundle.verify()


def test_bundle_without_drift_json_has_no_reference(tmp_path: Path) -> None:
    assert read_reference(write_bundle(tmp_path), "fp32") is None


def test_drift_json_with_one_altered_bit_is_refused(tmp_path: Path) -> None:
    bundle = _with_reference(tmp_path)
    whole = (tmp_path / DRIFT).read_bytes()
    for place in np.random.default_rng(2).integers(0, len(whole), 100):
        (tmp_path / DRIFT).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        for read in (LoadedBundle.drift_bytes, LoadedBundle.verify):
            with pytest.raises(BundleError, match=r"drift\.json was altered"):
                read(bundle)
    (tmp_path / DRIFT).unlink()
    with pytest.raises(BundleError, match=r"drift\.json is missing"):
        bundle.verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 1}, "has format version 1, this Slipway reads version 4"),
        ({"colour": "red"}, "is not a valid References"),
        ({"inputs": None}, "is not a valid References"),
    ],
)
def test_drift_json_of_another_format_is_refused(change: dict[str, object], message: str) -> None:
    content = json.loads(reference_bytes(reference_of(ROWS))) | change
    with pytest.raises(BundleError, match=message):
        parse_references(json.dumps(content).encode())


def test_each_variant_has_a_reference_of_its_own_answers() -> None:
    other = Population(overconfidence=-0.1).draw(np.random.default_rng(3), 800)
    inputs = describe_inputs(CONTRACT, ROWS.inputs)
    answers = {
        name: describe_answers(
            OUTPUT, CALIBRATION, answers_of(rows), rows.targets, inputs, ROWS.inputs
        )
        for name, rows in (("fp32", ROWS), ("int8", other))
    }
    both = parse_references(references_bytes(inputs, answers))
    assert both.of("fp32").fingerprint != both.of("int8").fingerprint
    assert both.of("fp32").inputs == both.of("int8").inputs
    with pytest.raises(BundleError, match="no variant 'fp16', expected one of fp32, int8"):
        both.of("fp16")


def test_similar_training_rows_enlarge_the_input_reference() -> None:
    train = ORDINARY.draw(np.random.default_rng(4), 3000).inputs
    found = describe_inputs(CONTRACT, ROWS.inputs, [train[:2000], train[2000:]])
    assert found.rows == 3800
    assert all(sum(feature.counts) == 3800 for feature in found.features)
    assert found.joint is not None
    assert found.joint.rows == 3800


def test_training_rows_that_differ_from_validation_rows_are_left_out() -> None:
    train = Population(shift=0.5).draw(np.random.default_rng(4), 3000).inputs
    assert describe_inputs(CONTRACT, ROWS.inputs, [train]) == describe_inputs(CONTRACT, ROWS.inputs)


def test_reference_counts_rows_that_hold_an_extreme_value() -> None:
    inputs = describe_inputs(CONTRACT, ROWS.inputs)
    extremes = {
        int(place) for column in ROWS.inputs.T for place in (column.argmin(), column.argmax())
    }
    assert inputs.outside == len(extremes)


def test_reference_of_few_rows_has_no_quality_and_no_joint_part() -> None:
    found = reference_of(ORDINARY.draw(np.random.default_rng(5), 60))
    assert found.answers.quality is None
    assert found.inputs.joint is None
