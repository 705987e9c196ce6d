"""The Open Inference Protocol over HTTP: Triton's client, and refused requests."""

import base64
import gzip
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from slipway.serving.worker import ModelWorker
from tests import plain_http
from tests.serving.bundles import (
    CLASS_FIELDS,
    LABELS,
    SIZE_PX,
    picture,
    probabilities,
    row_classifier,
    table_row,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import run
from tests.serving.open_inference.infer_requests import INFER, error_of, pixels_in_json
from tests.serving.ready_service import ready_service
from tests.serving.server import Server


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(tmp_path_factory.mktemp("images")) as server:
        yield server


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(tmp_path_factory.mktemp("table"), row_classifier()) as server:
        yield server


def client_of(server: Server) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.url.removeprefix("http://"))


def tensor(
    name: str, datatype: str, values: NDArray[Any], binary: bool = True
) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def texts(values: list[bytes]) -> NDArray[np.object_]:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def predicted(server: Server, image: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = plain_http.post(
        server.url + "/predict", content=image, headers={"content-type": "image/png"}
    ).json()
    return answer


@pytest.mark.process
def test_the_triton_client_reads_health_and_metadata(images: Server) -> None:
    client = client_of(images)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("slipway")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("slipway")
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert {output["name"] for output in metadata["outputs"]} == {
        "label", "probabilities", "prediction_set", "ood_score", "is_ood",
    }  # fmt: skip
    assert client.is_model_ready("slipway", metadata["versions"][0])
    assert not client.is_model_ready("another")


@pytest.mark.process
@pytest.mark.parametrize("binary", [True, False])
def test_infer_returns_the_predictions_of_predict_for_encoded_images(
    images: Server, binary: bool
) -> None:
    pictures = [picture(seed, size=(30, 40)) for seed in range(5)]
    sent = texts(pictures if binary else [base64.b64encode(each) for each in pictures])
    outputs = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("label", "probabilities", "is_ood", "ood_score")
    ]
    result = client_of(images).infer(
        "slipway", [tensor("image", "BYTES", sent, binary)], outputs=outputs, request_id="mine"
    )
    assert result.get_response()["id"] == "mine"
    expected = [predicted(images, each) for each in pictures]
    assert [
        label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")
    ] == [one["label"] for one in expected]
    found = result.as_numpy("probabilities")
    assert found.dtype == np.float32
    assert found.tolist() == [[one["probabilities"][label] for label in LABELS] for one in expected]
    assert result.as_numpy("is_ood").tolist() == [one["is_ood"] for one in expected]
    assert result.as_numpy("ood_score").tolist() == [one["ood_score"] for one in expected]


@pytest.mark.process
def test_infer_accepts_pixels_and_returns_every_output_by_default(
    images: Server,
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    result = client_of(images).infer("slipway", [tensor("image", "UINT8", pixels)])
    np.testing.assert_allclose(result.as_numpy("probabilities"), probabilities(pixels), atol=1e-6)
    assert result.as_numpy("label").shape == result.as_numpy("ood_score").shape == (3,)
    assert result.as_numpy("prediction_set").shape == (3, len(LABELS))


@pytest.mark.process
def test_infer_returns_the_most_probable_classes_in_tritons_format(images: Server) -> None:
    outputs = [triton.InferRequestedOutput("probabilities", class_count=2)]
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    found = (
        client_of(images)
        .infer("slipway", [tensor("image", "UINT8", pixels)], outputs=outputs)
        .as_numpy("probabilities")
    )
    expected = probabilities(pixels)
    for row, classes in enumerate(found):
        values = [float(text.decode().split(":")[0]) for text in classes]
        assert [text.decode().split(":")[2] for text in classes] == [
            LABELS[index] for index in np.argsort(-expected[row])[:2]
        ]
        np.testing.assert_allclose(values, np.sort(expected[row])[::-1][:2], atol=1e-5)


@pytest.mark.process
def test_infer_accepts_one_tensor_per_table_column(table: Server) -> None:
    client = client_of(table)
    described = client.get_model_metadata("slipway")["inputs"]
    rows = [table_row(number) for number in range(7)]
    kinds = {"FP64": np.float64, "BOOL": np.bool_}
    inputs = []
    for column in described:
        values = [row.get(column["name"]) for row in rows]
        if all(value is None for value in values):
            continue  # a column that is left out is missing
        is_text = column["datatype"] == "BYTES"
        array = (
            texts([(value or "").encode() for value in values])
            if is_text
            else np.array(values, kinds[column["datatype"]])
        )
        inputs.append(tensor(column["name"], column["datatype"], array))
    found = client.infer("slipway", inputs)
    expected = plain_http.post(table.url + "/predict", json={"rows": rows}).json()["predictions"]
    assert found.as_numpy("probabilities").tolist() == [
        [one["probabilities"][label] for label in LABELS] for one in expected
    ]
    assert [label.decode() for label in found.as_numpy("label")] == [
        one["label"] for one in expected
    ]


@pytest.mark.process
def test_the_triton_client_receives_the_error_message(images: Server, table: Server) -> None:
    with pytest.raises(InferenceServerException, match=r"image\[1\].*not a readable image"):
        client_of(images).infer(
            "slipway", [tensor("image", "BYTES", texts([picture(), b"nonsense"]))]
        )
    with pytest.raises(InferenceServerException, match="there is no version '7'"):
        client_of(images).infer(
            "slipway", [tensor("image", "BYTES", texts([picture()]))], model_version="7"
        )
    with pytest.raises(InferenceServerException, match="there is no column 'colr'"):
        client_of(table).infer("slipway", [tensor("colr", "BYTES", texts([b"red"]))])


def test_infer_request_in_json_gets_a_json_response_with_its_id(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        nested = np.arange(12).reshape(1, 2, 2, 3).tolist()
        answers = [
            (await client.post(INFER, json=pixels_in_json(**change) | {"id": "7"})).json()
            for change in ({}, {"data": nested})
        ]
        assert answers[0]["outputs"] == answers[1]["outputs"]
        assert (answers[0]["model_name"], answers[0]["id"]) == ("slipway", "7")
        assert answers[0]["model_version"] == worker.require_model().version
        label = next(output for output in answers[0]["outputs"] if output["name"] == "label")
        assert label["shape"] == [1]
        assert label["data"][0] in LABELS

    run(make_settings(), work)


def test_the_repository_index_lists_the_model_and_filters_for_ready_ones(
    certified: Path, make_settings: MakeSettings
) -> None:
    path = "/v2/repository/index"

    async def without(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        (entry,) = (await client.post(path, json={"ready": False})).json()
        assert (entry["name"], entry["state"]) == ("slipway", "UNAVAILABLE")
        assert "certificate" in entry["reason"]
        assert (await client.post(path, json={"ready": True})).json() == []
        wrong: Any
        for wrong in ({"all": 1}, {"ready": 1}, []):
            assert error_of(await client.post(path, json=wrong))["code"] == "unknown_field"

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.model is not None
        bare = client.build_request("POST", path)
        del bare.headers["content-length"]  # as curl -X POST
        asked = [client.build_request("POST", path, json=sent) for sent in ({"ready": True}, {})]
        for request in (*asked, bare):
            (entry,) = (await client.send(request)).json()
            assert (entry["state"], entry["version"]) == ("READY", worker.model.version)

    run(make_settings(), work)
    (certified / "certificate.json").unlink()
    run(make_settings(), without)


@pytest.mark.process
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_the_triton_client_sends_compressed_requests(images: Server, algorithm: str) -> None:
    inputs = [tensor("image", "UINT8", np.zeros((1, 300, 300, 3), np.uint8))]
    plain, packed = (
        client_of(images).infer("slipway", inputs, request_compression_algorithm=chosen)
        for chosen in (None, algorithm)
    )
    assert packed.as_numpy("probabilities").tolist() == plain.as_numpy("probabilities").tolist()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (gzip.compress(bytes(1 << 24), mtime=0), "body_too_large"),
        (gzip.compress(b"{}", mtime=0)[:-9], "malformed_body"),
        (gzip.compress(b"{}", mtime=0) + b"more", "malformed_body"),
        (b"{}", "malformed_body"),
        (b"", "malformed_body"),
        (gzip.compress(b"{}", mtime=0), "missing_field"),
    ],
    ids=["too large", "cut off", "with more behind it", "not compressed", "empty", "no inputs"],
)
def test_compressed_body_is_refused_if_it_is_damaged_or_too_large_when_decompressed(
    make_settings: MakeSettings, body: bytes, code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        headers = {"content-encoding": "gzip", "content-length": str(len(body))}
        tracemalloc.start()
        error = error_of(await client.post(INFER, content=body, headers=headers))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert error["code"] == code
        assert peak < 4 << 20  # a bomb of 16 MiB ends at the limit

    run(make_settings(max_body_bytes=1 << 20), work)


@pytest.mark.process
def test_the_triton_client_reads_configuration_statistics_and_index_as_perf_analyzer_does(
    images: Server, table: Server
) -> None:
    for server in (images, table):
        client = client_of(server)
        metadata = client.get_model_metadata("slipway")
        config = client.get_model_config("slipway", metadata["versions"][0])
        assert [one["name"] for one in config["input"]] == [
            one["name"] for one in metadata["inputs"]
        ]
        assert config["output"][0]["data_type"] == "TYPE_STRING"
        (entry,) = client.get_model_repository_index()
        assert (entry["state"], entry["version"]) == ("READY", metadata["versions"][0])
    client = client_of(images)
    (before,) = client.get_inference_statistics("slipway")["model_stats"]
    client.infer("slipway", [tensor("image", "BYTES", texts([picture(1), picture(2)]))])
    (after,) = client.get_inference_statistics()["model_stats"]
    assert after["inference_count"] == before["inference_count"] + 2
    assert client.get_inference_statistics("slipway", after["version"])["model_stats"]
    success = [one["inference_stats"]["success"] for one in (before, after)]
    assert success[1]["count"] == success[0]["count"] + 1
    assert success[1]["ns"] > success[0]["ns"]


def test_without_a_model_the_service_is_live_and_not_ready(
    certified: Path, make_settings: MakeSettings
) -> None:
    (certified / "certificate.json").unlink()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.get("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", "/v2/models/slipway/ready", "/v2/models/slipway"):
            assert error_of(await client.get(path))["code"] == "not_ready"

    run(make_settings(), work)


def test_draining_service_is_not_ready_but_still_predicts(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.model is not None
        versioned = f"/v2/models/slipway/versions/{worker.model.version}/ready"
        probes = ("/readyz", "/v2/health/ready", "/v2/models/slipway/ready", versioned)
        assert [(await client.get(path)).status_code for path in probes] == [200] * 4
        worker.drain()
        answers = [await client.get(path) for path in probes]
        assert [answer.status_code for answer in answers] == [503] * 4
        assert {error_of(answer)["code"] for answer in answers[1:]} == {"not_ready"}
        assert "shutting down" in error_of(answers[-1])["error"]
        for path in ("/v2/health/live", "/v2/models/slipway"):
            assert (await client.get(path)).status_code == 200

    run(make_settings(), work)


def test_infer_returns_the_same_prediction_as_predict(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        image = picture()
        plain = (
            await client.post("/predict", content=image, headers={"content-type": "image/png"})
        ).json()
        body = pixels_in_json(shape=[1], datatype="BYTES", data=[base64.b64encode(image).decode()])
        outputs = {
            output["name"]: output["data"]
            for output in (await client.post(INFER, json=body)).json()["outputs"]
        }
        assert outputs["label"] == [plain["label"]]
        assert outputs["ood_score"] == [plain["ood_score"]]
        assert {
            label for label, inside in zip(LABELS, outputs["prediction_set"], strict=True) if inside
        } == set(plain["prediction_set"])
        assert set(CLASS_FIELDS) <= set(plain)

    run(make_settings(), work)
