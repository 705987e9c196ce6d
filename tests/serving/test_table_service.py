"""A real service for table rows: BentoML's client, curl, malformed bodies, many callers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from slipway.inputs.columns import encode_rows, read_row
from slipway.serving.http.responses import ERRORS
from tests import plain_http
from tests.serving.bundles import (
    COLUMNS,
    LABELS,
    ROW,
    certify,
    row_classifier,
    row_probabilities,
    table_row,
    write_bundle,
)
from tests.serving.server import ROOT, Server, environment, running

pytestmark = pytest.mark.process
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    certify(root / "certificate.json", write_bundle(root / "bundle", row_classifier()))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder, max_body_bytes=200_000, max_rows=100) as server:
        server.wait()
        yield server


def is_right(prediction: dict[str, Any], row: dict[str, Any]) -> bool:
    expected = row_probabilities(encode_rows([read_row(row, COLUMNS)], COLUMNS))[0]
    return np.allclose(
        [prediction["probabilities"][label] for label in LABELS], expected, atol=1e-6
    )


def test_bentoml_client_receives_the_same_predictions_as_http(server: Server) -> None:
    rows = [table_row(number) for number in range(5)]
    script = f"""
import json, bentoml
from bentoml.exceptions import BentoMLException
with bentoml.SyncHTTPClient({server.url!r}) as client:
    print(json.dumps(client.predict(rows={rows!r})))
    try:
        client.predict(rows=[{{"age": 41}}])
    except BentoMLException as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    answer, refusal = map(json.loads, done.stdout.splitlines())
    application = plain_http.post(server.url + "/predict", json={"rows": rows}).json()
    assert answer | {"request_id": application["request_id"]} == application
    assert all(
        is_right(prediction, row)
        for prediction, row in zip(answer["predictions"], rows, strict=True)
    )
    assert refusal["error"]["field"] == "rows[0].colour"


def test_the_api_description_lists_the_columns_of_the_bundle(server: Server) -> None:
    description = plain_http.get(server.url + "/docs.json").json()
    content = description["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert list(content) == ["application/json"]
    one, several = content["application/json"]["schema"]["oneOf"]
    items = several["properties"]["rows"]["items"]
    assert one == items
    assert list(items["properties"]) == list(ROW)
    assert items["properties"]["colour"]["enum"] == ["red", "green", "blue"]
    assert items["required"] == ["age", "colour", "member"]
    assert "one row" in description["info"]["description"]
    assert plain_http.post(server.url + "/predict", json=items["example"]).status_code == 200


def test_bentoml_service_behind_the_application_gives_the_same_prediction(
    server: Server, folder: Path
) -> None:
    """A call as by another service through `bentoml.depends`."""
    script = f"""
import json, slipway.serving.service as service
from starlette.testclient import TestClient
with TestClient(service.Slipway.to_asgi(is_main=False)) as client:
    client.portal.call(service.worker().loaded)
    print(json.dumps(client.post("/predict", json={{"rows": [{ROW!r}]}}).json()))
    print(client.post("/predict", json={{"rows": [{{}}]}}).status_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    answer, status = done.stdout.splitlines()[-2:]
    application = plain_http.post(server.url + "/predict", json={"rows": [ROW]}).json()
    assert json.loads(answer) | {"request_id": application["request_id"]} == application
    assert status == "422"


def test_requests_sent_by_curl_get_predictions(server: Server) -> None:
    for content, key in ((ROW, "label"), ({"rows": [ROW]}, "predictions")):
        command = [
            "curl",
            "-s",
            "-H",
            "content-type: application/json",
            "-d",
            json.dumps(content),
            server.url + "/predict",
        ]
        assert key in json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )


GOOD = json.dumps(ROW).encode()
MALFORMED: list[tuple[dict[str, str], bytes]] = [
    (JSON, b""),
    (JSON, b"{"),
    (JSON, b"null"),
    (JSON, b"[]"),
    (JSON, b"{}"),
    (JSON, GOOD + b"x"),
    (JSON, GOOD + GOOD),
    (JSON, GOOD[:-1]),
    (JSON, GOOD.replace(b"41", b"NaN")),
    (JSON, GOOD.replace(b"41", b"Infinity")),
    (JSON, GOOD.replace(b"41", b"1e999")),
    (JSON, GOOD.replace(b"41", b"9" * 5000)),
    (JSON, GOOD.replace(b"41", b"4_1")),
    (JSON, GOOD.replace(b"41", b'41, "age": 42')),
    (JSON, GOOD.replace(b"green", b"\xff")),
    (JSON, GOOD.replace(b"green", b"\\ud800")),
    (JSON, GOOD.replace(b"green", b"\x00")),
    (JSON, b"\xef\xbb\xbf" + GOOD),
    (JSON, GOOD.decode().encode("utf-16")),
    (JSON, b"[" * 190_000),
    (JSON, b'{"a":' * 30_000),
    (JSON, b'"' + b'\\"' * 90_000),
    (JSON, b"[" + b"[]," * 60_000 + b"[]]"),
    (JSON, b'{"rows": [' + b"{}," * 60_000 + b"{}]}"),
    (JSON, json.dumps({"rows": [ROW] * 101}).encode()),
    (JSON, b'{"rows": []}'),
    (JSON, b'{"rows": [1]}'),
    (JSON, b'{"rows": "http://127.0.0.1:1/rows.json"}'),
    (JSON, json.dumps({f"column {number}": 1 for number in range(1000)}).encode()),
    (JSON, json.dumps({"rows": [{"x" * 1000: "y" * 1000}] * 50}).encode()),
    (JSON, b" " * 200_001),
    ({"content-type": "application/vnd.bentoml+pickle"}, b"\x80\x05N."),
    ({"content-type": "text/json"}, GOOD),
    ({"content-type": "application/json; charset=utf-16"}, GOOD),
    ({"content-type": "image/png"}, GOOD),
    ({"content-type": "multipart/form-data; boundary=b"}, b"--b--"),
    ({}, GOOD),
]


def test_malformed_requests_get_4xx_in_one_shape_and_later_valid_ones_get_predictions(
    server: Server,
) -> None:
    with httpx.Client(base_url=server.url) as client:
        for number, (headers, content) in enumerate(MALFORMED):
            answer = client.post("/predict", headers=headers, content=content)
            assert 400 <= answer.status_code < 500, (number, answer.text)
            error = answer.json()["error"]
            assert list(error) == ["code", "message", "field", "request_id"], number
            assert ERRORS[error["code"]] == answer.status_code, number
            row = table_row(number)
            assert is_right(client.post("/predict", json=row).json(), row), number


def test_concurrent_callers_get_their_own_predictions_beside_bad_requests(server: Server) -> None:
    contents: list[Any] = [
        table_row(number) if number % 4 else {"rows": [table_row(number), {"age": -1}]}
        for number in range(200)
    ]
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda content: client.post("/predict", json=content), contents))
    for number, answer in enumerate(answers):
        assert answer.status_code == (200 if number % 4 else 422)
        if number % 4:
            assert is_right(answer.json(), table_row(number))


def test_without_a_bundle_the_service_starts_and_reports_why_it_is_not_ready(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as server:
        server.wait("/livez")
        server.wait("/readyz", 503)
        error = plain_http.post(server.url + "/predict", json=ROW).json()["error"]
        assert error["code"] == "not_ready"
        assert plain_http.get(server.url + "/docs.json").status_code == 200
        assert (
            plain_http.get(server.url + "/").status_code == 200
        )  # the page reads the reason itself
