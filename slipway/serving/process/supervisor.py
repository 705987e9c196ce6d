"""The server process above the workers: restarts dead workers and stops all of them on a signal.

A second signal kills them. BentoML (1.4.39) uses circus for this. The class fixes these faults:
* it checks for dead workers only every 10 s, and never restarts one in a container;
* it loses a signal that arrives while it is busy, and every second signal;
* it keeps the port open after its workers closed it, so callers connect and get no response;
* it accepts commands from any user of the machine, on a TCP port.
"""

import signal
from types import FrameType
from typing import Any

from bentoml._internal.utils import circus
from circus.exc import ConflictError

# Ends a worker without draining. After a SIGINT, BentoML's worker prints "Aborted!".
END_NOW = signal.SIGHUP
CHECK_SECONDS = 0.5  # time between two checks for dead workers
_RETRY_SECONDS = 0.05  # pause between two tries while circus is busy
_MAX_RETRIES = 100


class Supervisor(circus.Arbiter):
    """Replaces BentoML's circus arbiter, without the faults listed at the top of this module."""

    def __init__(
        self,
        watchers: list[Any],
        *,
        endpoint: str,
        pubsub_endpoint: str,
        check_delay: float,
        **options: Any,
    ) -> None:
        if not options.get("plugins"):  # plugins are processes that connect to it
            endpoint, pubsub_endpoint = "inproc://slipway-control", "inproc://slipway-events"
        for watcher in watchers:
            # With one worker, the container ends and its orchestrator restarts it.
            watcher.respawn = watcher.respawn or watcher.numprocesses > 1
        super().__init__(
            watchers,
            endpoint=endpoint,
            pubsub_endpoint=pubsub_endpoint,
            check_delay=CHECK_SECONDS,
            **options,
        )
        self._exclusive_running_command: str | None
        self._is_ending = False

    def initialize(self) -> None:
        """Open the sockets and install the signal handlers."""
        super().initialize()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def manage_watchers(self) -> Any:
        """Restart dead workers; do nothing if circus is busy."""
        try:
            return super().manage_watchers()
        except ConflictError:
            return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.loop.asyncio_loop.call_soon_threadsafe(self._end, signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        if self._is_ending:
            self._kill()
            return
        self._is_ending = True
        for watcher in self.watchers:
            # Workers drain after SIGTERM, not after Ctrl-C.
            watcher.stop_signal = END_NOW if number == signal.SIGINT else number
        self.sockets.close_all()  # workers close their own copies when they have drained
        self._stop_soon(_MAX_RETRIES)

    def _stop_soon(self, num_retries: int) -> None:
        if self._exclusive_running_command is not None and num_retries:
            self.loop.call_later(_RETRY_SECONDS, self._stop_soon, num_retries - 1)
            return
        self._exclusive_running_command = None
        self.stop()

    def _kill(self) -> None:
        for watcher in self.watchers:
            for process in watcher.get_active_processes():
                process.send_signal(signal.SIGKILL)


def supervise() -> None:
    """Make BentoML use this supervisor in the present process, before it serves."""
    circus.Arbiter = Supervisor  # type: ignore[misc]  # BentoML looks it up here
