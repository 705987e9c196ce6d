"""The Open Inference Protocol: NVIDIA's own client against the real service, and what the protocol refuses."""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from serving.http.responses import ERRORS
from serving.open_inference.messages import MAX_VALUES
from serving.worker import ModelWorker
from tests import plain_http
from tests.serving.bundles import (
    CLASS_FIELDS,
    LABELS,
    ROW,
    SIZE_PX,
    picture,
    probabilities,
    row_classifier,
    table_row,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import run
from tests.serving.ready_service import ready_service
from tests.serving.server import Server

INFER = "/v2/models/slipway/infer"
HEAD_LENGTH = "inference-header-content-length"


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
def test_nvidias_client_sees_the_server_its_health_and_its_model(images: Server) -> None:
    client = client_of(images)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("slipway")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("slipway")
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert {output["name"] for output in metadata["outputs"]} == {
        "label", "probabilities", "prediction_set", "outlier_score", "is_outlier",
    }  # fmt: skip
    assert client.is_model_ready("slipway", metadata["versions"][0])
    assert not client.is_model_ready("another")


@pytest.mark.process
@pytest.mark.parametrize("binary", [True, False])
def test_encoded_images_are_answered_as_predict_answers_them(images: Server, binary: bool) -> None:
    pictures = [picture(seed, size=(30, 40)) for seed in range(5)]
    sent = texts(pictures if binary else [base64.b64encode(each) for each in pictures])
    outputs = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("label", "probabilities", "is_outlier", "outlier_score")
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
    assert result.as_numpy("is_outlier").tolist() == [one["is_outlier"] for one in expected]
    assert result.as_numpy("outlier_score").tolist() == [one["outlier_score"] for one in expected]


@pytest.mark.process
def test_pixels_are_answered_without_loss_and_every_output_comes_where_none_is_named(
    images: Server,
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    result = client_of(images).infer("slipway", [tensor("image", "UINT8", pixels)])
    np.testing.assert_allclose(result.as_numpy("probabilities"), probabilities(pixels), atol=1e-6)
    assert result.as_numpy("label").shape == result.as_numpy("outlier_score").shape == (3,)
    assert result.as_numpy("prediction_set").shape == (3, len(LABELS))


@pytest.mark.process
def test_the_most_probable_classes_come_in_tritons_form(images: Server) -> None:
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
def test_rows_of_a_table_come_as_a_tensor_for_each_column(table: Server) -> None:
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
def test_the_client_is_told_what_is_wrong(images: Server, table: Server) -> None:
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


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in the protocol's shape: a text, and what else our errors say beside it."""
    content: dict[str, Any] = response.json()
    assert list(content) == ["error", "code", "field", "request_id"]
    assert response.status_code == ERRORS[content["code"]]
    assert response.headers["x-request-id"] == content["request_id"]
    assert len(content["error"]) > 20
    return content


# What is refused, without a client that would not send it ---------------------------------------------------------------------------


def pixels_in_json(**changes: Any) -> dict[str, Any]:
    inputs = {"name": "image", "shape": [1, 2, 2, 3], "datatype": "UINT8", "data": list(range(12))}
    return {"inputs": [inputs | changes]}


def test_a_json_request_is_answered_in_json_with_its_id(make_settings: MakeSettings) -> None:
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


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "missing_field", "inputs"),
        ({"inputs": []}, "missing_field", "inputs"),
        ({"inputs": [1]}, "malformed_body", "inputs[0]"),
        (pixels_in_json() | {"outptus": []}, "unknown_field", "outptus"),
        (pixels_in_json(name="picture"), "unknown_field", "picture"),
        (pixels_in_json(datatype="FP16"), "tensor_mismatch", "inputs[0].datatype"),
        (pixels_in_json(datatype="FP32"), "tensor_mismatch", "image"),
        (pixels_in_json(shape=[1, 2, 2]), "tensor_mismatch", "inputs[0].data"),
        (pixels_in_json(shape=[1, 2, -2, 3]), "tensor_mismatch", "inputs[0].shape"),
        (pixels_in_json(shape=[1, 2, 6, 1]), "tensor_mismatch", "image"),
        (pixels_in_json(shape=[0, 2, 2, 3], data=[]), "no_rows", "inputs[0].shape"),
        (pixels_in_json(data=[256] * 12), "tensor_mismatch", "inputs[0].data[0]"),
        (pixels_in_json(data=[1] * 11 + [True]), "tensor_mismatch", "inputs[0].data[11]"),
        (pixels_in_json(data=[1] * 11 + [1.5]), "tensor_mismatch", "inputs[0].data[11]"),
        (pixels_in_json(parameters={"binary_data_size": 12}), "tensor_mismatch", "inputs[0]"),
        (
            pixels_in_json(shape=[1], datatype="BYTES", data=["no base64!"]),
            "tensor_mismatch",
            "image[0]",
        ),
        (pixels_in_json() | {"outputs": [{"name": "probs"}]}, "unknown_field", "outputs[0].name"),
        (
            pixels_in_json()
            | {"outputs": [{"name": "label", "parameters": {"classification": 1}}]},
            "tensor_mismatch",
            "outputs[0].parameters.classification",
        ),
        ({"inputs": [pixels_in_json()["inputs"][0]] * 2}, "tensor_mismatch", "image"),
        (
            pixels_in_json() | {"outputs": [{"name": "probabilities"}] * 20_000},
            "tensor_mismatch",
            "outputs[1].name",
        ),
        (
            pixels_in_json()
            | {"outputs": [{"name": name} for name in ("label", "probabilities", "label")]},
            "tensor_mismatch",
            "outputs[2].name",
        ),
        (
            pixels_in_json()
            | {
                "outputs": [
                    {"name": "probabilities", "parameters": {"classification": most}}
                    for most in range(3)
                ]
            },
            "tensor_mismatch",
            "outputs[1].name",
        ),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_field(
    make_settings: MakeSettings, body: dict[str, Any], code: str, field: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post(INFER, json=body))
        assert (error["code"], error["field"]) == (code, field)
        assert "outputs" in (await client.post(INFER, json=pixels_in_json())).json()

    run(make_settings(), work)


def test_values_that_json_may_not_hold_and_too_many_of_them_are_refused(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        text = json.dumps(pixels_in_json()).replace("11]", "NaN]")
        assert error_of(await client.post(INFER, content=text))["code"] == "malformed_json"
        many = json.dumps(pixels_in_json()).replace("11]", "11" + ",0" * 600_000 + "]")
        assert error_of(await client.post(INFER, content=many))["code"] == "too_many_rows"
        deep = json.dumps(pixels_in_json()).replace("11]", "[" * 20 + "]" * 20 + "]")
        assert error_of(await client.post(INFER, content=deep))["code"] == "malformed_json"

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("tail", "size", "head_length", "field"),
    [
        (b"\0" * 11, 11, None, "inputs[0]"),
        (b"\0" * 12, 13, None, "inputs[0].parameters.binary_data_size"),
        (b"\0" * 13, 12, None, "inputs"),
        (b"\0" * 12, 12, 10_000, HEAD_LENGTH),
        (b"\0" * 12, 12, "x", HEAD_LENGTH),
    ],
)
def test_bytes_that_are_not_as_long_as_they_are_said_to_be_are_refused(
    make_settings: MakeSettings, tail: bytes, size: int, head_length: object, field: str
) -> None:
    head = {
        "inputs": [
            {
                "name": "image",
                "shape": [1, 2, 2, 3],
                "datatype": "UINT8",
                "parameters": {"binary_data_size": size},
            }
        ]
    }
    text = json.dumps(head).encode()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        headers = {HEAD_LENGTH: str(head_length or len(text))}
        assert (
            error_of(await client.post(INFER, content=text + tail, headers=headers))["field"]
            == field
        )

    run(make_settings(), work)


@pytest.mark.parametrize("lengths", [[5], [3, 3], [2**31], []])
def test_elements_that_do_not_fit_their_tensor_are_refused(
    make_settings: MakeSettings, lengths: list[int]
) -> None:
    tail = b"".join(length.to_bytes(4, "little") + b"abc" for length in lengths)
    head = {
        "inputs": [
            {
                "name": "image",
                "shape": [1],
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(tail)},
            }
        ]
    }
    text = json.dumps(head).encode()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(
            await client.post(INFER, content=text + tail, headers={HEAD_LENGTH: str(len(text))})
        )
        assert (error["code"], error["field"]) == ("tensor_mismatch", "inputs[0]")

    run(make_settings(), work)


HUGE = 1 << 39


@pytest.mark.parametrize(
    "shape",
    [
        [(1 << 40) - 1],
        [HUGE, HUGE],
        [0, HUGE, HUGE, HUGE],
        [HUGE, 0],
        [HUGE] * 8,
        [MAX_VALUES, 2],
        [MAX_VALUES + 1],
    ],
)
def test_a_shape_beyond_what_its_request_can_hold_is_refused_by_its_field(
    make_settings: MakeSettings, shape: list[int]
) -> None:
    told: list[dict[str, Any]] = [{"parameters": {"binary_data_size": 0}}, {"data": []}]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for datatype, values in itertools.product(("BYTES", "UINT8", "FP64", "BOOL"), told):
            text = json.dumps(
                {"inputs": [{"name": "image", "shape": shape, "datatype": datatype} | values]}
            )
            error = error_of(
                await client.post(INFER, content=text, headers={HEAD_LENGTH: str(len(text))})
            )
            assert (error["code"], error["field"]) == ("tensor_mismatch", "inputs[0].shape")

    run(make_settings(), work)


def test_a_tensor_as_bytes_has_as_many_values_as_its_bytes(make_settings: MakeSettings) -> None:
    """The neighbour of what is refused: more than JSON may have."""
    tail = bytes(512 * 512 * 3)
    assert len(tail) > MAX_VALUES
    described = {
        "name": "image",
        "shape": [1, 512, 512, 3],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(tail)},
    }
    text = json.dumps({"inputs": [described]}).encode()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (
            await client.post(INFER, content=text + tail, headers={HEAD_LENGTH: str(len(text))})
        ).status_code == 200
        empty = text.replace(b"[1, ", b"[0, ").replace(str(len(tail)).encode(), b"0")
        error = error_of(
            await client.post(INFER, content=empty, headers={HEAD_LENGTH: str(len(empty))})
        )
        assert (error["code"], error["field"]) == ("tensor_mismatch", "inputs[0].shape")
        none = empty.replace(b"512, 512", b"2, 2")
        assert (
            error_of(await client.post(INFER, content=none, headers={HEAD_LENGTH: str(len(none))}))[
                "code"
            ]
            == "no_rows"
        )

    run(make_settings(), work)


@pytest.mark.usefixtures("certified_table")
@pytest.mark.parametrize(
    ("value", "field"),
    [(float("nan"), "rows[0].{}"), (float("inf"), "{}[0]"), (-float("inf"), "{}[0]")],
)
def test_a_number_that_is_none_is_refused_by_its_column(
    make_settings: MakeSettings, value: float, field: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        described = (await client.get("/v2/models/slipway")).json()["inputs"]
        name = next(column["name"] for column in described if column["datatype"] == "FP64")
        inputs: list[dict[str, Any]] = [
            {
                "name": column["name"],
                "shape": [1],
                "datatype": column["datatype"],
                "data": [ROW[column["name"]]],
            }
            for column in described
            if column["name"] != name
        ]
        tail = np.array([value], np.float64).tobytes()
        inputs.append(
            {
                "name": name,
                "shape": [1],
                "datatype": "FP64",
                "parameters": {"binary_data_size": len(tail)},
            }
        )
        text = json.dumps({"inputs": inputs}).encode()
        error = error_of(
            await client.post(INFER, content=text + tail, headers={HEAD_LENGTH: str(len(text))})
        )
        assert error["field"] == field.format(name)

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v2/models/other", "unknown_model"),
        ("GET", "/v2/models/slipway/versions/7", "unknown_model"),
        ("GET", "/v2/models/slipway/config", "not_found"),
        ("GET", "/v2/nothing", "not_found"),
        ("GET", INFER, "method_not_allowed"),
        ("POST", "/v2/models/slipway", "method_not_allowed"),
        ("DELETE", "/v2/models/slipway", "method_not_allowed"),
    ],
)
def test_what_is_not_there_is_refused_in_the_one_shape(
    make_settings: MakeSettings, method: str, path: str, code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert error_of(await client.request(method, path))["code"] == code

    run(make_settings(), work)


def test_without_a_model_it_is_live_and_not_ready(
    certified: Path, make_settings: MakeSettings
) -> None:
    (certified / "certificate.json").unlink()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.get("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", "/v2/models/slipway/ready", "/v2/models/slipway"):
            assert error_of(await client.get(path))["code"] == "not_ready"

    run(make_settings(), work)


def test_while_it_drains_it_is_not_ready_as_readyz_says_and_still_answers(
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


def test_an_answer_is_the_one_of_predict(make_settings: MakeSettings) -> None:
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
        assert outputs["outlier_score"] == [plain["outlier_score"]]
        assert {
            label for label, inside in zip(LABELS, outputs["prediction_set"], strict=True) if inside
        } == set(plain["prediction_set"])
        assert set(CLASS_FIELDS) <= set(plain)

    run(make_settings(), work)
