"""The proxy in front of several models, with stand-ins for their services."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from slipway.serving.gateway.model_process import ModelProcess
from slipway.serving.gateway.models_file import HostedModel
from slipway.serving.gateway.proxy import Gateway, merged
from slipway.serving.http.callers import LoopbackOnly
from slipway.serving.settings import Settings

Respond = Callable[[httpx.Request], httpx.Response]


def service(name: str, respond: Respond) -> ModelProcess:
    """A service that is not started; `respond` answers in its place."""
    made = ModelProcess(HostedModel(name, Path(), None, Settings()))
    made.client = httpx.AsyncClient(
        base_url="http://127.0.0.1:1", transport=httpx.MockTransport(respond)
    )
    return made


def echo(request: httpx.Request) -> httpx.Response:
    """Answer with what arrived."""
    if request.url.path == "/readyz":
        return httpx.Response(200)
    content = {
        "method": request.method,
        "url": request.url.raw_path.decode(),
        "host": request.headers["host"],
        "headers": sorted(request.headers),
        "body": request.content.decode(),
    }
    stream = httpx.ByteStream(json.dumps(content).encode())
    return httpx.Response(418, stream=stream, headers={"x-own": "1", "connection": "close"})


def failing(error: type[httpx.HTTPError]) -> Respond:
    def respond(request: httpx.Request) -> httpx.Response:
        raise error("no")

    return respond


def ask(gateway: Gateway, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        transport = httpx.ASGITransport(app=gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await work(client)

    return asyncio.run(call())


def get(gateway: Gateway, path: str, **options: Any) -> httpx.Response:
    answer: httpx.Response = ask(gateway, lambda client: client.get(path, **options))
    return answer


@pytest.fixture(name="gateway")
def _gateway() -> Gateway:
    return Gateway([service("a", echo), service("b", failing(httpx.ConnectError))], LoopbackOnly())


def test_a_request_reaches_its_model_unchanged_and_so_does_the_answer(gateway: Gateway) -> None:
    answer = ask(
        gateway,
        lambda client: client.post(
            "/models/a/v%2Fx/y?q=%20&q=1",
            content=b"12",
            headers={"authorization": "Bearer K", "te": "trailers", "connection": "close"},
        ),
    )
    sent = answer.json()
    assert answer.status_code == 418
    assert (sent["method"], sent["url"], sent["body"]) == ("POST", "/v%2Fx/y?q=%20&q=1", "12")
    assert sent["host"] == "127.0.0.1"
    assert "authorization" in sent["headers"]
    assert not {"te", "connection"} & set(sent["headers"])
    plain = get(gateway, "/models/a/", headers={"accept-encoding": "identity"}).json()
    assert set(plain["headers"]) <= {"host", "accept", "accept-encoding", "user-agent"}
    assert answer.headers["x-own"] == "1"
    assert "connection" not in answer.headers


def test_the_open_inference_protocol_keeps_its_paths(gateway: Gateway) -> None:
    assert get(gateway, "/v2/models/a/versions/1/ready").json()["url"] == (
        "/v2/models/a/versions/1/ready"
    )
    listed = get(gateway, "/v2/repository/index").json()
    assert listed == [{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE"}]


def test_a_model_that_does_not_run_is_503_and_the_others_answer(gateway: Gateway) -> None:
    refused = get(gateway, "/models/b/predict")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["request_id"] == refused.headers["x-request-id"]
    assert get(gateway, "/models/a/predict").status_code == 418
    assert get(gateway, "/readyz").json() == {"ready": True, "models": ["a"]}
    assert [one["ready"] for one in get(gateway, "/models").json()["models"]] == [True, False]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (httpx.PoolTimeout, 503, "too_many_connections"),
        (httpx.ReadTimeout, 504, "deadline_exceeded"),
        (httpx.RemoteProtocolError, 503, "not_ready"),
    ],
)
def test_a_busy_or_hanging_model_is_refused_by_its_name(
    error: type[httpx.HTTPError], status: int, code: str
) -> None:
    answer = get(Gateway([service("a", failing(error))], None), "/models/a/predict")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("path", ["/models/c/predict", "/models/..%2Fa/predict", "/v2/models/c"])
def test_an_unknown_model_is_404_with_the_known_ones(gateway: Gateway, path: str) -> None:
    answer = get(gateway, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_model")
    assert answer.json()["error"]["message"].endswith("this service has a, b")


def test_without_a_ready_model_the_gateway_is_alive_and_not_ready() -> None:
    gateway = Gateway([service("b", failing(httpx.ConnectError))], None)
    assert get(gateway, "/livez").status_code == 200
    assert get(gateway, "/readyz").status_code == 503


def test_the_page_links_each_model(gateway: Gateway) -> None:
    page = get(gateway, "/")
    assert '<a href="models/a/">a</a></td><td>ready' in page.text
    assert '<a href="models/b/">b</a></td><td>not ready' in page.text
    assert "style-src 'sha256-" in page.headers["content-security-policy"]
    assert get(gateway, "/models/a").headers["location"] == "a/"
    assert get(gateway, "/nothing").status_code == 404


def test_pages_of_other_sites_do_not_see_the_list(gateway: Gateway) -> None:
    assert get(gateway, "/models", headers={"host": "evil.example"}).status_code == 421
    assert get(gateway, "/", headers={"origin": "http://evil.example"}).status_code == 403
    assert get(gateway, "/livez", headers={"host": "evil.example"}).status_code == 200


METRICS = """\
# HELP slipway_requests_total Answered requests.
# TYPE slipway_requests_total counter
slipway_requests_total{code="200",route="/predict"} 3.0
# HELP slipway_seconds Duration.
# TYPE slipway_seconds histogram
slipway_seconds_bucket{le="0.5"} 2.0
slipway_seconds_bucket{le="+Inf"} 3.0
slipway_seconds_count 3.0
slipway_seconds_sum 1.5
"""


def test_merged_metrics_are_those_of_each_model_with_its_label() -> None:
    joined = merged({"a": METRICS, "b": METRICS.replace("3.0", "4.0")}, []).decode()
    assert 'slipway_requests_total{code="200",model="a",route="/predict"} 3.0' in joined
    assert 'slipway_requests_total{code="200",model="b",route="/predict"} 4.0' in joined
    assert 'slipway_seconds_bucket{le="+Inf",model="b"} 4.0' in joined
    assert 'slipway_seconds_sum{model="a"} 1.5' in joined
    assert joined.count("# TYPE slipway_requests_total counter") == 1
    assert joined.count("# TYPE slipway_seconds histogram") == 1


def test_metrics_say_which_models_gave_theirs() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer K":
            return httpx.Response(401, json={"error": {"code": "key_missing"}})
        return httpx.Response(200, text=METRICS)

    gateway = Gateway(
        [service("a", respond), service("b", failing(httpx.ConnectError))], LoopbackOnly()
    )
    assert get(gateway, "/metrics").status_code == 401
    text = get(gateway, "/metrics", headers={"authorization": "Bearer K"}).text
    assert 'slipway_model_up{model="a"} 1.0' in text
    assert 'slipway_model_up{model="b"} 0.0' in text
    assert 'slipway_gateway_requests_total{code="401",model=""} 1.0' in text


def test_operators_are_asked_at_their_own_port() -> None:
    settings = replace(
        service("a", echo).model, settings=Settings(admin_port=4000, admin_host="::1")
    )
    assert ModelProcess(settings).operators_address == "http://[::1]:4000"


def test_a_large_body_is_passed_on_in_parts() -> None:
    """The gateway holds no whole body: the service sees the first part before the last is sent."""
    seen: list[str] = []

    async def backend(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            seen.append(f"read {len(message['body'])}")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(len(seen)).encode()})

    made = service("a", echo)
    made.client = httpx.AsyncClient(
        base_url="http://127.0.0.1:1", transport=httpx.ASGITransport(app=backend)
    )

    async def parts() -> Any:
        for _ in range(3):
            yield b"x" * 1000
            seen.append("sent")

    answer = ask(
        Gateway([made], None), lambda client: client.post("/models/a/predict", content=parts())
    )
    assert answer.status_code == 200
    assert seen[:4] == ["read 1000", "sent", "read 1000", "sent"]
