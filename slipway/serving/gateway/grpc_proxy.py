"""The gRPC port in front of several models: `slipway serve --models FILE --grpc-port PORT`.

It reads the name of the model in the first message of a call, and passes the call on to the gRPC
port of that model's service: messages as bytes, metadata, deadline, cancellation and status. Keys
and limits are decided there. Its own replies are the health, the list of the models, and server
reflection.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from slipway.serving.gateway.model_process import PATIENCE_S, ModelProcess
from slipway.serving.grpc_port.reflection import add_reflection

_SERVICE, _HEALTH = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/"
# Methods of one model. Field 1 of their messages is the model's name, as in ModelReadyRequest.
_OF_A_MODEL = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer")
_STREAM = "ModelStreamInfer"
_OVERHEAD_BYTES = 64 << 10  # most bytes of a message besides its tensors
_MAX_METADATA_BYTES = 16 << 10
_MAX_CALLS = 4096
_WATCH_S = 0.5  # between two looks at the readiness for the callers of Watch
_MESSAGE_S, _STOP_S = 60.0, 5.0  # time for the first message of a call; for the last calls
_NO_LIMIT = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_OF_CONNECTION = ("user-agent", "te", "content-type")  # metadata that gRPC writes itself
_Code, _Status = grpc.StatusCode, health_pb2.HealthCheckResponse


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]  # untyped
    """Passes calls on to the services of the models, by the name in the first message."""

    def __init__(
        self,
        services: Mapping[str, ModelProcess],
        states: Callable[[], Awaitable[dict[str, bool]]],
        count: Callable[[str, str], None],
    ) -> None:
        """Create the proxy.

        `states` returns the readiness of each model. `count` records the model and the code of each
        call.
        """
        self._services, self._states, self._count = services, states, count
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}
        self._server: grpc.aio.Server | None = None
        self._closing, self._num_watches = asyncio.Event(), 0
        self._look: tuple[float, asyncio.Future[dict[str, bool]] | None] = (0.0, None)

    async def open(self, host: str, port: int) -> None:
        """Start to serve calls at `host` and `port`."""
        limits = [service.model.settings.max_body_bytes for service in self._services.values()]
        self._server = grpc.aio.server(
            handlers=(self,),
            maximum_concurrent_rpcs=_MAX_CALLS,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max(limits) + _OVERHEAD_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ),
        )
        names = (_SERVICE.strip("/"), _HEALTH.strip("/"))
        add_reflection(self._server, names, _next)
        self._server.add_insecure_port(f"{f'[{host}]' if ':' in host else host}:{port}")
        await self._server.start()

    async def close(self) -> None:
        """Finish the calls in flight, and close the port and the connections to the services."""
        self._closing.set()
        if self._server:
            await self._server.stop(_STOP_S)
        await asyncio.gather(*(channel.close() for _, channel in self._channels.values()))

    def service(self, details: Any) -> Any:
        """Return the handler of a method, None if there is no such method."""
        own: dict[str, tuple[Any, Callable[[Any], Awaitable[Message]]]] = {
            f"{_HEALTH}Check": (health_pb2.HealthCheckRequest, self._check),
            f"{_SERVICE}ServerLive": (service_pb2.ServerLiveRequest, self._live),
            f"{_SERVICE}ServerReady": (service_pb2.ServerReadyRequest, self._ready),
            f"{_SERVICE}ServerMetadata": (service_pb2.ServerMetadataRequest, self._metadata),
            f"{_SERVICE}RepositoryIndex": (service_pb2.RepositoryIndexRequest, self._index),
        }
        path: str = details.method
        is_watch = path == f"{_HEALTH}Watch"
        is_known = is_watch or path in own
        if not is_known and path.removeprefix(_SERVICE) not in (*_OF_A_MODEL, _STREAM):
            return None

        async def handle(messages: object, context: Any) -> AsyncIterator[bytes]:
            name, code = "", _Code.CANCELLED
            try:
                first = await _first(context)
                if path in own:
                    kind, answer = own[path]
                    yield (await answer(_parsed(kind, first))).SerializeToString()
                else:
                    name = "" if is_watch else self._model(first)
                    found = (
                        self._watch(first)
                        if is_watch
                        else self._pass_on(path, name, first, context)
                    )
                    async with contextlib.aclosing(found) as replies:
                        async for reply in replies:
                            yield reply
                code = _Code.OK
            except _EndedCallError as refused:
                code = refused.code
                await context.abort(code, refused.message, refused.metadata)
            finally:
                self._count(name, code.name)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _model(self, message: bytes) -> str:
        name = str(_parsed(service_pb2.ModelReadyRequest, message).name)
        if name not in self._services:
            raise _unknown(name, self._services)
        return name

    async def _check(self, asked: Any) -> Message:
        status = _status(asked.service, await self._states())
        if status == _Status.SERVICE_UNKNOWN:
            raise _unknown(asked.service, self._services)
        return _Status(status=status)

    async def _watch(self, message: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the health of the whole or of a model, then each change, until the port closes."""
        if self._num_watches >= _MAX_CALLS // 4:
            text = f"{_MAX_CALLS // 4} callers watch, the limit"
            raise _EndedCallError(_Code.UNAVAILABLE, text)
        name = _parsed(health_pb2.HealthCheckRequest, message).service
        self._num_watches += 1
        last: int | None = None
        try:
            while not self._closing.is_set():
                status = _status(name, await self._recent_states())
                if status != last:
                    yield _Status(status=status).SerializeToString()
                last = status
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _WATCH_S)
            yield _Status(status=_Status.NOT_SERVING).SerializeToString()
        finally:
            self._num_watches -= 1

    async def _recent_states(self) -> dict[str, bool]:
        """Return states that all callers of Watch share, because each look asks every service."""
        now = asyncio.get_running_loop().time()
        if (found := self._look[1]) is None or now - self._look[0] >= _WATCH_S:
            found = asyncio.ensure_future(self._states())
            self._look = (now, found)
        return await asyncio.shield(found)

    async def _live(self, asked: Any) -> Message:
        return service_pb2.ServerLiveResponse(live=True)

    async def _ready(self, asked: Any) -> Message:
        return service_pb2.ServerReadyResponse(ready=any((await self._states()).values()))

    async def _metadata(self, asked: Any) -> Message:
        return service_pb2.ServerMetadataResponse(name="slipway")

    async def _index(self, asked: Any) -> Message:
        response = service_pb2.RepositoryIndexResponse()
        for name, is_ready in (await self._states()).items():
            if is_ready or not asked.ready:
                response.models.add(name=name, state="READY" if is_ready else "UNAVAILABLE")
        return response

    def _channel(self, name: str, service: ModelProcess) -> grpc.aio.Channel:
        """Return the connection to a service, a new one if it was started at another port."""
        port, channel = self._channels.get(name, (0, None))
        if channel is None or port != service.grpc_port:
            options = (*_NO_LIMIT, ("grpc.max_reconnect_backoff_ms", 1000))
            channel = grpc.aio.insecure_channel(service.grpc_address, options)
            self._channels[name] = (service.grpc_port, channel)
        return channel

    async def _pass_on(
        self, path: str, name: str, first: bytes, context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the replies of the model's service. Raises _EndedCallError with its code."""
        service = self._services[name]
        settings = service.model.settings
        if service.num_requests >= (limit := settings.max_connections):
            message = f"{limit} calls to {name} are running, the limit (SLIPWAY_MAX_CONNECTIONS)"
            raise _EndedCallError(_Code.UNAVAILABLE, message)
        is_stream = path.endswith(_STREAM)
        # The service ends its own calls in this time; longer means that it hangs.
        patience = PATIENCE_S + (settings.idle_timeout_s * is_stream or settings.request_timeout_s)
        given = [
            (key, value)
            for key, value in context.invocation_metadata()
            if key not in _OF_CONNECTION and not key.startswith((":", "grpc-"))
        ]
        service.num_requests += 1
        call = self._channel(name, service).stream_stream(path)(
            metadata=given, timeout=context.time_remaining()
        )
        sending = asyncio.create_task(_send(call, first, context if is_stream else None))
        try:
            async with asyncio.timeout(patience) as deadline:
                while (reply := await call.read()) is not grpc.aio.EOF:
                    yield reply
                    deadline.reschedule(asyncio.get_running_loop().time() + patience)
            context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            if code is _Code.UNAVAILABLE and "connect" in details:
                details = f"the service of {name} is not running; it is started again"
            metadata = tuple(error.trailing_metadata() or ())
            raise _EndedCallError(code, details, metadata) from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # gRPC raises this as well if the other side ends a call without a status.
            message = f"the service of {name} ended during the call"
            raise _EndedCallError(_Code.UNAVAILABLE, message) from None
        except TimeoutError:
            message = f"{name} did not answer in time"
            raise _EndedCallError(_Code.DEADLINE_EXCEEDED, message) from None
        finally:
            service.num_requests -= 1
            sending.cancel()
            call.cancel()


class _EndedCallError(Exception):
    """Ends a call with another code than OK."""

    def __init__(self, code: grpc.StatusCode, message: str, metadata: Any = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.metadata = code, message, metadata


def _unknown(name: str, services: Mapping[str, ModelProcess]) -> _EndedCallError:
    message = f"there is no model {name[:80]!r}, this service has {', '.join(services)}"
    return _EndedCallError(_Code.NOT_FOUND, message)


def _parsed(kind: Any, content: bytes) -> Any:
    """Parse a message. Fields that `kind` lacks are not looked at."""
    try:
        return kind.FromString(content)
    except (DecodeError, UnicodeDecodeError):
        message = f"the message is not a {kind.DESCRIPTOR.name}, expected one"
        raise _EndedCallError(_Code.INVALID_ARGUMENT, message) from None


def _status(name: str, states: Mapping[str, bool]) -> int:
    """Return the health of a model, or of the whole: SERVING if any model is ready."""
    if name not in ("", _SERVICE.strip("/"), *states):
        return int(_Status.SERVICE_UNKNOWN)
    is_ready = states[name] if name in states else any(states.values())
    return int(_Status.SERVING if is_ready else _Status.NOT_SERVING)


async def _next(context: Any) -> Any:
    """Return the next message of a call, None at its end. Abort an idle call."""
    try:
        async with asyncio.timeout(_MESSAGE_S):
            message = await context.read()
    except TimeoutError:
        text = f"no message arrived within {_MESSAGE_S:g} s"
        await context.abort(_Code.DEADLINE_EXCEEDED, text)
    return None if message is grpc.aio.EOF else message


async def _first(context: Any) -> bytes:
    """Return the first message of a call."""
    try:
        async with asyncio.timeout(_MESSAGE_S):
            message = await context.read()
    except TimeoutError:
        text = f"no whole message arrived within {_MESSAGE_S:g} s"
        raise _EndedCallError(_Code.DEADLINE_EXCEEDED, text) from None
    if message is grpc.aio.EOF:
        raise _EndedCallError(_Code.INVALID_ARGUMENT, "the call ended without a message")
    return bytes(message)


async def _send(call: Any, first: bytes, context: Any) -> None:
    """Send the first message to the service, then those that follow in a stream's `context`."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the call has ended
        await call.write(first)
        while context and (message := await context.read()) is not grpc.aio.EOF:
            await call.write(message)
        await call.done_writing()
