"""The Open Inference Protocol over gRPC: SLIPWAY_GRPC_PORT.

Inside the process, each call becomes a request of the protocol's HTTP form, so limits, keys,
deadlines, batches, metrics and the log of refusals are shared with HTTP. Every worker listens on
the port with SO_REUSEPORT.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from pydantic import Field
from starlette.types import Message, Receive, Scope, Send

from slipway.serving.app import Application
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.request_body import RequestBody
from slipway.serving.http.responses import Refusal, Response
from slipway.serving.http.routes import Request, new_request_id, request_id_of
from slipway.serving.settings import Settings, SettingsError, SettingsSection
from slipway.serving.worker import ModelWorker

if TYPE_CHECKING:
    import grpc

_SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"  # https://github.com/grpc/grpc/blob/master/doc/health-checking.md
_HEAD_LENGTH = "inference-header-content-length"
_OVERHEAD_BYTES = 64 << 10  # most bytes of a message besides its tensors
_MAX_METADATA_BYTES = 16 << 10
# Headers that are derived from the message. Those in the caller's metadata are ignored.
_OWN_HEADERS = {b"content-length", b"content-type", b"transfer-encoding", b"expect", b"te"}
_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "tritonclient")
_NOT_READY = 503
_WATCH_S = 0.5  # between two looks at the readiness for a caller of Watch
# gRPC codes by HTTP status. Other errors that the caller caused are INVALID_ARGUMENT.
# https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
_CODES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_ReadMessage = Callable[[Any], Awaitable[Any]]  # from a call's context to its next message


class GrpcSettings(SettingsSection):
    """Settings of the gRPC port: its number and its address."""

    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: no gRPC port
    grpc_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class _FailedError(Exception):
    """Raised if the application returned an error response to a call's HTTP request."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.body)
        self.status = response.status
        content = json.loads(response.body)["error"]
        self.message = content if isinstance(content, str) else content["message"]


class GrpcPort:
    """The gRPC server of one worker."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker, self._settings = worker, worker.settings
        self._application = Application(_answer_nothing, worker, "only")
        self._server: grpc.aio.Server | None = None
        self._closing, self._num_watches = asyncio.Event(), 0

    def open(self) -> None:
        """Start to listen and to serve calls. Raises SettingsError if the port is taken."""
        import grpc

        from slipway.serving.grpc_port.reflection import add_reflection

        own = self._settings.section(GrpcSettings)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=self._settings.max_connections,
            options=(
                ("grpc.so_reuseport", 1),
                (
                    "grpc.max_receive_message_length",
                    self._settings.max_body_bytes + _OVERHEAD_BYTES,
                ),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.max_connection_idle_ms", self._settings.idle_timeout_s * 1000),
            ),
        )
        methods = _Methods(self._request, self._read_message, self._read_next, self._readiness)
        self._server.add_generic_rpc_handlers((methods.handlers(), methods.health()))
        add_reflection(self._server, (_SERVICE, _HEALTH), self._read_next)
        host = f"[{own.grpc_host}]" if ":" in own.grpc_host else own.grpc_host
        try:
            self._server.add_insecure_port(f"{host}:{own.grpc_port}")
        except RuntimeError:
            raise SettingsError(f"cannot listen on {host}:{own.grpc_port}: {_ANOTHER}") from None
        self._started = asyncio.create_task(self._server.start())

    async def close(self) -> None:
        """Finish the calls in flight, and close the port."""
        self._closing.set()
        if self._server:
            await self._started
            await self._server.stop(self._settings.request_timeout_s)

    async def _readiness(self) -> AsyncGenerator[bool, None]:
        """Yield the readiness of the model, then each change, until the port closes.

        Callers that watch occupy at most a quarter of the places. Raises Refusal above that.
        """
        limit = max(1, self._settings.max_connections // 4)
        if self._num_watches >= limit:
            message = f"{limit} callers watch, a quarter of SLIPWAY_MAX_CONNECTIONS"
            raise Refusal("too_many_connections", message)
        self._num_watches += 1
        last: bool | None = None
        try:
            while not self._closing.is_set():
                is_ready = self._worker.model is not None and not self._worker.is_draining
                if is_ready != last:
                    last = is_ready
                    yield is_ready
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _WATCH_S)
            yield False
        finally:
            self._num_watches -= 1

    async def _read_message(self, context: Any) -> Any:
        """Return the message of a call. Abort the call if it does not arrive in time."""
        message = await self._read_within(
            context, self._settings.request_timeout_s, "SLIPWAY_REQUEST_TIMEOUT_S"
        )
        if message is None:
            await _abort(Refusal("malformed_body", "the call ended without a message"), context)
        return message

    async def _read_next(self, context: Any) -> Any:
        """Return the next message of a stream, None at its end. Abort an idle stream."""
        return await self._read_within(
            context, self._settings.idle_timeout_s, "SLIPWAY_IDLE_TIMEOUT_S"
        )

    async def _read_within(self, context: Any, seconds: float, variable: str) -> Any:
        """Return the next message, None without one.

        A call occupies one of the few places while it waits, so it may not wait for ever.
        """
        import grpc

        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            text = f"no whole message arrived within {seconds:g} s ({variable})"
            refusal, request_id = Refusal("body_timeout", text), new_request_id()
            self._worker.refused_unread(refusal, request_id)
            self._worker.refusals.add(refusal, request_id, None, text)
            await _abort(refusal, context)
        return None if message is grpc.aio.EOF else message

    async def _request(
        self, context: Any, method: str, path: str, body: bytes = b"", head_length: int = 0
    ) -> Response:
        """Pass a request to the application. Raises _FailedError if the response is an error."""
        given = (
            (name.encode(), value.encode() if isinstance(value, str) else bytes(value))
            for name, value in context.invocation_metadata()
        )
        headers = {name: value for name, value in given if name not in _OWN_HEADERS}
        if body:
            headers[b"content-length"] = str(len(body)).encode()
        if head_length:
            headers[_HEAD_LENGTH.encode()] = str(head_length).encode()

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        request = Request(
            request_id_of(headers), method, path, b"", headers, RequestBody(receive), perf_counter()
        )

        async def pass_on(label: str) -> None:
            raise Refusal("not_found", f"gRPC has no {label}")

        response = await self._application.respond(request, pass_on)
        assert response is not None  # the body is complete, so no client can disconnect from it
        if response.status >= 400:
            raise _FailedError(response)
        return response


class _Methods:
    """The methods of the protocol that this service implements; all others return UNIMPLEMENTED.

    Messages are parsed here, because gRPC answers INTERNAL to an invalid one.
    """

    def __init__(
        self,
        request: Callable[..., Awaitable[Response]],
        read_message: _ReadMessage,
        read_next: _ReadMessage,
        readiness: Callable[[], AsyncGenerator[bool, None]],
    ) -> None:
        from tritonclient.grpc import service_pb2

        from slipway.serving.grpc_port import messages

        self._request, self._pb, self._messages = request, service_pb2, messages
        self._read_message, self._read_next = read_message, read_next
        self._readiness = readiness

    def handlers(self) -> "grpc.GenericRpcHandler":
        import grpc

        state, read = self._state, self._read
        unary: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": state("live", lambda asked: "/v2/health/live"),
            "ServerReady": state("ready", lambda asked: "/v2/health/ready"),
            "ModelReady": state("ready", lambda asked: f"{_model(asked)}/ready"),
            "ServerMetadata": read("ServerMetadata", lambda asked: "/v2"),
            "ModelMetadata": read("ModelMetadata", _model),
            "ModelConfig": self._config,
            "ModelStatistics": read("ModelStatistics", _statistics),
            "RepositoryIndex": self._index,
            "ModelInfer": self._infer,
        }
        methods = {
            name: grpc.stream_unary_rpc_method_handler(
                self._unary(getattr(self._pb, f"{name}Request"), answer)
            )
            for name, answer in unary.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    def health(self) -> "grpc.GenericRpcHandler":
        """Return the handler of gRPC's standard health check, for Kubernetes and load balancers."""
        import grpc
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse

        async def check(asked: Any, context: Any) -> Any:
            if asked.service not in ("", _SERVICE):
                raise Refusal("unknown_model", f"there is no service {asked.service[:80]!r}")
            try:
                await self._request(context, "GET", "/v2/health/ready")
            except _FailedError as error:
                if error.status != _NOT_READY:
                    raise
                return status(status=status.NOT_SERVING)
            return status(status=status.SERVING)

        async def watch(messages: object, context: Any) -> AsyncIterator[bytes]:
            content = await self._read_message(context)
            try:
                asked = self._messages.parse(content, health_pb2.HealthCheckRequest)
                async with contextlib.aclosing(self._readiness()) as changes:
                    async for is_ready in changes:
                        found = status.SERVING if is_ready else status.NOT_SERVING
                        if asked.service not in ("", _SERVICE):
                            found = status.SERVICE_UNKNOWN
                        yield bytes(status(status=found).SerializeToString())
            except Refusal as refusal:
                await _abort(refusal, context)

        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(
                self._unary(health_pb2.HealthCheckRequest, check)
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(watch),
        }
        return grpc.method_handlers_generic_handler(_HEALTH, methods)

    def _unary(self, kind: Any, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Create a method with one message, read as a stream of one: gRPC limits no reading."""

        async def handle(messages: object, context: Any) -> bytes:
            content = await self._read_message(context)
            try:
                reply = await answer(self._messages.parse(content, kind), context)
            except (Refusal, _FailedError) as error:
                await _abort(error, context)
            return bytes(reply.SerializeToString())

        return handle

    def _state(self, name: str, path_of: Callable[[Any], str]) -> Any:
        """Create a method that reports whether the server or the model is live or ready.

        `name` is the boolean field of its reply, and `path_of` returns the HTTP path to query.
        """

        async def answer(asked: Any, context: Any) -> Any:
            reply = getattr(self._pb, type(asked).__name__.removesuffix("Request") + "Response")
            try:
                await self._request(context, "GET", path_of(asked))
            except _FailedError as error:
                if error.status != _NOT_READY:
                    raise
                return reply(**{name: False})
            return reply(**{name: True})

        return answer

    def _read(self, name: str, path_of: Callable[[Any], str]) -> Any:
        """Create the method `name`, whose reply has the fields of an HTTP response.

        `path_of` returns the HTTP path for a message.
        """
        reply = getattr(self._pb, f"{name}Response")

        async def answer(asked: Any, context: Any) -> Any:
            response = await self._request(context, "GET", path_of(asked))
            return self._messages.described(json.loads(response.body), reply)

        return answer

    async def _config(self, asked: Any, context: Any) -> Any:
        response = await self._request(context, "GET", f"{_model(asked)}/config")
        content = {"config": json.loads(response.body)}
        return self._messages.described(content, self._pb.ModelConfigResponse)

    async def _index(self, asked: Any, context: Any) -> Any:
        body = json.dumps({"ready": asked.ready}).encode()
        response = await self._request(context, "POST", "/v2/repository/index", body)
        content = {"models": json.loads(response.body)}
        return self._messages.described(content, self._pb.RepositoryIndexResponse)

    async def _infer(self, asked: Any, context: Any) -> Any:
        body, head_length = self._messages.http_body(asked)
        path = f"{_path(asked.model_name, asked.model_version)}/infer"
        response = await self._request(context, "POST", path, body, head_length)
        found = int(dict(response.headers)[_HEAD_LENGTH])
        return self._messages.infer_response(response.body, found)

    async def _stream(self, messages: object, context: Any) -> AsyncIterator[bytes]:
        """Yield the reply to each message of a stream, in order.

        An error is a field of its reply.
        """
        while (content := await self._read_next(context)) is not None:
            answer = self._pb.ModelStreamInferResponse()
            try:
                asked = self._messages.parse(content, self._pb.ModelInferRequest)
                answer.infer_response.CopyFrom(await self._infer(asked, context))
            except (Refusal, _FailedError) as error:
                answer.error_message = error.message
            yield bytes(answer.SerializeToString())


def _model(asked: Any) -> str:
    return _path(asked.name, asked.version)


def _path(name: str, version: str) -> str:
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _statistics(asked: Any) -> str:
    """Return the HTTP path for a statistics request. Without a model name, it covers all models."""
    return f"{_model(asked)}/stats" if asked.name else "/v2/models/stats"


async def _abort(error: Refusal | _FailedError, context: Any) -> None:
    import grpc

    code = _CODES.get(error.status, "INVALID_ARGUMENT")
    field = getattr(error, "field", None)
    message = f"{field}: {error.message}" if field else error.message
    await context.abort(grpc.StatusCode[code], message)


async def _answer_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing. Stands in for BentoML's application, which gRPC calls never reach."""


_ANOTHER = "Choose another with SLIPWAY_GRPC_PORT"


def _address(settings: Settings) -> tuple[str, int, str] | None:
    """Return host, port, and a hint for choosing another port; None without gRPC."""
    own = settings.section(GrpcSettings)
    if not own.grpc_port:
        return None
    if not (all(map(find_spec, _PACKAGES))):
        raise SettingsError(
            f"SLIPWAY_GRPC_PORT is {own.grpc_port}, but the packages of gRPC are missing. "
            "Install them: pip install 'slipway-ml[grpc]'"
        )
    return own.grpc_host, own.grpc_port, _ANOTHER


def _attach(worker: ModelWorker) -> Hooks:
    if _address(worker.settings) is None:
        return Hooks()
    port: list[GrpcPort] = []  # created when the routes of all extensions are known

    def start() -> None:
        port.append(GrpcPort(worker))
        port[0].open()

    async def stop() -> None:
        if port:
            await port[0].close()

    return Hooks(start=start, stop=stop)


EXTENSION = Extension("grpc_port", _attach, settings=GrpcSettings, address=_address)
