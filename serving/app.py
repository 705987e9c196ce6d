"""The outermost application: every request meets it first, and nothing behind it can be reached but what is listed in its routes.

It routes, guards and answers on its own, without the framework behind it, which costs about a
millisecond for each request. Only BentoML's description of its API is passed on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.endpoints.health import PROBES
from serving.endpoints.listing import all_routes
from serving.http.callers import is_loopback
from serving.http.framing import checked_headers
from serving.http.incoming import DRAIN_S, Incoming, Turns
from serving.http.request_ids import request_id_of
from serving.http.responses import (
    ClientGoneError,
    Refusal,
    Response,
    error_response,
    guarded_headers,
    send_response,
)
from serving.http.routes import Headers, Request, Route, find_route
from serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")

_PASSING = ("queue_full", "not_ready")  # their callers are to come again
_CLOSE = ("connection", "close")
Port = Literal["only", "main", "operators"]


class Application:
    """An ASGI application in front of BentoML's; where operators have a port of their own, one for each port."""

    def __init__(
        self,
        behind: ASGIApp,
        worker: ModelWorker,
        port: Port | None = None,
    ) -> None:
        self._behind = behind
        self._worker = worker
        self._check = worker.caller_check
        port = port or ("main" if worker.settings.admin_port else "only")
        self._most_drain_s = min(DRAIN_S, worker.settings.request_timeout_s / 4)
        self._turns = Turns(worker.settings.max_connections, 2 * self._most_drain_s)
        self._routes = {
            path: route
            for path, route in all_routes(worker).items()
            if _is_answered_at(port, path, route)
        }

    def for_operators(self) -> "Application":
        """The same for the port of operators."""
        return Application(self._behind, self._worker, "operators")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application: the lifespan goes on to BentoML, which starts and stops the service."""
        if scope["type"] == "lifespan":
            await self._behind(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def respond(
        self, request: Request, pass_on: Callable[[str], Awaitable[None]]
    ) -> Response | None:
        """The answer to a request; None where its caller is gone, or `pass_on`, which is given the route, has seen to it."""
        found = find_route(self._routes, request.path)
        label = found or "other"
        try:
            handler = self._require_route(found, request).handler
            if handler is None:
                await pass_on(label)
                return None
            response = await handler(request)
        except Refusal as refusal:
            _let_go_of_frames(refusal)
            response = self._refuse(refusal, request, found)
            if (
                refusal.code in _PASSING
                and _has_body(request.headers)
                and not await self._let_in(request)
            ):
                response = _closing(response)
        except ClientGoneError:
            self._worker.metrics.client_gone()
            return None
        except Exception as error:
            logger.exception("request %s failed", request.id)
            _let_go_of_frames(error)
            response = self._refuse(
                Refusal("internal", "the service failed; its log has the details"), request, found
            )
        # A caller that waits to be asked for its body may send it all the same, or not: nobody could tell it from the next request.
        is_unasked = b"expect" in request.headers and not request.receive.is_asked_for
        if is_unasked or self._worker.is_draining:
            response = _closing(response)
        self._worker.metrics.answered(label, response.status)
        return response

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers: Headers = {}
        try:
            self._require_known_address(scope)
            headers = checked_headers(scope)
        except Refusal as refusal:
            await self._refuse_head(refusal, dict(scope["headers"]), send)
            return
        request = Request(
            request_id_of(headers),
            method,
            path,
            scope["query_string"],
            headers,
            Incoming(receive),
            perf_counter(),
        )

        async def pass_on(label: str) -> None:
            await self._behind(scope, request.receive, self._passing_on(label, request.id, send))

        response = await self.respond(request, pass_on)
        if response is None:
            return
        incoming = request.receive
        is_owed = (
            not (incoming.is_whole or incoming.is_drained)
            and _has_body(headers)
            and b"expect" not in headers
        )
        # A body that is too large is read after the answer, one that is far too large is not.
        most_drained = 4 * self._worker.settings.max_body_bytes
        if is_owed and not 0 < _declared_bytes(headers) <= most_drained:
            response = _closing(response)  # the caller may not send its next request here
        await send_response(
            response, request.id, send, with_body=method != "HEAD", is_last=not is_owed
        )
        if is_owed:
            # To end the connection before the caller has sent its body would take the answer away.
            await incoming.drain(most_drained, self._most_drain_s)
            await send({"type": "http.response.body", "body": b""})

    def _require_known_address(self, scope: Scope) -> None:
        """Raises Refusal if the connection is to an address that other machines reach, and nobody allowed them."""
        server = scope.get("server")
        if not self._check.allows_remote and server and not is_loopback(server[0]):
            message = "this address can be reached from other machines, and there are no keys (SLIPWAY_KEYS, SLIPWAY_ALLOW_ANYONE)"
            raise Refusal("not_allowed", message)

    async def _refuse_head(self, refusal: Refusal, headers: Headers, send: Send) -> None:
        """Refuse a request whose head cannot be relied on, and close its connection."""
        request_id = request_id_of(headers)
        response = _closing(error_response(refusal, request_id))
        self._worker.metrics.refused(refusal.code)
        self._worker.metrics.answered("other", response.status)
        await send_response(response, request_id, send)

    async def _let_in(self, request: Request) -> bool:
        """Let a caller that is to come again send its whole body before it is answered, when it is its turn.

        False: so much is waited for that its connection is to be ended with what has not been read.
        """
        max_bytes = self._worker.settings.max_body_bytes
        num_bytes = min(_declared_bytes(request.headers), max_bytes)
        incoming = request.receive
        turn = self._turns.take(asyncio.get_running_loop().time(), num_bytes)
        if turn is not None:
            try:
                await asyncio.sleep(turn.wait_s)
                if turn.is_read and not incoming.is_whole and b"expect" not in request.headers:
                    await incoming.drain(max_bytes, self._most_drain_s)
            finally:
                self._turns.end(turn, incoming.num_bytes)
        incoming.is_drained = True
        is_read = incoming.is_whole or b"expect" in request.headers
        return turn is not None and turn.is_read and is_read

    def _require_route(self, found: str | None, request: Request) -> Route:
        if found is None:
            raise Refusal(
                "not_found", f"there is nothing at this path; known: {', '.join(self._routes)}"
            )
        route = self._routes[found]
        request.caller = self._check.admit(request.headers, route.access)
        if request.method not in route.methods:
            allowed = ", ".join(route.methods)
            message = f"{found} takes {allowed}, found {request.method[:20]}"
            raise Refusal("method_not_allowed", message, headers=(("allow", allowed),))
        return route

    def _refuse(self, refusal: Refusal, request: Request, found: str | None) -> Response:
        self._worker.metrics.refused(refusal.code)
        shape = self._routes[found].error_shape if found else None
        return (shape.respond if shape else error_response)(refusal, request.id)

    def _passing_on(self, label: str, request_id: str, send: Send) -> Send:
        """Sends on what BentoML answers, counted and with our headers."""

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._worker.metrics.answered(label, message["status"])
                headers = guarded_headers(list(message["headers"]), request_id)
                if self._worker.is_draining:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        return guarded_send


def _closing(response: Response) -> Response:
    """The response as the last one of its connection."""
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
        return route.access == "operator" or path in PROBES
    return port == "only" or route.access != "operator"


def _let_go_of_frames(error: BaseException | None) -> None:
    """Of what was raised into a future and out of it: they hold that future, and the request with its body, in a ring with the error.

    Only Python's search for such rings would free it, hundreds of requests later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
