"""Drift features of images, table rows and answers: names, values, independence of rows."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import NEVER
from slipway.drift.features import (
    extract,
    extract_inputs,
    extract_outputs,
    input_features,
    output_features,
)
from slipway.inputs.columns import Cell, ColumnContract, encode_rows
from slipway.inputs.images import ImageContract
from tests.serving.bundles import COLUMNS, column

VALUE = OutputContract(kind="value", labels=[])


def images(size_px: int, channels: int) -> ImageContract:
    return ImageContract.model_validate(
        {
            "kind": "images", "size_px": size_px, "channels": channels, "resize_mode": "stretch",
            "interpolation": "bilinear", "max_pixels": 10**6, "transform": None,
        }
    )  # fmt: skip


def of_image(pixels: NDArray[Any]) -> dict[str, float]:
    contract = images(pixels.shape[0], pixels.shape[2])
    found = extract_inputs(contract, pixels[None].astype(np.uint8))[0]
    return {
        feature.name: float(value)
        for feature, value in zip(input_features(contract), found, strict=True)
    }


def noise(size_px: int, channels: int, rows: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(4).integers(60, 180, (rows, size_px, size_px, channels), np.uint8)


@pytest.mark.parametrize(
    ("size_px", "channels"), [(16, 1), (28, 1), (32, 3), (97, 3), (224, 3), (2, 1), (1, 3)]
)
def test_extract_returns_finite_features_in_the_listed_order(size_px: int, channels: int) -> None:
    contract = images(size_px, channels)
    found = extract(
        contract,
        noise(size_px, channels, 5),
        np.full((5, 2), 0.5, np.float32),
        np.ones(5, np.float32),
    )
    output = OutputContract(kind="probabilities", labels=["a", "b"])
    features = [*input_features(contract), *output_features(output)]
    names = [feature.name for feature in features]
    assert found.shape == (5, len(names))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert names[-5:] == ["predicted_class", "confidence", "entropy", "margin", "ood_score"]


@pytest.mark.parametrize(("size_px", "channels"), [(28, 1), (32, 3), (224, 3)])
def test_features_of_a_row_do_not_depend_on_other_rows_of_the_batch(
    size_px: int, channels: int
) -> None:
    contract, pixels = images(size_px, channels), noise(size_px, channels, 9)
    alone = np.concatenate([extract_inputs(contract, pixels[row : row + 1]) for row in range(9)])
    np.testing.assert_allclose(extract_inputs(contract, pixels), alone, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("size_px", [28, 224])
def test_each_image_fault_moves_its_own_feature(size_px: int) -> None:
    plain = of_image(noise(size_px, 3)[0])
    pixels = noise(size_px, 3)[0].astype(np.int64)
    smooth = (
        sum(np.roll(pixels, (down, right), (0, 1)) for down in (-1, 0, 1) for right in (-1, 0, 1))
        // 9
    )
    assert of_image(pixels + 40)["brightness"] == pytest.approx(plain["brightness"] + 40, rel=1e-4)
    assert of_image((pixels - 120) // 2 + 120)["contrast"] == pytest.approx(
        plain["contrast"] / 2, rel=0.05
    )
    assert of_image(smooth)["sharpness"] < plain["sharpness"] - 1
    assert of_image(smooth)["noise"] < plain["noise"] / 2
    assert of_image(255 - pixels)["skewness"] == pytest.approx(-plain["skewness"], abs=1e-3)
    brighter = of_image(np.where(pixels > 170, 255, pixels))
    assert brighter["white_fraction"] > 0.05 > plain["white_fraction"]
    assert of_image(pixels * np.array([1, 0, 0]))["saturation"] > plain["saturation"]
    assert of_image(pixels * np.array([1, 0, 0]))["red"] == pytest.approx(plain["red"], rel=1e-4)
    assert of_image(pixels * np.array([1, 0, 0]))["yellowness"] == pytest.approx(
        plain["red"] / 2, rel=1e-4
    )
    assert of_image(pixels * np.array([0, 0, 1]))["yellowness"] == pytest.approx(
        -plain["blue"], rel=1e-4
    )
    middle = pixels.copy()
    middle[size_px // 4 : -(size_px // 4), size_px // 4 : -(size_px // 4)] += 60
    assert of_image(middle)["centre"] > plain["centre"] + 30


def test_noise_feature_is_the_standard_deviation_in_grey_levels() -> None:
    random = np.random.default_rng(6)
    pixels = np.clip(np.rint(128 + random.normal(0, 12, (64, 64, 1))), 0, 255)
    assert of_image(pixels)["noise"] == pytest.approx(12, rel=0.1)


def test_table_features_restore_cells_and_their_missing_values() -> None:
    rows: list[dict[str, Cell]] = [
        {
            "age": 65.0,
            "income": None,
            "colour": "blue",
            "city": None,
            "member": 1.0,
            "since": 18000.0,
        },
        {
            "age": 40.0,
            "income": 3.2e4,
            "colour": "red",
            "city": "Zürich",
            "member": 0.0,
            "since": None,
        },
    ]
    found = extract_inputs(COLUMNS, encode_rows(rows, COLUMNS))
    names = [feature.name for feature in input_features(COLUMNS)]
    assert names == [
        "column age",
        "column income",
        "column member",
        "column since",
        "column colour",
        "column city",
    ]
    np.testing.assert_allclose(found, [[2, np.nan, 1, 0, 3, 0], [0, 0, 0, np.nan, 1, 2]], atol=1e-6)
    kinds = {
        feature.name: feature.categories
        for feature in input_features(COLUMNS)
        if feature.kind == "category"
    }
    assert kinds["column member"] == ["false", "true"]
    assert kinds["column city"] == ["missing or unknown", "O'Hare <b>", "Zürich"]


def test_missing_boolean_becomes_nan() -> None:
    contract = ColumnContract(
        kind="columns", columns=[column("member", "boolean", has_missing=True)]
    )
    encoded = encode_rows([{"member": None}, {"member": 1.0}], contract)
    np.testing.assert_array_equal(extract_inputs(contract, encoded), [[np.nan], [1.0]])


def test_class_answers_give_label_confidence_entropy_margin_and_ood_score() -> None:
    outputs = np.array([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]], np.float32)
    found = extract_outputs(outputs, np.array([0.5, 2.0], np.float32))
    entropy = -(0.7 * np.log(0.7) + 0.2 * np.log(0.2) + 0.1 * np.log(0.1))
    np.testing.assert_allclose(found, [[0, 0.7, entropy, 0.5, 0.5], [2, 1, 0, 1, 2]], atol=1e-5)


def test_the_predicted_class_is_the_one_that_a_decision_gives() -> None:
    outputs, scores = np.array([[0.7, 0.3], [0.9, 0.1]], np.float32), np.zeros(2, np.float32)
    assert extract_outputs(outputs, scores)[:, 0].tolist() == [0, 0]
    found = extract_outputs(outputs, scores, thresholds=[NEVER, 0.25])
    assert found[:, 0].tolist() == [1, 0]
    assert found[:, 1:].tolist() == extract_outputs(outputs, scores)[:, 1:].tolist()


def test_numeric_answers_give_value_and_ood_score() -> None:
    found = extract_outputs(np.array([[3.5], [-1.0]], np.float32), np.array([0.5, 2.0], np.float32))
    assert found.tolist() == [[3.5, 0.5], [-1.0, 2.0]]
    assert [feature.name for feature in output_features(VALUE)] == ["value", "ood_score"]
