"""The proxy in front of several models, with fakes of their services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from slipway.serving.gateway import model_process, proxy
from slipway.serving.gateway.model_process import ModelProcess
from slipway.serving.gateway.models_file import HostedModel
from slipway.serving.gateway.proxy import Gateway, merged
from slipway.serving.http.callers import LoopbackOnly
from slipway.serving.rollout.decision import PREPARE_S
from slipway.serving.settings import Settings

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    """Respond with the received request as JSON."""
    if request.path == "/readyz":
        return web.Response()
    content = {
        "method": request.method,
        "url": request.raw_path,
        "host": request.headers["host"],
        "headers": [name.lower() for name in request.headers],
        "body": await request.text(),
    }
    return web.json_response(content, status=418, headers={"x-own": "1", "connection": "close"})


async def hang(request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def disconnect(request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport
    request.transport.abort()
    return web.Response()


def ask(
    services: dict[str, Respond | None],
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    **settings: Any,
) -> Any:
    """Call `work` with a client of a gateway; a service that is None does not run."""

    async def call() -> Any:
        async with AsyncExitStack() as stack:
            behind = []
            for name, respond in services.items():
                model = HostedModel(name, Path(), None, Settings(**settings))
                service = ModelProcess(model)
                if respond:
                    server = RawTestServer(respond)
                    await stack.enter_async_context(server)
                    assert server.port
                    service.port = server.port
                stack.push_async_callback(service.close)
                behind.append(service)
            gateway = Gateway(behind, LoopbackOnly())
            transport = httpx.ASGITransport(app=gateway)
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
            return await work(await stack.enter_async_context(client))

    return asyncio.run(call())


LIMITS = {"a": 500 * 2**20, "b": None}
MODELS: dict[str, Respond | None] = {"a": echo, "b": None}


def get(path: str, services: dict[str, Respond | None] = MODELS, **options: Any) -> httpx.Response:
    answer: httpx.Response = ask(services, lambda client: client.get(path, **options))
    return answer


def test_gateway_forwards_requests_and_responses_unchanged() -> None:
    answer = ask(
        MODELS,
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
    plain = get("/models/a/", headers={"accept-encoding": "identity"}).json()
    assert set(plain["headers"]) <= {"host", "accept", "accept-encoding", "user-agent"}
    assert answer.headers["x-own"] == "1"
    assert "connection" not in answer.headers


def test_gateway_keeps_the_paths_of_the_open_inference_protocol() -> None:
    assert get("/v2/models/a/versions/1/ready").json()["url"] == ("/v2/models/a/versions/1/ready")
    listed = get("/v2/repository/index").json()
    assert listed == [{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE"}]


def test_gateway_returns_503_for_a_stopped_model_while_others_keep_serving() -> None:
    refused = get("/models/b/predict")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["request_id"] == refused.headers["x-request-id"]
    assert get("/models/a/predict").status_code == 418
    assert get("/readyz").json() == {"ready": True, "models": ["a"]}
    assert [one["ready"] for one in get("/models").json()["models"]] == [True, False]


@pytest.mark.parametrize(
    ("respond", "status", "code"),
    [(hang, 504, "deadline_exceeded"), (disconnect, 503, "not_ready")],
)
def test_gateway_refuses_requests_to_a_model_that_hangs_or_ends(
    respond: Respond, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_process, "PATIENCE_S", 0.0)
    answer = ask({"a": respond}, lambda client: client.get("/models/a/x"), request_timeout_s=0.1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_gateway_waits_for_a_rollout_command_longer_than_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_process, "PATIENCE_S", 0.0)

    async def rehearse(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(0.15)
        return web.Response(status=202)

    async def work(client: httpx.AsyncClient) -> list[int]:
        ways = [("POST", "rollout"), ("GET", "rollout"), ("POST", "predict")]
        found = await asyncio.gather(
            *(client.request(method, f"/models/a/{path}") for method, path in ways)
        )
        return [one.status_code for one in found]

    assert ask({"a": rehearse}, work, request_timeout_s=0.1) == [202, 504, 504]
    assert model_process.COMMAND_S == PREPARE_S


def test_requests_above_the_limit_of_a_model_are_refused_at_once() -> None:
    async def work(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        first = asyncio.create_task(client.get("/models/a/x"))
        await asyncio.sleep(0.05)
        refused, other = await client.get("/models/a/x"), await client.get("/models/b/x")
        first.cancel()
        return refused, other

    refused, other = ask({"a": hang, "b": echo}, work, max_connections=1)
    assert refused.json()["error"]["code"] == "too_many_connections"
    assert other.status_code == 418


@pytest.mark.parametrize("path", ["/models/c/predict", "/models/..%2Fa/predict", "/v2/models/c"])
def test_gateway_returns_404_with_the_known_models_for_an_unknown_one(path: str) -> None:
    answer = get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_model")
    assert answer.json()["error"]["message"].endswith("this service has a, b")


def test_gateway_without_a_ready_model_is_alive_and_not_ready() -> None:
    assert get("/livez", {"b": None}).status_code == 200
    assert get("/readyz", {"b": None}).status_code == 503


def test_the_page_of_the_gateway_links_each_model() -> None:
    page = get("/")
    assert '<a href="models/a/">a</a></td><td>ready' in page.text
    assert '<a href="models/b/">b</a></td><td>not ready' in page.text
    assert "style-src 'sha256-" in page.headers["content-security-policy"]
    assert get("/models/a").headers["location"] == "a/"
    assert get("/nothing").status_code == 404


def test_page_and_list_of_the_gateway_show_the_memory_of_each_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "memory_limit_bytes", lambda: 900 * 2**20)
    models = [HostedModel(name, Path(), limit, Settings()) for name, limit in LIMITS.items()]
    services = [ModelProcess(model) for model in models]
    for service in services:
        service.memory_bytes = 300 * 2**20

    async def work() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app=Gateway(services, LoopbackOnly()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            found = await client.get("/"), await client.get("/models")
        await asyncio.gather(*(service.close() for service in services))
        return found

    page, listed = asyncio.run(work())
    assert "<td>300 of 500 MiB</td>" in page.text
    assert "<td>300 MiB</td>" in page.text
    assert "All models use 600 of 900 MiB." in page.text
    found = [(one["memory_mib"], one["max_memory_mib"]) for one in listed.json()["models"]]
    assert found == [(300, 500), (300, None)]


def test_gateway_warns_once_when_its_models_take_almost_all_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proxy, "memory_limit_bytes", lambda: 1000 * 2**20)
    monkeypatch.setattr(proxy, "MEMORY_CHECK_S", 0.0)
    service = ModelProcess(HostedModel("a", Path(), None, Settings()))
    watch = Gateway([service], LoopbackOnly())._watch_memory

    async def work() -> list[int]:
        task, counts = asyncio.create_task(watch()), []
        for used_mib in (900, 901, 902, 0, 950):
            service.memory_bytes = used_mib * 2**20
            for _ in range(10):
                await asyncio.sleep(0)
            counts.append(len(caplog.records))
        task.cancel()
        return counts

    assert asyncio.run(work()) == [0, 1, 1, 1, 2]
    assert "the models take 901 of 1000 MiB" in caplog.text


def test_each_start_of_a_service_has_a_port_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A service whose port was taken by another program ends, and is started at another port."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    service = ModelProcess(HostedModel("a", tmp_path, None, Settings()))

    async def work() -> set[int]:
        ports = set()
        for _ in range(3):
            assert "exit code 1" in await service._run_once()
            ports.add(service.port)
        return ports

    assert len(asyncio.run(work()) - {0}) > 1


def test_gateway_hides_its_list_of_models_from_pages_of_other_sites() -> None:
    assert get("/models", headers={"host": "evil.example"}).status_code == 421
    assert get("/", headers={"origin": "http://evil.example"}).status_code == 403
    assert get("/livez", headers={"host": "evil.example"}).status_code == 200


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


def test_merged_metrics_contain_each_models_metrics_with_its_label() -> None:
    joined = merged({"a": METRICS, "b": METRICS.replace("3.0", "4.0")}, []).decode()
    assert 'slipway_requests_total{code="200",model="a",route="/predict"} 3.0' in joined
    assert 'slipway_requests_total{code="200",model="b",route="/predict"} 4.0' in joined
    assert 'slipway_seconds_bucket{le="+Inf",model="b"} 4.0' in joined
    assert 'slipway_seconds_sum{model="a"} 1.5' in joined
    assert joined.count("# TYPE slipway_requests_total counter") == 1
    assert joined.count("# TYPE slipway_seconds histogram") == 1


def test_gateway_metrics_show_which_models_returned_metrics() -> None:
    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("authorization") != "Bearer K":
            return web.json_response({"error": {"code": "key_missing"}}, status=401)
        return web.Response(text=METRICS)

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        keys: tuple[dict[str, str], ...] = ({}, {"authorization": "Bearer K"})
        return [await client.get("/metrics", headers=key) for key in keys]

    refused, answer = ask({"a": respond, "b": None}, work)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "key_missing")
    assert 'slipway_model_up{model="a"} 1.0' in answer.text
    assert 'slipway_model_up{model="b"} 0.0' in answer.text
    assert 'slipway_gateway_requests_total{code="401",model=""} 1.0' in answer.text


def test_operators_address_of_a_model_is_its_admin_port() -> None:
    model = HostedModel("a", Path(), None, Settings(admin_port=4000, admin_host="::1"))
    assert ModelProcess(model).operators_address == "http://[::1]:4000"


def test_gateway_forwards_a_body_while_it_arrives() -> None:
    """The service reads the first part before the caller has sent the last one."""
    is_read = asyncio.Event()

    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        sizes = []
        async for part in request.content.iter_any():
            sizes.append(len(part))
            is_read.set()
        return web.json_response(sum(sizes))

    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        async with asyncio.timeout(5):
            await is_read.wait()
        yield b"x" * 500

    answer = ask({"a": respond}, lambda client: client.post("/models/a/predict", content=parts()))
    assert answer.json() == 1500
