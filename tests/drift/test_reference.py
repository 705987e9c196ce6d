"""The reference in the bundle: what it holds, which rows it takes, and what is refused."""

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
    reference_bytes,
    references_bytes,
)
from slipway.system.errors import BundleError
from slipway.system.files import sha256_bytes
from tests.calibrations import CALIBRATION
from tests.drift.populations import CONTRACT, ORDINARY, OUTPUT, Population, answers_of, reference_of
from tests.serving.bundles import write_bundle

ROWS = ORDINARY.draw(np.random.default_rng(1), 800)


def _with_reference(root: Path) -> LoadedBundle:
    bundle, payload = write_bundle(root), reference_bytes(reference_of(ROWS))
    (root / DRIFT).write_bytes(payload)
    bundles.write_manifest(
        root, bundle.manifest.model_copy(update={"drift_sha256": sha256_bytes(payload)})
    )
    return bundles.load_bundle(root)


def test_a_reference_comes_back_from_the_bundle(tmp_path: Path) -> None:
    bundle = _with_reference(tmp_path)
    found = read_reference(bundle)
    assert found == reference_of(ROWS)
    assert DRIFT in bundle.file_names
    bundle.verify()


def test_a_bundle_without_one_has_none(tmp_path: Path) -> None:
    assert read_reference(write_bundle(tmp_path)) is None


def test_every_altered_byte_is_refused(tmp_path: Path) -> None:
    bundle = _with_reference(tmp_path)
    whole = (tmp_path / DRIFT).read_bytes()
    for place in np.random.default_rng(2).integers(0, len(whole), 100):
        (tmp_path / DRIFT).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        for read in (read_reference, LoadedBundle.verify):
            with pytest.raises(BundleError, match=r"drift\.json was altered"):
                read(bundle)
    (tmp_path / DRIFT).unlink()
    with pytest.raises(BundleError, match=r"drift\.json is missing"):
        bundle.verify()


@pytest.mark.parametrize("change", [{"format_version": 1}, {"colour": "red"}, {"inputs": None}])
def test_a_file_of_another_form_is_refused(change: dict[str, object]) -> None:
    content = json.loads(reference_bytes(reference_of(ROWS))) | change
    with pytest.raises(BundleError, match="no reference that this Slipway reads"):
        parse_references(json.dumps(content).encode())


def test_each_variant_is_compared_with_its_own_answers() -> None:
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
    with pytest.raises(BundleError, match="no variant 'fp16', it has fp32, int8"):
        both.of("fp16")


def test_training_rows_make_the_reference_of_the_input_larger() -> None:
    train = ORDINARY.draw(np.random.default_rng(4), 3000).inputs
    found = describe_inputs(CONTRACT, ROWS.inputs, [train[:2000], train[2000:]])
    assert found.rows == 3800
    assert all(sum(feature.counts) == 3800 for feature in found.features)
    assert found.joint is not None
    assert found.joint.rows == 3800


def test_training_rows_that_are_of_another_kind_do_not_count() -> None:
    train = Population(shift=0.5).draw(np.random.default_rng(4), 3000).inputs
    assert describe_inputs(CONTRACT, ROWS.inputs, [train]) == describe_inputs(CONTRACT, ROWS.inputs)


def test_the_rows_that_are_expected_outside_the_range_are_counted() -> None:
    inputs = describe_inputs(CONTRACT, ROWS.inputs)
    extremes = {
        int(place) for column in ROWS.inputs.T for place in (column.argmin(), column.argmax())
    }
    assert inputs.outside == len(extremes)


def test_few_rows_make_a_reference_without_an_estimate() -> None:
    found = reference_of(ORDINARY.draw(np.random.default_rng(5), 60))
    assert found.answers.quality is None
    assert found.inputs.joint is None
