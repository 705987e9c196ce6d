"""The proxy in front of several models, at `/models/NAME/...` and `/v2/models/NAME/...`.

It passes requests and responses on unchanged. Keys, limits and deadlines are decided by each
model's service. Its own responses are a list of the models, their health, and the metrics of all
with the label `model`.
"""

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncIterator
from html import escape
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send
from yarl import URL

from slipway.serving.gateway.model_process import MEMORY_CHECK_S, ModelProcess
from slipway.serving.http.callers import CallerCheck
from slipway.serving.http.framing import checked_headers
from slipway.serving.http.responses import (
    RETRY_AFTER,
    ClientDisconnectedError,
    Refusal,
    Response,
    error_response,
    json_response,
    send_response,
)
from slipway.serving.http.routes import Headers, new_request_id, request_id_of
from slipway.serving.metrics.gauges import memory_limit_bytes
from slipway.serving.metrics.service_metrics import CollectedMetrics

if TYPE_CHECKING:
    from slipway.serving.gateway.grpc_proxy import GrpcProxy

logger = logging.getLogger("slipway.gateway")
# Headers of one connection (RFC 9110, section 7.6.1), not of the message.
_OF_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"expect"),
    )
)
# The colours are those of the page of a model.
_STYLE = (
    ":root{color-scheme:light dark;--ground:#f5f6f8;--card:#fff;--ink:#18202c;--soft:#5b6678;"
    "--line:#dfe3e9;--accent:#1d4ed8;--good:#15803d;--bad:#b42318}"
    "@media(prefers-color-scheme:dark){:root{--ground:#0f131a;--card:#171d27;--ink:#e6eaf1;"
    "--soft:#9aa5b6;--line:#2a3342;--accent:#7aa7ff;--good:#4ade80;--bad:#ff8a80}}"
    "body{font:16px/1.5 system-ui;max-width:46rem;margin:2rem auto;padding:0 1rem;"
    "background:var(--ground);color:var(--ink)}"
    "h1{font-size:1.5rem;margin:0}p{color:var(--soft);margin:.25rem 0 1.25rem}"
    "table+p{margin-top:.75rem}"
    "a{color:var(--accent)}"
    "table{border-collapse:separate;border-spacing:0;width:100%;background:var(--card);"
    "border:1px solid var(--line);border-radius:12px}"
    "th,td{text-align:left;padding:.6rem 1rem}td{border-top:1px solid var(--line)}"
    "th{color:var(--soft);font-size:.875rem;font-weight:600}"
    "td:first-child{overflow-wrap:anywhere}td:last-child,th:last-child{text-align:right}"
    "td:nth-child(2):before{content:'\\25cf  ';color:var(--bad)}"
    ".ready td:nth-child(2):before{color:var(--good)}"
)
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    "content-security-policy",
    f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; frame-ancestors 'none'",
)


class Gateway:
    """An ASGI application in front of the services of several models."""

    def __init__(
        self,
        services: list[ModelProcess],
        caller_check: CallerCheck | None,
        grpc_address: tuple[str, int] | None = None,
    ) -> None:
        """Create the gateway.

        `caller_check` guards its own addresses; None admits all callers. `grpc_address` is the host
        and the port for gRPC.
        """
        self._grpc_address = grpc_address
        self._services = {service.model.name: service for service in services}
        self._caller_check = caller_check
        self._registry = CollectorRegistry()
        self._answered = Counter(
            "slipway_gateway_requests_total",
            "Answers by model and status, or code of gRPC; without a model: the gateway's own.",
            ["model", "code"],
            registry=self._registry,
        )
        self._running: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the services from the start of the gateway's server to its end."""
        await receive()
        grpc_proxy = await self._open_grpc()
        runs = (service.run() for service in self._services.values())
        self._running = [asyncio.create_task(run) for run in (*runs, self._watch_memory())]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if grpc_proxy:
            await grpc_proxy.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _open_grpc(self) -> "GrpcProxy | None":
        if self._grpc_address is None:
            return None
        from slipway.serving.gateway.grpc_proxy import GrpcProxy

        def count(model: str, code: str) -> None:
            self._answered.labels(model, code).inc()

        opened = GrpcProxy(self._services, self._states, count)
        await opened.open(*self._grpc_address)
        return opened

    async def _watch_memory(self) -> None:
        """Warn once when the models take nine tenths of the memory, and again after they took less.

        The system ends processes when memory runs out, and may choose those of any model.
        """
        has_warned = False
        while True:
            used, available = self._used_mib(), memory_limit_bytes() >> 20
            is_short = used > 0.9 * available
            if is_short and not has_warned:
                logger.warning(
                    "the models take %d of %d MiB of memory; set max_memory_mib, or serve fewer",
                    *(used, available),
                )
            has_warned = is_short
            await asyncio.sleep(MEMORY_CHECK_S)

    def _used_mib(self) -> int:
        return sum(service.memory_bytes for service in self._services.values()) >> 20

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = {}
        name = request_id = ""
        try:
            headers = checked_headers(scope)
            request_id = request_id_of(headers)
            name, target = self._find(scope["raw_path"].decode("latin-1"))
            if name:
                status = await self._pass_on(self._services[name], target, scope, receive, send)
                self._answered.labels(name, str(status)).inc()
                return
            response = await self._answer(target, headers)
        except Refusal as refusal:
            request_id = request_id or new_request_id()
            response = error_response(refusal, request_id)
        except ClientDisconnectedError:
            return
        self._answered.labels(name, str(response.status)).inc()
        with_body = scope["method"] != "HEAD"
        await send_response(response, request_id, send, with_body=with_body)

    def _find(self, path: str) -> tuple[str, str]:
        """Return the model's name and the path in its service; "" and the path for its own."""
        for prefix, is_kept in (("/models/", False), ("/v2/models/", True)):
            if path.startswith(prefix):
                name, slash, below = path.removeprefix(prefix).partition("/")
                if name not in self._services:
                    raise Refusal(
                        "unknown_model",
                        f"there is no model {name[:80]!r}, this service has "
                        f"{', '.join(self._services)}",
                    )
                if not is_kept and not slash:
                    return "", path
                return name, path if is_kept else f"/{below}"
        return "", path

    async def _answer(self, path: str, headers: Headers) -> Response:
        """Respond to a request for one of the gateway's own addresses."""
        name = path.removeprefix("/models/")
        if name in self._services:  # without the slash, the page would look for its files above
            return Response(308, b"", headers=(("location", f"{name}/"),))
        if path in ("/livez", "/health/live", "/v2/health/live"):
            return json_response({"live": True})
        if path in ("/readyz", "/health/ready", "/v2/health/ready"):
            ready = [name for name, is_ready in (await self._states()).items() if is_ready]
            if not ready:
                raise Refusal("not_ready", "no model is ready", headers=(RETRY_AFTER,))
            return json_response({"ready": True, "models": ready})
        if self._caller_check:
            self._caller_check.admit(headers, "caller")
        if path == "/metrics":
            return await self._metrics(headers)
        if path == "/models":
            return json_response({"models": await self._listed()})
        if path == "/v2":
            return json_response({"name": "slipway", "version": "", "extensions": []})
        if path == "/v2/repository/index":
            states = (await self._states()).items()
            return json_response(
                [{"name": name, "state": "READY" if ok else "UNAVAILABLE"} for name, ok in states]
            )
        if path == "/":
            return self._page(await self._listed())
        raise Refusal(
            "not_found",
            "there is nothing at this path; known: /models, /models/NAME/ and all that a service "
            "has below it, /v2/models/NAME, /metrics, /livez, /readyz",
        )

    async def _states(self) -> dict[str, bool]:
        services = self._services.values()
        found = await asyncio.gather(*(service.is_ready() for service in services))
        return dict(zip(self._services, found, strict=True))

    async def _listed(self) -> list[dict[str, str | int | bool | None]]:
        return [
            {
                "name": name,
                "ready": is_ready,
                "url": f"/models/{name}/",
                "restarts": self._services[name].num_restarts,
                "memory_mib": self._services[name].memory_bytes >> 20,
                "max_memory_mib": (self._services[name].model.max_memory_bytes or 0) >> 20 or None,
            }
            for name, is_ready in (await self._states()).items()
        ]

    def _page(self, models: list[dict[str, str | int | bool | None]]) -> Response:
        rows = ""
        for model in models:
            name, is_ready = escape(str(model["name"])), bool(model["ready"])
            rows += (
                f'<tr{" class=ready" * is_ready}><td><a href="models/{name}/">{name}</a></td>'
                f"<td>{'ready' if is_ready else 'not ready'}</td><td>{model['memory_mib']}"
                f"{' of ' * bool(limit := model['max_memory_mib'])}{limit or ''} MiB</td>"
                f"<td>{model['restarts']}</td></tr>"
            )
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Slipway</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
            "<h1>Models</h1><p>Each model has a page of its own.</p><table><tr><th>Model</th>"
            f"<th>State</th><th>Memory</th><th>Restarts</th></tr>{rows}</table>"
            f"<p>All models use {self._used_mib()} of {memory_limit_bytes() >> 20} MiB.</p></html>"
        )
        return Response(200, page.encode(), "text/html; charset=utf-8", (_POLICY,))

    async def _metrics(self, headers: Headers) -> Response:
        """Return the metrics of all services that admit the caller's key, and the gateway's own."""
        sent = {
            name.decode(): value.decode("latin-1")
            for name, value in headers.items()
            if name in (b"authorization", b"x-api-key")
        }
        services = self._services.values()
        found = await asyncio.gather(*(_scrape(service, sent) for service in services))
        answers = dict(zip(self._services, found, strict=True))
        texts = {name: text for name, (status, text) in answers.items() if status == HTTPStatus.OK}
        refused = [text for status, text in found if status == HTTPStatus.UNAUTHORIZED]
        if refused and not texts:
            return Response(HTTPStatus.UNAUTHORIZED, refused[0].encode())
        body = merged(texts, self._gauges(set(texts))) + generate_latest(self._registry)
        return Response(200, body, CONTENT_TYPE_PLAIN_0_0_4)

    def _gauges(self, answering: set[str]) -> list[Metric]:
        up = GaugeMetricFamily(
            "slipway_model_up", "1 if the service of the model gave its metrics.", labels=["model"]
        )
        memory = GaugeMetricFamily(
            "slipway_model_memory_bytes", "Memory of its processes.", labels=["model"]
        )
        starts = GaugeMetricFamily(
            "slipway_model_restarts", "Starts of its service after the first.", labels=["model"]
        )
        for name, service in self._services.items():
            up.add_metric([name], float(name in answering))
            memory.add_metric([name], service.memory_bytes)
            starts.add_metric([name], service.num_restarts)
        return [up, memory, starts]

    async def _pass_on(
        self, service: ModelProcess, target: str, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Send the request to the service, and its response to the caller. Returns the status."""
        limit = service.model.settings.max_connections
        if service.num_requests >= limit:
            message = (
                f"{limit} requests to this model are running, the limit (SLIPWAY_MAX_CONNECTIONS)"
            )
            raise Refusal("too_many_connections", message, headers=(RETRY_AFTER,))
        query = scope["query_string"].decode("latin-1")
        url = URL(f"{service.address}{target}{'?' * bool(query)}{query}", encoded=True)
        headers = [
            (name.decode(), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_CONNECTION
        ]
        content = _body_of(receive) if _has_body(scope) else None
        service.num_requests += 1
        has_begun = False
        try:
            async with service.session.request(
                scope["method"],
                url,
                headers=headers,
                data=content,
                allow_redirects=False,
                timeout=service.patience(scope["method"], target),
            ) as answer:
                kept = [
                    pair for pair in answer.raw_headers if pair[0].lower() not in _OF_CONNECTION
                ]
                has_begun = True
                start = {"type": "http.response.start", "status": answer.status, "headers": kept}
                await send(start)
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return answer.status
        except TimeoutError:
            if has_begun:
                raise
            raise Refusal("deadline_exceeded", "the model did not answer in time") from None
        except aiohttp.ClientError:
            if has_begun:
                raise
            message = f"the service of {service.model.name} is not running; it is started again"
            raise Refusal("not_ready", message, headers=(RETRY_AFTER,)) from None
        finally:
            service.num_requests -= 1


def merged(texts: dict[str, str], more: list[Metric]) -> bytes:
    """Join metrics in text format; each sample gets the label `model`, the key of its text."""
    families: dict[str, Metric] = {}
    for model, text in texts.items():
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                joined.add_sample(sample.name, {"model": model, **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(CollectedMetrics([*families.values(), *more]))
    return generate_latest(registry)


async def _scrape(service: ModelProcess, headers: dict[str, str]) -> tuple[int, str]:
    """Return the status and the text of a service's metrics; status 0 without a response."""
    url, quickly = f"{service.operators_address}/metrics", aiohttp.ClientTimeout(total=2.0)
    try:
        async with service.session.get(url, headers=headers, timeout=quickly) as answer:
            return answer.status, await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return 0, ""


def _has_body(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return bool(names & {b"content-length", b"transfer-encoding"})


async def _body_of(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the pieces of a request's body. Raises ClientDisconnectedError."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
