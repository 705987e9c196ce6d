"""The Open Inference Protocol over HTTP: Triton's client, and refused requests."""

import base64
import gzip
import itertools
import json
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

from slipway.serving.http.responses import ERRORS
from slipway.serving.open_inference.messages import MAX_VALUES
from slipway.serving.worker import ModelWorker
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


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error in the protocol's format, in which `error` is a text."""
    content: dict[str, Any] = response.json()
    assert list(content) == ["error", "code", "field", "request_id"]
    assert response.status_code == ERRORS[content["code"]]
    assert response.headers["x-request-id"] == content["request_id"]
    assert len(content["error"]) > 20
    return content


# Requests that the Triton client would not send.


def pixels_in_json(**changes: Any) -> dict[str, Any]:
    inputs = {"name": "image", "shape": [1, 2, 2, 3], "datatype": "UINT8", "data": list(range(12))}
    return {"inputs": [inputs | changes]}


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
def test_an_invalid_tensor_is_refused_with_its_field(
    make_settings: MakeSettings, body: dict[str, Any], code: str, field: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post(INFER, json=body))
        assert (error["code"], error["field"]) == (code, field)
        assert "outputs" in (await client.post(INFER, json=pixels_in_json())).json()

    run(make_settings(), work)


def test_invalid_json_numbers_and_too_many_values_are_refused(
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
def test_binary_tensors_of_another_length_than_declared_are_refused(
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
def test_bytes_elements_that_do_not_match_the_tensor_are_refused(
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
def test_a_shape_larger_than_its_request_is_refused_with_its_field(
    make_settings: MakeSettings, shape: list[int]
) -> None:
    contents: list[dict[str, Any]] = [{"parameters": {"binary_data_size": 0}}, {"data": []}]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for datatype, values in itertools.product(("BYTES", "UINT8", "FP64", "BOOL"), contents):
            text = json.dumps(
                {"inputs": [{"name": "image", "shape": shape, "datatype": datatype} | values]}
            )
            error = error_of(
                await client.post(INFER, content=text, headers={HEAD_LENGTH: str(len(text))})
            )
            assert (error["code"], error["field"]) == ("tensor_mismatch", "inputs[0].shape")

    run(make_settings(), work)


def test_a_binary_tensor_may_hold_more_values_than_json(make_settings: MakeSettings) -> None:
    """The limit of values applies to JSON only."""
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
def test_an_infinite_number_is_refused_with_its_column(
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
        ("GET", "/v2/models/slipway/trace/setting", "not_found"),
        ("POST", "/v2/systemsharedmemory/region/x/register", "not_found"),
        ("DELETE", "/v2/nothing", "not_found"),
        ("GET", "/v2/nothing", "not_found"),
        ("GET", INFER, "method_not_allowed"),
        ("POST", "/v2/models/slipway", "method_not_allowed"),
        ("DELETE", "/v2/models/slipway", "method_not_allowed"),
    ],
)
def test_unknown_paths_and_models_are_refused_in_the_protocols_error_format(
    make_settings: MakeSettings, method: str, path: str, code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert error_of(await client.request(method, path))["code"] == code

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("paths", "allowed"),
    [
        (("", "/health/live", "/models/slipway", "/models/slipway/config"), "GET, HEAD"),
        (("/models/slipway/stats", "/models/stats", "/models/slipway/versions/7"), "GET, HEAD"),
        (("/models/slipway/infer", "/models/slipway/versions/7/infer"), "POST"),
        (("/repository/index",), "POST"),
    ],
)
def test_error_for_a_wrong_method_lists_the_methods_of_the_path(
    make_settings: MakeSettings, paths: tuple[str, ...], allowed: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for path in paths:
            answer = await client.delete(f"/v2{path}")
            assert error_of(answer)["code"] == "method_not_allowed"
            assert answer.headers["allow"] == allowed

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "elsewhere.example"}, "unknown_host"),
        ({"content-length": "99999999999"}, "body_too_large"),
        ({"content-encoding": "br"}, "unsupported_media_type"),
        ({"content-length": "5, 6"}, "malformed_request"),
    ],
)
def test_a_refusal_before_the_handler_has_the_protocols_error_format(
    make_settings: MakeSettings, headers: dict[str, str], code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert error_of(await client.post(INFER, content=b"{}", headers=headers))["code"] == code

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("request", "sequence_id"),
        ("request", "priority"),
        ("request", "timeout"),
        ("request", "mine"),
        ("input", "shared_memory_region"),
        ("output", "shared_memory_region"),
    ],
)
def test_error_names_the_parameter_that_would_be_ignored(
    make_settings: MakeSettings, place: str, name: str
) -> None:
    body = pixels_in_json() | {"outputs": [{"name": "label"}]}
    described = {"request": body, "input": body["inputs"][0], "output": body["outputs"][0]}
    described[place]["parameters"] = {name: 7}

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post(INFER, json=body))
        assert (error["code"], error["field"]) == ("unknown_field", name)

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
