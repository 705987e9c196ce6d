"""A port of its own for what operators ask: metrics, rollouts and the description of the API then answer there, and nowhere else.

Every worker listens on it (SO_REUSEPORT, so the kernel chooses one), which needs no process of its own: what operators see is of all
workers anyhow. Its connections are guarded like those of the main port, and counted apart, so that callers cannot crowd operators out.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from serving.app import Application
from serving.http.connections import ConnectionLimits, tracked
from serving.settings import Settings
from serving.worker import ModelWorker

_BACKLOG = 128
_GRACE_S = 5  # for what is being answered when the worker ends


class _SecondServer(uvicorn.Server):
    """A server beside the main one of its process, whose signals it leaves alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OperatorPort:
    """One worker's part of it. Nothing happens where SLIPWAY_ADMIN_PORT is 0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._worker: ModelWorker | None = None
        self._application: Application | None = None
        self._server: _SecondServer | None = None
        self._task: asyncio.Task[None] | None = None

    def serve(self, worker: ModelWorker, application: Application) -> None:
        """What answers there; said before it opens."""
        self._worker, self._application = worker, application

    async def open(self) -> None:
        """Listen, and answer from now on; OSError if the port is taken."""
        if not self._settings.admin_port or self._worker is None or self._application is None:
            return
        listener = listen(self._settings.admin_host, self._settings.admin_port)
        config = uvicorn.Config(
            tracked(self._application),
            http=connection_limits(self._worker),  # type: ignore[arg-type]  # a factory is enough
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _SecondServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """Answer what is in flight, and stop."""
        if self._server and self._task:
            self._server.should_exit = True
            await self._task


def connection_limits(worker: ModelWorker) -> ConnectionLimits:
    """The limits of the connections to one port of a worker."""
    settings, metrics = worker.settings, worker.metrics

    def count(code: str, status: int) -> None:
        metrics.refused(code)
        metrics.answered("other", status)

    return ConnectionLimits(settings.max_connections, settings.request_timeout_s, count)


def listen(host: str, port: int) -> socket.socket:
    """A socket that the workers share."""
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
