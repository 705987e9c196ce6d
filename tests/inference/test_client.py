import json
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx
import pandas as pd
import pytest

from slipway.inference import client as module
from slipway.inference.client import Client, ServiceError
from slipway.inference.predictions import ValuePrediction
from slipway.system.errors import DataError, UnavailableError
from tests.serving.bundles import picture

ANSWER = {"value": 1.5, "interval": [1, 2], "ood_score": 0.1, "is_ood": False}
Handle = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client waited, which takes no time here."""
    found: list[float] = []
    monkeypatch.setattr("slipway.inference.client.time.sleep", found.append)
    return found


def client_of(handle: Handle, **options: Any) -> Client:
    client = Client("http://service", "secret", **options)
    client._http = httpx.Client(
        transport=httpx.MockTransport(handle),
        base_url="http://service",
        headers=client._http.headers,
    )
    return client


def refused(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"code": code, "message": "why", "field": "age", "request_id": "r1"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": error}, headers=named)


def test_a_list_is_sent_in_requests_of_the_allowed_size() -> None:
    sizes: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        rows = json.loads(request.content)["rows"]
        sizes.append(len(rows))
        assert rows[0]["b"] is None
        return httpx.Response(
            200, json={"predictions": [ANSWER | {"value": row["a"]} for row in rows]}
        )

    frame = pd.DataFrame(
        {"a": range(25), "b": [float("nan")] * 25, "c": pd.Timestamp("2021-03-04")}
    )
    with client_of(handle, max_rows=10) as client:
        found = client.predict(frame[::-1][:24][::-1])
    assert sizes == [10, 10, 4]
    assert found.to_pandas().index.tolist() == list(range(1, 25))
    assert [one.value for one in found] == list(range(1, 25))
    assert found[0] == ValuePrediction(1, (1, 2), 0.1, False)


def test_images_are_divided_by_number_and_by_bytes() -> None:
    sizes: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        num = request.content.count(b'name="image"')
        sizes.append(num or 1)
        return httpx.Response(200, json={"predictions": [ANSWER] * num} if num else ANSWER)

    images = [picture(number) for number in range(7)]
    with client_of(handle, max_items=3) as client:
        assert len(client.predict(images)) == 7
    with client_of(handle, max_bytes=2 * len(images[0]) + 1) as client:
        assert len(client.predict(images)) == 7
        assert client.predict(images[0]).value == 1.5
    assert sizes == [3, 3, 1, 2, 2, 2, 1, 1]


def test_client_retries_a_busy_service_after_its_retry_after(waits: list[float]) -> None:
    answers = [
        refused(429, "queue_full", retry_after="3"),
        refused(503, "not_ready"),
        refused(503, "not_ready"),
        httpx.Response(200, json=ANSWER),
    ]
    with client_of(lambda request: answers.pop(0)) as client:
        assert client.predict({"age": 1}).value == 1.5
    assert waits == [3.0, 0.4, 0.8]


def test_client_raises_the_refusal_after_the_maximum_wait(waits: list[float]) -> None:
    with (
        client_of(
            lambda request: refused(429, "queue_full", retry_after="4"), max_wait_s=10
        ) as client,
        pytest.raises(ServiceError, match="429 queue_full: why") as caught,
    ):
        client.predict({"age": 1})
    assert waits == [4.0, 4.0]
    assert (caught.value.status, caught.value.field, caught.value.request_id) == (429, "age", "r1")


def test_client_raises_the_refusal_of_a_bad_item_without_retry(waits: list[float]) -> None:
    with client_of(lambda request: refused(422, "out_of_range")) as client:
        with pytest.raises(ServiceError, match="422 out_of_range"):
            client.predict({"age": 999})
        with pytest.raises(DataError, match="expected one item"):
            client.explain([{"age": 1}])
    assert waits == []


def test_client_reports_a_url_that_is_not_a_slipway_service() -> None:
    with (
        client_of(lambda request: httpx.Response(404, text="<html>")) as client,
        pytest.raises(ServiceError, match="404 no_slipway: <html>"),
    ):
        client.info()


def test_client_reports_the_url_of_a_service_that_is_down(waits: list[float]) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        client_of(handle, max_wait_s=1) as client,
        pytest.raises(UnavailableError, match=r"http://service gave no answer within 1 s"),
    ):
        client.info()
    assert waits == pytest.approx([0.2, 0.4])


def test_retry_after_may_be_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    later = format_datetime(now.replace(second=5), usegmt=True)
    for text, seconds in [(later, 5.0), ("2", 2.0), ("soon", None), ("", None)]:
        response = httpx.Response(503, headers={"retry-after": text})
        assert module._retry_after_s(response, lambda: now) == seconds
