"""Tests of calibration: the rows to which each part is fitted, and features of the OOD score."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Calibration
from slipway.data.engine.randomness import id_keys
from slipway.data.store.packed import PackedSplit
from slipway.system.errors import IntegrityError, SchemaError
from slipway.training.networks.features import answer_and_features, last_layer
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork, calibrated
from slipway.training.uncertainty.calibration import Calibrator, FittedCalibration, fitting_half
from slipway.training.uncertainty.ood_score import fit_ood_score, save_ood_score
from tests.calibrations import calibrated as calibrated_on
from tests.packed_rows import packed_split
from tests.project_params import PROJECT
from tests.reports.conftest import INPUT, network

NUM_ROWS = 400
SEED = 7


def pictures(seed: int) -> NDArray[np.uint8]:
    """Return grey images with a little noise."""
    generator = np.random.default_rng(seed)
    level = generator.integers(60, 190, (NUM_ROWS, 1, 1, 1))
    return np.clip(level + generator.normal(0, 8, (NUM_ROWS, *INPUT.shape)), 0, 255).astype(
        np.uint8
    )


def split(seed: int, targets: NDArray[np.float64] | None = None) -> PackedSplit:
    ids = [
        f"{(seed * NUM_ROWS + row) * 0x9E3779B97F4A7C15 % 2**64:016x}" for row in range(NUM_ROWS)
    ]
    generator = np.random.default_rng(seed)
    return packed_split(
        pictures(seed),
        generator.integers(3, size=NUM_ROWS).astype(float) if targets is None else targets,
        ids,
        ids,
    )


@pytest.fixture(name="classifier", scope="module")
def _classifier() -> Network:
    return network("image_classification")


def fit(trained: Network, val: PackedSplit) -> FittedCalibration:
    return Calibrator(trained, PROJECT.evaluate, SEED, "cpu").fit(split(0), val)


def with_other_targets(val: PackedSplit, rows: NDArray[np.bool_]) -> PackedSplit:
    return split(1, np.where(rows, (val.targets + 1) % 3, val.targets))


def test_the_halves_of_the_validation_rows_depend_only_on_row_ids_and_seed() -> None:
    ids = split(1).ids
    half = fitting_half(id_keys(ids), SEED)
    assert 0.4 < half.mean() < 0.6
    assert (fitting_half(id_keys(ids[::-1]), SEED) == half[::-1]).all()
    assert (fitting_half(id_keys(ids), SEED + 1) != half).any()


def test_one_half_of_the_rows_fits_the_temperature_and_the_other_the_thresholds(
    classifier: Network,
) -> None:
    val = split(1)
    half, before = fitting_half(val.keys, SEED), fit(classifier, val).calibration
    other_thresholds = fit(classifier, with_other_targets(val, ~half)).calibration
    assert other_thresholds.temperature == before.temperature
    assert other_thresholds.conformal.threshold != before.conformal.threshold
    assert (
        fit(classifier, with_other_targets(val, half)).calibration.temperature != before.temperature
    )
    assert before.conformal.rows == before.ood.rows == int((~half).sum())


def test_the_temperature_is_one_if_calibration_is_off(classifier: Network) -> None:
    plain = PROJECT.evaluate.model_copy(update={"calibration": None})
    assert (
        Calibrator(classifier, plain, SEED, "cpu").fit(split(0), split(1)).calibration.temperature
        == 1.0
    )
    assert fit(classifier, split(1)).calibration.temperature != 1.0


def test_a_numeric_target_gets_an_interval_and_no_temperature() -> None:
    trained = network("image_regression")
    val = split(1, np.random.default_rng(1).normal(size=NUM_ROWS))
    fitted = fit(trained, val)
    found, raw = (
        fitted.calibration,
        Calibrator(trained, PROJECT.evaluate, SEED, "cpu").predict(val.inputs, fitted.score),
    )
    assert found.temperature == 1.0
    assert found.conformal.threshold is not None
    held = ~fitting_half(val.keys, SEED)
    inside = np.abs(raw.outputs[held, 0] - val.targets[held]) <= found.conformal.threshold
    assert 0.9 <= inside.mean() < 0.93


def test_the_calibrated_network_gives_the_same_outputs_as_the_calibrator(
    classifier: Network, tmp_path: Path
) -> None:
    fitted, val = fit(classifier, split(1)), split(1)
    save_ood_score(tmp_path / "score.safetensors", fitted.score)
    whole = calibrated(classifier, fitted.calibration, tmp_path / "score.safetensors")
    with torch.inference_mode():
        outputs, scores = whole(torch.from_numpy(val.inputs[:]))
    expected = fitted.apply(
        classifier,
        Calibrator(classifier, PROJECT.evaluate, SEED, "cpu").predict(val.inputs, fitted.score),
    )
    assert np.allclose(outputs, expected.outputs, atol=1e-6)
    assert np.allclose(scores, expected.scores, rtol=1e-5)
    assert 0.5 < expected.scores.mean() < 1.5


def test_a_missing_or_altered_ood_score_file_is_refused(
    classifier: Network, tmp_path: Path
) -> None:
    fitted, path = fit(classifier, split(1)), tmp_path / "score.safetensors"
    with pytest.raises(SchemaError, match="is missing"):
        calibrated(classifier, fitted.calibration, path)
    save_ood_score(path, fitted.score)
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match="was altered"):
        calibrated(classifier, fitted.calibration, path)


# OOD score


def scores(whole: CalibratedNetwork, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    with torch.inference_mode():
        found: NDArray[np.float32] = whole(torch.from_numpy(rows))[1].numpy()
    return found


def test_noise_has_a_higher_ood_score_than_ordinary_rows(classifier: Network) -> None:
    whole = calibrated_on(classifier, pictures(0))
    ordinary = scores(whole, pictures(2))
    noise = np.random.default_rng(3).integers(0, 256, (NUM_ROWS, *INPUT.shape), dtype=np.uint8)
    assert (
        scores(whole, noise)[:, None] > ordinary
    ).mean() > 0.9  # the network is not even trained


def test_constant_and_extreme_features_have_finite_ood_scores() -> None:
    constant = fit_ood_score("", np.ones((50, 8), dtype=np.float32))
    wide = fit_ood_score("", np.random.default_rng(0).normal(size=(50, 100)).astype(np.float32))
    with torch.inference_mode():
        for score, width in ((constant, 8), (wide, 100)):
            found = score(torch.tensor([[0.0] * width, [1e30] * width, [-1e38] * width]))
            assert torch.isfinite(found).all()
            assert found[1] > found[0]


def test_ood_scores_do_not_amplify_the_rounding_of_nearly_constant_features() -> None:
    """A network that learned little from few rows has such features.

    Its exported graph rounds differently and has to have the same scores.
    """
    generator = np.random.default_rng(0)
    widths = 0.3 * 0.5 ** np.arange(64)  # the narrowest are far below float32's steps
    features = (1 + generator.normal(size=(200, 64)) * widths).astype(np.float32)
    score = fit_ood_score("", features)
    rounded = features * (
        1 + generator.choice([-1, 0, 1], features.shape).astype(np.float32) * np.float32(2**-23)
    )
    with torch.inference_mode():
        found, again = (score(torch.from_numpy(rows)) for rows in (features, rounded))
    assert (found - again).abs().max() < 1e-5 < found.min()


def test_fewer_rows_than_features_suffice_to_score_unusual_rows() -> None:
    generator = np.random.default_rng(0)
    score = fit_ood_score("", generator.normal(size=(30, 200)).astype(np.float32))
    new = torch.from_numpy(generator.normal(size=(20, 200)).astype(np.float32))
    with torch.inference_mode():
        ordinary, strange = score(new), score(2 * new)
    assert ordinary.max() < strange.min()


class TwoHeads(nn.Module):
    """A network that creates its head first and calls it last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Conv1d(1, 5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.head(self.norm(self.body(rows[:, None]).mean(dim=2)))
        return answer


def test_last_layer_returns_the_last_layer_that_a_forward_pass_calls() -> None:
    module, rows = TwoHeads().eval(), torch.randn(4, 7)
    assert last_layer(module, rows[:1]) == "head"
    answer, features = answer_and_features(module, "head", rows)
    assert (answer.shape, features.shape) == ((4, 2), (4, 5))
    assert torch.equal(module.head(features), answer)
    # The places of a convolution are averaged.
    assert answer_and_features(module, "body", rows)[1].shape == (4, 1)
    assert last_layer(nn.Identity(), rows[:1]) == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "layer"),
    [("resnet18", "fc"), ("vit_tiny_patch16_224", "head"), ("convnext_atto", "head.fc")],
)
def test_features_of_timm_networks_are_the_inputs_of_their_last_layer(
    name: str, layer: str
) -> None:
    import timm

    sized: dict[str, Any] = {"img_size": 32} if name.startswith("vit") else {}
    module = timm.create_model(name, pretrained=False, num_classes=3, **sized).eval()
    images = torch.randn(2, 3, 32, 32)
    assert last_layer(module, images[:1]) == layer
    answer, features = answer_and_features(module, layer, images)
    assert torch.allclose(module.get_submodule(layer)(features), answer, atol=1e-6)


def test_a_calibration_written_as_json_is_read_back_equal(classifier: Network) -> None:
    found = fit(classifier, split(1)).calibration
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    assert found.ood.layer == "backbone.head"
