"""Invalid requests of the Open Inference Protocol are refused with the place of the fault."""

import itertools
import json
from typing import Any

import httpx
import numpy as np
import pytest

from slipway.serving.open_inference.messages import MAX_VALUES
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import (
    ROW,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import run
from tests.serving.open_inference.infer_requests import HEAD_LENGTH, INFER, error_of, pixels_in_json


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
