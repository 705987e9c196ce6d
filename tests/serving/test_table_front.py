"""A bundle for table rows behind the application: both request formats, and refusals."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipway.artifacts.bundle import MANIFEST, Metric, load_bundle
from slipway.inputs.columns import encode_rows, read_row
from slipway.serving.http.responses import ERRORS
from slipway.serving.worker import ModelWorker
from tests.serving.any_json import BODIES
from tests.serving.bundles import (
    CLASS_FIELDS,
    COLUMNS,
    LABELS,
    ROW,
    VALUE_FIELDS,
    certify,
    picture,
    row_classifier,
    row_probabilities,
    row_sum,
    table_row,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, put_in_place_of, run
from tests.serving.test_app import slow_down

JSON = {"content-type": "application/json"}
ROWS = [table_row(number) for number in range(31)]
pytestmark = pytest.mark.usefixtures("certified_table")


def vectors(rows: list[dict[str, Any]]) -> NDArray[np.float32]:
    """Encode rows as in training, as (rows, width)."""
    return encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)


def expected(rows: list[dict[str, Any]]) -> NDArray[np.float32]:
    return row_probabilities(vectors(rows))


def probabilities(answer: dict[str, Any]) -> list[float]:
    return [answer["probabilities"][label] for label in LABELS]


def test_single_row_gets_one_flat_prediction_as_the_graph_computes_it(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = (
            await client.post("/predict", json=ROW, headers={"x-request-id": "mine-1"})
        ).json()
        assert list(answer) == [*CLASS_FIELDS, "model_version", "request_id"]
        assert answer["label"] == LABELS[int(expected([ROW])[0].argmax())]
        assert answer["request_id"] == "mine-1"
        assert np.allclose(probabilities(answer), expected([ROW])[0], atol=1e-6)

    run(make_settings(), work)


def test_several_rows_get_predictions_in_order_across_batches(
    make_settings: MakeSettings,
) -> None:
    rows = ROWS * 3

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = (await client.post("/predict", json={"rows": rows})).json()
        assert list(answer) == ["predictions", "model_version", "request_id"]
        assert [list(prediction) for prediction in answer["predictions"]] == [CLASS_FIELDS] * len(
            rows
        )
        assert np.allclose(
            [probabilities(prediction) for prediction in answer["predictions"]],
            expected(rows),
            atol=1e-6,
        )
        assert metric(worker, "slipway_batch_size_sum") == len(rows)
        assert (
            metric(worker, "slipway_prediction_duration_seconds_count")
            == metric(worker, 'slipway_stage_seconds_count{stage="infer"}')
            == 1
        )

    run(make_settings(), work)


def test_ignored_columns_are_accepted_by_all_endpoints_and_listed(
    certified: Path, make_settings: MakeSettings
) -> None:
    contract = COLUMNS.model_copy(update={"ignored": ["customer", "note"]})
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), input=contract),
    )
    row = ROW | {"customer": 17, "note": "called twice"}
    # Ignored columns have another shape. Even as the first tensors they do not set the row count.
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [2], "data": [str(row[name])] * 2}
        for name in ("customer", "note")
    ]
    tensors += [
        {"name": name, "datatype": kind, "shape": [1], "data": [row[name]]}
        for name, kind in zip(ROW, ["FP64", "FP64", "BYTES", "BYTES", "BOOL", "BYTES"], strict=True)
    ]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for content in (row, {"rows": [row]}):
            answer = (await client.post("/predict", json=content)).json()
            answer = answer.get("predictions", [answer])[0]
            assert np.allclose(probabilities(answer), expected([ROW])[0], atol=1e-6)
        assert (
            error_of(await client.post("/predict", json=row | {"other": 1}))["code"]
            == "unknown_column"
        )
        assert (await client.post("/explain", json=row)).status_code == 200

        answered = (await client.post("/v2/models/slipway/infer", json={"inputs": tensors})).json()
        found = {output["name"]: output["data"] for output in answered["outputs"]}
        assert np.allclose(found["probabilities"], expected([ROW])[0], atol=1e-6)
        other = tensors[0] | {"name": "other"}
        refused = await client.post("/v2/models/slipway/infer", json={"inputs": [*tensors, other]})
        assert refused.json()["code"] == "unknown_column"

        assert (await client.get("/model")).json()["input"]["ignored"] == ["customer", "note"]
        described = (await client.get("/v2/models/slipway")).json()
        assert described["properties"] == {"ignored_inputs": '["customer", "note"]'}
        assert "customer" not in [tensor["name"] for tensor in described["inputs"]]
        described = (await client.get("/docs.json")).text
        assert "ignored, as in training" in described

    run(make_settings(), work)


def test_the_model_info_has_the_measured_coverage(
    certified: Path, make_settings: MakeSettings
) -> None:
    measured = Metric(value=0.797, low=0.719, high=0.857, confidence=0.95, rows=138)
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), coverage=measured),
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        found = (await client.get("/model")).json()["coverage"]
        assert found.pop("measured") == measured.model_dump(mode="json")
        assert found == {"target": 0.9, "verdict": "below", "fitting_rows": 50, "few_rows": True}

    run(make_settings(), work)


def test_bundle_for_table_rows_without_measured_coverage_is_served(
    certified: Path, make_settings: MakeSettings
) -> None:
    bundle = write_bundle(certified / "bundle", row_classifier())
    content = json.loads((bundle.root / MANIFEST).read_text())
    del content["coverage"], content["input"]["ignored"], content["models"]["fp32"]["coverage"]
    (bundle.root / MANIFEST).write_text(json.dumps(content))
    certify(certified / "certificate.json", load_bundle(bundle.root))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        card = (await client.get("/model")).json()
        assert (card["coverage"]["measured"], card["coverage"]["verdict"]) == (None, None)
        assert (
            error_of(await client.post("/predict", json=ROW | {"customer": 17}))["code"]
            == "unknown_column"
        )
        assert (await client.post("/predict", json=ROW)).status_code == 200

    run(make_settings(), work)


def test_regression_request_gets_a_value_for_each_row(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", row_sum()))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        one = (await client.post("/predict", json=ROW)).json()
        assert list(one) == [*VALUE_FIELDS, "model_version", "request_id"]
        assert one["value"] == pytest.approx(float(vectors([ROW]).sum()), abs=1e-4)
        several = (await client.post("/predict", json={"rows": [ROW, ROWS[1]]})).json()
        assert [list(prediction) for prediction in several["predictions"]] == [VALUE_FIELDS] * 2
        assert several["predictions"][0]["value"] == one["value"]

    run(make_settings(), work)


def test_model_receives_the_input_vector_of_training_bit_for_bit(
    make_settings: MakeSettings,
) -> None:
    reached: list[NDArray[np.float32]] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        right = worker._live.batcher._run

        def noting(batch: Any) -> Any:
            reached.append(batch)
            return right(batch)

        put_in_place_of(worker._live, noting)
        assert (await client.post("/predict", json={"rows": ROWS})).status_code == 200

    run(make_settings(), work)
    assert np.concatenate(reached).tobytes() == vectors(ROWS).tobytes()


def test_bad_row_never_reaches_the_model_and_31_concurrent_rows_are_predicted_right(
    make_settings: MakeSettings,
) -> None:
    bad: list[Any] = [ROW | {"age": -1}, {"rows": [ROW, ROW | {"colour": "mauve"}]}, {}]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.001)
        for content in bad:
            sizes.clear()
            answers = await asyncio.gather(
                *(client.post("/predict", json=row) for row in [*ROWS[:16], content, *ROWS[16:]])
            )
            error_of(answers.pop(16))
            assert np.allclose(
                [probabilities(answer.json()) for answer in answers], expected(ROWS), atol=1e-6
            )
            assert sum(sizes) == len(ROWS)

    run(make_settings(), work)


def test_an_expired_request_leaves_no_rows_in_the_queue(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.3)
        assert (
            error_of(await client.post("/predict", json={"rows": ROWS * 3}))["code"]
            == "deadline_exceeded"
        )
        await asyncio.sleep(0.5)
        assert sizes == [16]  # the batch that was under way, of the bundle's largest size
        assert worker._live
        assert worker._live.batcher.num_waiting == 0

    run(make_settings(request_timeout_s=0.2), work)


@pytest.mark.parametrize(
    ("content", "headers", "code", "hint"),
    [
        (
            picture(),
            {"content-type": "image/png"},
            "unsupported_media_type",
            "rows of a table, not images",
        ),
        (
            picture(),
            {"content-type": "application/octet-stream"},
            "unsupported_media_type",
            "not images",
        ),
        (
            b"--b--",
            {"content-type": "multipart/form-data; boundary=b"},
            "unsupported_media_type",
            "not images",
        ),
        (b"{}", {"content-type": "text/plain"}, "unsupported_media_type", "application/json"),
        (b"{}", {}, "unsupported_media_type", "application/json"),
        (
            b"{}",
            {"content-type": "application/json; charset=latin-1"},
            "unsupported_media_type",
            "expected UTF-8",
        ),
        (b"{}", {"content-type": "application/json; charset=UTF-8"}, "missing_value", "age"),
        (b"NaN", JSON, "malformed_json", "NaN"),
        (b"[]", JSON, "not_a_row", "GET /model"),
        (b'{"rows":[]}', JSON, "no_rows", "empty"),
        (json.dumps({"rows": [ROW] * 5}).encode(), JSON, "too_many_rows", "the limit is 4"),
        (b" " * 3000 + b"{}", JSON, "body_too_large", "2000 bytes"),
    ],
)
def test_a_body_that_is_not_a_row_is_refused_with_a_hint(
    make_settings: MakeSettings, content: bytes, headers: dict[str, str], code: str, hint: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post("/predict", content=content, headers=headers))
        assert error["code"] == code
        assert hint in error["message"]
        assert metric(worker, f'slipway_errors_total{{error="{code}"}}') == 1

    run(make_settings(max_rows=4, max_body_bytes=2000), work)


def test_a_model_for_images_refuses_json_with_a_hint(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle"))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post("/predict", json=ROW))
        assert error["code"] == "unsupported_media_type"
        assert "this model takes images, not JSON" in error["message"]

    run(make_settings(), work)


@pytest.mark.process
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(BODIES, min_size=20, max_size=20))
def test_any_json_body_gets_predictions_or_an_error_of_the_common_shape(
    make_settings: MakeSettings, bodies: list[bytes]
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for body in bodies:
            answer = await client.post("/predict", content=body, headers=JSON)
            if answer.status_code != 200:
                assert ERRORS[error_of(answer)["code"]] < 500
        assert np.allclose(
            probabilities((await client.post("/predict", json=ROW)).json()),
            expected([ROW])[0],
            atol=1e-6,
        )

    run(make_settings(), work)


def test_the_model_info_describes_each_column_and_its_example_is_valid(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        card = (await client.get("/model")).json()
        assert card["task"] == "table_classification"
        described = {column["name"]: column for column in card["input"]["columns"]}
        assert described["age"] == {
            "name": "age",
            "kind": "number",
            "required": True,
            "min": 0.0,
            "max": 120.0,
        }
        assert described["income"]["required"] is False
        colours = ["red", "green", "blue"]
        assert described["colour"] == {
            "name": "colour", "kind": "category", "required": True, "categories": colours,
            "other_categories": "refused",
        }  # fmt: skip
        assert described["city"]["other_categories"] == "missing"
        assert set(card["input"]["example"]) == set(described)
        assert (await client.post("/predict", json=card["input"]["example"])).status_code == 200

    run(make_settings(), work)


def test_a_column_missing_only_outside_training_rows_may_be_missing(
    certified: Path, make_settings: MakeSettings
) -> None:
    columns = [
        column.model_copy(update={"imputed": column.name in ("age", "colour")})
        for column in COLUMNS.columns
    ]
    contract = COLUMNS.model_copy(update={"columns": columns})
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), input=contract),
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        described = {
            column["name"]: column
            for column in (await client.get("/model")).json()["input"]["columns"]
        }
        assert [name for name, column in described.items() if column["required"]] == ["member"]
        assert described["colour"]["other_categories"] == "missing"
        assert (
            await client.post("/predict", json={"member": True, "colour": "mauve"})
        ).status_code == 200

    run(make_settings(), work)
