"""The outermost ASGI application, which receives every request first.

It routes, authenticates, limits and answers requests itself; only listed routes are reachable.
BentoML's application behind it costs about a millisecond per request, and only receives
`/schema.json`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipway.serving.endpoints import info, predict
from slipway.serving.http.callers import is_loopback
from slipway.serving.http.connections import ConnectionLimits
from slipway.serving.http.framing import checked_headers
from slipway.serving.http.refusal_log import Peer
from slipway.serving.http.request_body import DRAIN_S, DrainQueue, RequestBody
from slipway.serving.http.responses import (
    ClientDisconnectedError,
    Refusal,
    Response,
    security_headers,
    send_response,
)
from slipway.serving.http.routes import (
    Headers,
    Request,
    Route,
    Routes,
    error_shape_of,
    find_route,
    request_id_of,
)
from slipway.serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")

_TEMPORARY = ("queue_full", "not_ready")  # errors after which callers should retry
_CLOSE = ("connection", "close")
Port = Literal["only", "main", "operators"]


class Application:
    """An ASGI application in front of BentoML's. Each port has its own instance."""

    def __init__(self, behind: ASGIApp, worker: ModelWorker, port: Port | None = None) -> None:
        self._behind = behind
        self._worker = worker
        self._check = worker.caller_check
        port = port or ("main" if worker.settings.admin_port else "only")
        # A body that is slightly too large is read after the response; a far larger one is not.
        self._max_drained_bytes = 4 * worker.settings.max_body_bytes
        self._max_drain_s = min(DRAIN_S, worker.settings.request_timeout_s / 4)
        self._drain_queue = DrainQueue(worker.settings.max_connections, 2 * self._max_drain_s)
        self._all_routes = all_routes(worker)  # routes of every port
        self._routes = {
            path: route
            for path, route in self._all_routes.items()
            if _is_answered_at(port, path, route)
        }

    def for_operators(self) -> "Application":
        """Return the application for the operators' port."""
        return Application(self._behind, self._worker, "operators")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._behind(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def respond(
        self, request: Request, pass_on: Callable[[str], Awaitable[None]]
    ) -> Response | None:
        """Route a request to its handler, and return the response.

        Errors become error responses. Returns None if there is nothing left to send: the client
        disconnected, or `pass_on` (called with the route's key) let BentoML's application answer.
        """
        found = find_route(self._routes, request.path)
        label = found or "other"
        request.trace = self._worker.new_trace(request.id, request.headers)
        error: str | None = None
        try:
            handler = self._require_route(found, request).handler
            if handler is None:
                await pass_on(label)
                return None
            response = await handler(request)
        except Refusal as refusal:
            _drop_tracebacks(refusal)
            response, error = self._refuse(refusal, request, found), refusal.code
            is_temporary = refusal.code in _TEMPORARY and _has_body(request.headers)
            if is_temporary and not await self._drain_in_turn(request):
                response = _closing(response)
        except ClientDisconnectedError:
            self._worker.metrics.client_disconnected()
            self._worker.ended(request, label, None)
            return None
        except asyncio.CancelledError:  # the caller of a gRPC call gave it up
            self._worker.metrics.client_disconnected()
            self._worker.ended(request, label, None)
            raise
        except Exception as failure:
            logger.exception("request %s failed in the service; answering 500", request.id)
            _drop_tracebacks(failure)
            message, error = "the service failed; its log has the details", "internal"
            response = self._refuse(Refusal(error, message), request, found)
        # After `Expect: 100-continue` without a 100, the caller may send its body or not. The next
        # bytes could be the body or another request, so the connection ends.
        is_body_optional = b"expect" in request.headers and not request.body.is_requested
        if is_body_optional or self._worker.is_draining:
            response = _closing(response)
        seconds = perf_counter() - request.started
        self._worker.metrics.answered(label, response.status, seconds)
        if headers := self._worker.ended(request, label, response.status, error):
            # Without dataclasses.replace, which takes longer than the tracing of most requests.
            every = (*response.headers, *headers)
            response = Response(response.status, response.body, response.content_type, every)
        return response

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers: Headers = {}
        try:
            self._require_known_address(scope)
            headers = checked_headers(scope)
        except Refusal as refusal:
            await self._refuse_head(refusal, scope, send)
            return
        body = RequestBody(receive)
        request_id = request_id_of(headers)
        query, started = scope["query_string"], perf_counter()
        peer = scope.get("client")
        request = Request(request_id, method, path, query, headers, body, started, peer=peer)

        async def pass_on(label: str) -> None:
            await self._behind(scope, body, self._counting_send(label, request, send))

        response = await self.respond(request, pass_on)
        if response is None:
            return
        is_read = body.is_complete or body.is_drained
        is_owed = not is_read and _has_body(headers) and b"expect" not in headers
        if is_owed and not 0 < _declared_bytes(headers) <= self._max_drained_bytes:
            response = _closing(response)
        await send_response(
            response, request_id, send, with_body=method != "HEAD", is_last=not is_owed
        )
        if is_owed:
            # Closing before the caller has sent its body would discard the response.
            await body.drain(self._max_drained_bytes, self._max_drain_s)
            await send({"type": "http.response.body", "body": b""})

    def _require_known_address(self, scope: Scope) -> None:
        """Raise Refusal for a request on a public address while remote callers are not allowed."""
        server = scope.get("server")
        if not self._check.allows_remote and server and not is_loopback(server[0]):
            message = (
                "this address is reachable from other machines, and no API keys are configured "
                "(SLIPWAY_KEYS, SLIPWAY_DISABLE_AUTH)"
            )
            raise Refusal("not_allowed", message)

    async def _refuse_head(self, refusal: Refusal, scope: Scope, send: Send) -> None:
        request_id = request_id_of(dict(scope["headers"]))
        detail = refusal.field or refusal.message  # a message about a field may quote its content
        self._worker.refusals.add(refusal, request_id, scope.get("client"), detail)
        respond = error_shape_of(self._all_routes, scope["path"])
        response = _closing(respond(refusal, request_id))
        self._worker.refused_unread(refusal, request_id)
        await send_response(response, request_id, send)

    async def _drain_in_turn(self, request: Request) -> bool:
        """Wait for a slot in the drain queue, then read and discard the body of a refused request.

        Returns False if the rest of the body stays unread, so that the connection must be closed.
        """
        max_bytes, body = self._worker.settings.max_body_bytes, request.body
        is_expected = b"expect" in request.headers
        num_bytes = min(_declared_bytes(request.headers), max_bytes)
        slot = self._drain_queue.take(asyncio.get_running_loop().time(), num_bytes)
        if slot is not None:
            try:
                await asyncio.sleep(slot.wait_s)
                if slot.is_read and not body.is_complete and not is_expected:
                    await body.drain(max_bytes, self._max_drain_s)
            finally:
                self._drain_queue.end(slot, body.num_bytes)
        body.is_drained = True
        return slot is not None and slot.is_read and (body.is_complete or is_expected)

    def _require_route(self, found: str | None, request: Request) -> Route:
        if found is None:
            known = ", ".join(self._routes)
            raise Refusal("not_found", f"there is nothing at this path; known: {known}")
        route = self._routes[found]
        request.caller = self._check.admit(request.headers, route.access)
        if request.method not in route.methods and not route.is_unknown:
            allowed = ", ".join(route.methods)
            message = f"{found} takes {allowed}, found {request.method[:20]}"
            raise Refusal("method_not_allowed", message, headers=(("allow", allowed),))
        return route

    def _refuse(self, refusal: Refusal, request: Request, found: str | None) -> Response:
        self._worker.metrics.refused(refusal.code)
        if refusal.code != "not_ready" or not (found and self._routes[found].is_probe):
            # Without the message, which may quote what the caller sent.
            place = f"{request.method} {found or 'unknown path'}"
            self._worker.refusals.add(refusal, request.id, request.peer, place)
        return error_shape_of(self._all_routes, request.path)(refusal, request.id)

    def _counting_send(self, label: str, request: Request, send: Send) -> Send:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._worker.metrics.answered(label, message["status"])
                further = self._worker.ended(request, label, message["status"])
                own = [(name.encode(), value.encode()) for name, value in further]
                headers = security_headers([*message["headers"], *own], request.id)
                is_unread = _has_body(request.headers) and not request.body.is_complete
                if is_unread or self._worker.is_draining:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        return counting_send


def all_routes(worker: ModelWorker) -> Routes:
    """Return all routes of a worker by path, those of extensions included."""
    routes = predict.routes(worker) | info.routes(worker)
    for hooks in worker.hooks.values():
        routes |= hooks.routes
    traffic = {"other"}
    for path, route in routes.items():
        if "POST" in route.methods and route.access == "caller":
            traffic.add(path)
    return routes | info.status_routes(worker, traffic)


def connection_limits(worker: ModelWorker) -> ConnectionLimits:
    """Return the connection limits of one port of a worker."""
    settings, routes = worker.settings, all_routes(worker)

    def respond(refusal: Refusal, request_id: str, peer: Peer, path: str) -> Response:
        worker.refused_unread(refusal, request_id)
        worker.refusals.add(refusal, request_id, peer, refusal.message)
        return error_shape_of(routes, path)(refusal, request_id)

    return ConnectionLimits(
        settings.max_connections, settings.request_timeout_s, settings.idle_timeout_s, respond
    )


def _closing(response: Response) -> Response:
    if _CLOSE in response.headers:
        return response
    return replace(response, headers=(*response.headers, _CLOSE))


def _declared_bytes(headers: Headers) -> int:
    declared = headers.get(b"content-length", b"0")
    return int(declared[:20]) if declared.isdigit() else 0


def _has_body(headers: Headers) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _is_answered_at(port: Port, path: str, route: Route) -> bool:
    if port == "operators":
        return route.access == "operator" or path in info.PROBES
    return port == "only" or route.access != "operator"


def _drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of an error, so that the request's body is freed at once.

    The error came from a future, and its traceback refers to that future and to the request. Such
    a reference cycle would wait for the garbage collector, hundreds of requests later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
