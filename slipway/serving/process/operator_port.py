"""A second port for operators, the only one with metrics, rollouts and the API description.

Every worker listens on it with SO_REUSEPORT, and the kernel chooses a worker for each connection;
any will do, because metrics cover all workers. The port has separate connection limits, so callers
cannot crowd operators out.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from slipway.serving.app import Application, connection_limits
from slipway.serving.worker import ModelWorker

_BACKLOG = 128
_GRACE_S = 5  # time for requests in flight when the worker ends


class _SecondServer(uvicorn.Server):
    """A uvicorn server without signal handlers, because the process's main server has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OperatorPort:
    """The HTTP server of one worker on SLIPWAY_ADMIN_PORT."""

    def __init__(self, worker: ModelWorker, application: Application) -> None:
        self._settings = worker.settings
        self._server = _SecondServer(
            uvicorn.Config(
                application,
                http=connection_limits(worker),  # type: ignore[arg-type]  # a factory is enough
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to listen and to serve requests. Raises OSError if the port is taken."""
        listener = _shared_listener(self._settings.admin_host, self._settings.admin_port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """Finish the requests in flight, and close the port."""
        if self._task:
            self._server.should_exit = True
            await self._task


def _shared_listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
