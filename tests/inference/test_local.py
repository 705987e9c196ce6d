from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import slipway
from slipway.artifacts.bundle import load_bundle
from slipway.inference.local import LoadedModel, load
from slipway.inference.predictions import ClassPrediction, Predictions, ValuePrediction
from slipway.predictor.model import InvalidAnswerError
from slipway.system.errors import (
    BundleError,
    CertificateError,
    DataError,
    SlipwayError,
    UnavailableError,
)
from tests.serving.bundles import (
    CONTRACT,
    LABELS,
    certify,
    gate,
    log_of_mean,
    probabilities,
    table_row,
    write_bundle,
)


def pixels(num_images: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_images, *CONTRACT.shape), dtype=np.uint8)


@pytest.mark.parametrize("place", [".", "artifacts", "artifacts/bundle"])
def test_a_project_its_artifacts_and_its_bundle_are_the_same_model(
    image_project: Path, place: str
) -> None:
    with slipway.load(image_project / place) as model:
        assert (
            model.info()["model_version"] == load_bundle(image_project / "artifacts/bundle").version
        )


def test_the_model_of_the_working_directory_is_the_default(
    image_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(image_project)
    with load() as model:
        monkeypatch.chdir("/")
        assert model.info()["gates"] == "passed"


def test_loaded_model_returns_typed_correct_predictions(image_model: LoadedModel) -> None:
    images = pixels(40)  # more than the largest batch
    found = image_model.predict(images)
    assert [type(one) for one in found] == [ClassPrediction] * 40
    expected = probabilities(images)
    assert np.allclose([list(one.probabilities.values()) for one in found], expected, atol=1e-6)
    assert [one.label for one in found] == [LABELS[best] for best in expected.argmax(axis=1)]
    assert found[0].to_dict()["label"] == found[0].label


def test_a_numeric_target_has_a_value_and_an_interval(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", log_of_mean()))
    with load(tmp_path) as model:
        found = model.predict(np.full(CONTRACT.shape, 7, np.uint8))
        assert isinstance(found, ValuePrediction)
        assert found.value == pytest.approx(np.log(7))
        assert found.interval == (found.value - 0.25, found.value + 0.25)
        with pytest.raises(InvalidAnswerError, match="NaN or an infinity"):
            model.predict(np.zeros(CONTRACT.shape, np.uint8))


def test_predictions_of_a_dataframe_are_a_table_with_its_index_and_the_columns_of_a_file(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    frame = pd.DataFrame([table_row(number) for number in range(9)], index=list("abcdefghi"))
    found = table_model.predict(frame[frame.age > 2])
    assert list(found.to_pandas().index) == list("defghi")
    assert found.to_arrow().to_pylist() == found.to_pandas().to_dict("records")
    frame.to_csv(tmp_path / "in.csv", index=False)
    for ending in ("csv", "parquet", "xlsx"):
        done = slipway.predict_files(table_model, tmp_path / "in.csv", tmp_path / f"out.{ending}")
        written = done.to_pandas()[3:]
        for name in found.to_arrow().column_names:
            expected = found.to_pandas()[name].tolist()
            if name != "prediction_set":
                assert written[name].tolist() == pytest.approx(expected, nan_ok=True), name
    assert table_model.predict([]).to_arrow().num_rows == 0


def test_values_are_a_table_with_their_intervals() -> None:
    found = Predictions(
        [ValuePrediction(1.5, (1, 2), 0.1, False), ValuePrediction(2.5, None, 9, True)]
    )
    assert found.to_arrow().to_pydict() == {
        "prediction": [1.5, 2.5],
        "interval_low": [1, None],
        "interval_high": [2, None],
        "ood_score": [0.1, 9],
        "is_ood": [False, True],
    }


def test_answers_on_many_threads_equal_those_on_one(table_model: LoadedModel) -> None:
    rows = [table_row(number) for number in range(200)]
    expected = [table_model.predict(row) for row in rows]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(table_model.predict, rows)) == expected


def test_error_of_a_closed_model_explains_how_to_open_it_again(image_project: Path) -> None:
    with load(image_project) as model:
        pass
    with pytest.raises(UnavailableError, match=r"closed. Load it again with slipway.load"):
        model.predict(pixels(1))


def test_explanation_gives_the_largest_effect_to_the_relevant_column(
    table_model: LoadedModel,
) -> None:
    row = table_row(3)
    explained = table_model.explain(row)
    assert explained.prediction == table_model.predict(row)
    assert explained.of == explained.prediction.label  # type: ignore[union-attr]
    columns = explained.details["columns"]
    usual = explained.details["usual_answer"]
    assert usual + sum(one["contribution"] for one in columns) == pytest.approx(explained.answer)


def test_an_explanation_works_inside_an_event_loop(image_model: LoadedModel) -> None:
    import asyncio

    async def cell_of_a_notebook() -> str:
        return image_model.explain(pixels(1)[0]).kind

    assert asyncio.run(cell_of_a_notebook()) == "occlusion"
    with pytest.raises(DataError, match="found 2 items, expected one"):
        image_model.explain(pixels(2))


def test_model_with_missed_gates_loads_and_info_shows_the_verdict(tmp_path: Path) -> None:
    certify(
        tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"), gates=[gate(value=0.1)]
    )
    with load(tmp_path) as model:
        info = model.info()
    assert info["gates"] == "missed"
    assert info["certificate"]["gate_results"][0]["measured"]["value"] == 0.1


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        ("certificate.json", CertificateError, "nothing proves this bundle"),
        ("bundle/model_fp32.onnx", BundleError, "is missing"),
        ("bundle/bundle.json", BundleError, "holds no model: expected a project"),
    ],
)
def test_a_model_without_its_files_is_refused(
    image_project: Path, spoil: str, error: type[SlipwayError], message: str
) -> None:
    (image_project / "artifacts" / spoil).unlink()
    with pytest.raises(error, match=message):
        load(image_project)


def test_altered_files_and_another_certificate_are_refused(
    image_project: Path, tmp_path: Path
) -> None:
    artifacts = image_project / "artifacts"
    graph = artifacts / "bundle/model_fp32.onnx"
    original = graph.read_bytes()
    graph.write_bytes(original[:-1] + b"?")
    with pytest.raises(BundleError, match="was altered"):
        load(image_project)
    graph.write_bytes(original)
    other = write_bundle(tmp_path / "other", max_batch_size=4)
    certify(artifacts / "certificate.json", other)
    with pytest.raises(CertificateError, match=r"the certificate is for bundle .* Run `dvc repro"):
        load(image_project)


def test_the_package_offers_its_names_without_loading_them() -> None:
    assert {"load", "predict_files", "Client"} <= set(dir(slipway))
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        slipway.laod  # type: ignore[attr-defined]  # noqa: B018
