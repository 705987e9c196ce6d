"""From SIGTERM to the end of a worker: not ready at once, still answering while the word gets round, then the last answers, then the end.

Whoever sends requests here learns that it is not ready only when it looks, or is told: a load balancer within a probe's period, Kubernetes'
proxies within some seconds. A worker that stopped listening sooner would refuse what they still send. So it goes on for
SLIPWAY_DRAIN_S, and asks each caller to close its connection.
"""

import asyncio
import signal
import threading
from types import FrameType

from serving.worker import ModelWorker


def drain_on_sigterm(worker: ModelWorker) -> None:
    """Drain before uvicorn, whose handler of SIGTERM is in place already, ends this worker. Called on its event loop."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # an application in somebody else's process
        return
    loop, end = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    if not callable(end):  # no server around it
        return

    def begin() -> None:
        if worker.is_draining:
            return
        is_asked = worker.model is not None  # else nobody sends anything here
        worker.drain()
        loop.call_later(worker.settings.drain_s if is_asked else 0, end, signal.SIGTERM, None)

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)

    signal.signal(signal.SIGTERM, on_signal)
