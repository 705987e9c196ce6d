"""The server process above the workers: it brings dead ones back at once, ends them gracefully when told to, and at once when told twice.

BentoML (1.4.39) has circus for that, whose ways are mended here. It looks for dead workers every 10 s only, and in a container never
starts one again; a signal is lost when it comes while it is at work, and a second one always; it keeps the port open after its workers
closed it, so that callers connect and are never answered; and it takes commands from any user of the machine, on a TCP port.
"""

import signal
from types import FrameType
from typing import Any

from bentoml._internal.utils import circus
from circus.exc import ConflictError

CHECK_SECONDS = 0.5  # between looks for dead workers
_RETRY_SECONDS = 0.05  # until circus has ended what it is doing
_MAX_RETRIES = 100


class Supervisor(circus.Arbiter):
    """Circus' arbiter, as BentoML extends it, with these ways mended."""

    def __init__(
        self,
        watchers: list[Any],
        *,
        endpoint: str,
        pubsub_endpoint: str,
        check_delay: float,
        **options: Any,
    ) -> None:
        if not options.get("plugins"):  # which are processes that have to reach it
            endpoint, pubsub_endpoint = "inproc://slipway-control", "inproc://slipway-events"
        for watcher in watchers:
            # With one worker the container itself ends, and is started again by whoever runs it.
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
        """Begin to listen, for callers and for signals."""
        super().initialize()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def manage_watchers(self) -> Any:
        """Look for dead workers, and leave it for the next time if something else is going on."""
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
            watcher.stop_signal = number  # the workers drain after SIGTERM, and not after Ctrl-C
        self.sockets.close_all()  # the workers have their own, and close them when they are ready to
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
    """Have BentoML take this supervisor in the present process, which has not begun to serve."""
    circus.Arbiter = Supervisor  # type: ignore[misc]  # where BentoML looks it up
