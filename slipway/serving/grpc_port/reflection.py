"""Server reflection of a gRPC port, from which tools such as grpcurl learn its methods."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


def add_reflection(
    server: grpc.aio.Server, names: Sequence[str], read_next: Callable[[Any], Awaitable[Any]]
) -> None:
    """Let the server describe the services `names`, and the reflection.

    `read_next` returns the next message of a call, None at its end. It ends idle calls.
    """

    class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # untyped
        async def ServerReflectionInfo(  # noqa: N802  # the name in the protocol
            self, messages: object, context: Any
        ) -> AsyncIterator[Any]:
            async def read() -> AsyncIterator[Any]:
                while (message := await read_next(context)) is not None:
                    yield message

            async for answer in super().ServerReflectionInfo(read(), context):
                yield answer

    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        Reflection((*names, reflection.SERVICE_NAME)), server
    )
