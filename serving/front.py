"""The outermost application: every request meets it first, and nothing behind it can be reached but what is listed here.

It routes, guards and answers on its own, without the framework behind it, which costs about a
millisecond for each request. Only BentoML's descriptions of its API are passed on.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.inference import Inference
from serving.page import render_page
from serving.reading import Headers, read_payload
from serving.responses import ClientGoneError, Refusal, Response, error_response, json_response, send_response

logger = logging.getLogger("bentoml.slipway")

PASSED_ON = ("/docs.json", "/schema.json")  # BentoML answers: OpenAPI, and what bentoml.SyncHTTPClient asks for
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SANE_HOST = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")
_READING = ("GET", "HEAD")


@dataclass
class Request:
    """One request on its way."""

    id: str
    headers: Headers
    receive: Receive
    started: float  # perf_counter seconds


Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """An ASGI application in front of BentoML's."""

    def __init__(self, behind: ASGIApp, inference: Inference) -> None:
        self._behind = behind
        self._inference = inference
        self._routes: dict[str, tuple[tuple[str, ...], Handler | None]] = {
            "/": (_READING, self._index),
            "/predict": (("POST",), self._predict),
            "/livez": (_READING, self._alive),
            "/healthz": (_READING, self._alive),
            "/readyz": (_READING, self._ready),
            "/metrics": (_READING, self._metrics),
            "/model": (_READING, self._model),
            **dict.fromkeys(PASSED_ON, (_READING, None)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the lifespan goes on to BentoML, which starts and stops the service."""
        if scope["type"] == "lifespan":
            await self._behind(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif (await receive())["type"] == "websocket.connect":
            await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        request = Request(_request_id(headers), headers, receive, perf_counter())
        path, method = scope["path"], scope["method"]
        route = path if path in self._routes else "other"
        try:
            handler = self._route(path, method)
            if handler is None:
                await self._behind(scope, receive, self._counting(route, send))
                return
            response = await handler(request)
        except Refusal as refusal:
            response = self._refuse(refusal, request)
        except ClientGoneError:
            self._inference.monitoring.client_gone()
            return
        except Exception:
            logger.exception("request %s failed", request.id)
            response = self._refuse(Refusal("internal", "the service failed; its log has the details"), request)
        self._inference.monitoring.answered(route, response.status)
        await send_response(response, request.id, send, with_body=method != "HEAD")

    def _route(self, path: str, method: str) -> Handler | None:
        if path not in self._routes:
            raise Refusal("not_found", f"there is nothing at this path; known: {', '.join(self._routes)}")
        methods, handler = self._routes[path]
        if method not in methods:
            allowed = ", ".join(methods)
            raise Refusal("method_not_allowed", f"{path} takes {allowed}, found {method[:20]}", headers=(("allow", allowed),))
        return handler

    def _refuse(self, refusal: Refusal, request: Request) -> Response:
        self._inference.monitoring.refused(refusal.code)
        return error_response(refusal, request.id)

    def _counting(self, route: str, send: Send) -> Send:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._inference.monitoring.answered(route, message["status"])
            await send(message)

        return counting_send

    async def _predict(self, request: Request) -> Response:
        inference = self._inference
        kind = inference.require_model().bundle.manifest.input.kind
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(inference.settings.request_timeout_s):
                payload = await read_payload(request.headers, request.receive, inference.settings.max_body_bytes, kind)
                read = perf_counter()
                code, message = "deadline_exceeded", "there was no answer within"
                answer = await inference.predict(payload, request.id)
        except TimeoutError:
            raise Refusal(code, f"{message} {inference.settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)") from None
        encoding = perf_counter()
        response = json_response(answer | {"request_id": request.id})
        ended = perf_counter()
        inference.monitoring.stage("read", read - request.started)
        inference.monitoring.stage("encode", ended - encoding)
        inference.monitoring.predicted(ended - request.started)
        return response

    async def _alive(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        return json_response({"status": "ready", "model_version": self._inference.require_model().version})

    async def _metrics(self, request: Request) -> Response:
        body = await asyncio.to_thread(self._inference.exposition)
        return Response(200, body, self._inference.monitoring.content_type)

    async def _model(self, request: Request) -> Response:
        return json_response(self._inference.card())

    async def _index(self, request: Request) -> Response:
        host = request.headers.get(b"host", b"")
        model = self._inference.model
        address = host.decode() if _SANE_HOST.fullmatch(host) else "127.0.0.1:3000"
        page = render_page(model.bundle.manifest.input if model else None, address)
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return Response(200, page, "text/html; charset=utf-8", (("content-security-policy", policy),))


def _request_id(headers: Headers) -> str:
    """The caller's x-request-id if it is sane, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _SANE_ID.fullmatch(given) else secrets.token_hex(8)
