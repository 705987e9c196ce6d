"""The outermost application: every request meets it first, and nothing behind it can be reached but what is listed in its routes.

It routes, guards and answers on its own, without the framework behind it, which costs about a
millisecond for each request. Only BentoML's descriptions of its API are passed on.
"""

import logging
import re
import secrets
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.endpoints.listing import all_routes
from serving.inference import Inference
from serving.reading import Headers
from serving.responses import ClientGoneError, Refusal, Response, error_response, open_inference_error, send_response
from serving.routes import Request, Route, find_route

logger = logging.getLogger("bentoml.slipway")

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Front:
    """An ASGI application in front of BentoML's."""

    def __init__(self, behind: ASGIApp, inference: Inference) -> None:
        self._behind = behind
        self._inference = inference
        self._routes = all_routes(inference)

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
        method, path = scope["method"], scope["path"]
        request = Request(_request_id(headers), method, path, scope["query_string"], headers, receive, perf_counter())
        found = find_route(self._routes, path)
        label = found or "other"
        try:
            handler = self._require_route(found, request).handler
            if handler is None:
                await self._behind(scope, receive, self._counting(label, send))
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
        self._inference.monitoring.answered(label, response.status)
        await send_response(response, request.id, send, with_body=method != "HEAD")

    def _require_route(self, found: str | None, request: Request) -> Route:
        if found is None:
            raise Refusal("not_found", f"there is nothing at this path; known: {', '.join(self._routes)}")
        route = self._routes[found]
        if request.method not in route.methods:
            allowed = ", ".join(route.methods)
            message = f"{found} takes {allowed}, found {request.method[:20]}"
            raise Refusal("method_not_allowed", message, headers=(("allow", allowed),))
        return route

    def _refuse(self, refusal: Refusal, request: Request) -> Response:
        self._inference.monitoring.refused(refusal.code)
        return (open_inference_error if request.path.startswith("/v2/") else error_response)(refusal, request.id)

    def _counting(self, label: str, send: Send) -> Send:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._inference.monitoring.answered(label, message["status"])
            await send(message)

        return counting_send


def _request_id(headers: Headers) -> str:
    """The caller's x-request-id if it is sane, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _SANE_ID.fullmatch(given) else secrets.token_hex(8)
