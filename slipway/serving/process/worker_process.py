"""Sets up a worker process: garbage collection, thread switching, and draining on SIGTERM.

*Garbage collection.* A full collection visits all modules and the model, some hundred thousand
objects, and blocks all requests for 50 to 100 ms. So all objects that exist after loading the model
are frozen. Requests create almost no cycles, so collections are rarer than by default.

*Thread switching.* By default a thread holds the interpreter for 5 ms while others wait. The event
loop serves a request in a fraction of that, and would wait that long repeatedly while another
thread loads a model.

*Draining.* After SIGTERM the worker reports that it is not ready, but answers for
SLIPWAY_DRAIN_S and asks callers to close their connections. Load balancers notice only at their
next probe; until then their requests must not be refused.
"""

import asyncio
import gc
import logging
import signal
import sys
import threading
from types import FrameType

from slipway.serving.metrics.service_metrics import server_process
from slipway.serving.process.supervisor import END_NOW
from slipway.serving.worker import ModelWorker
from slipway.system.malloc import release_freed_pages
from slipway.system.parent_death import end_with

SWITCH_INTERVAL_S = 0.0005
# Net allocations between two collections of the youngest generation, then collections of one
# generation between two of the next.
_GC_THRESHOLDS = (20_000, 20, 20)


def set_up_worker_process(worker: ModelWorker) -> None:
    """Set up interpreter, memory and signals.

    Call it on the event loop before a model is loaded.
    """
    server = server_process()
    if server is not None:  # else a killed server leaves its workers on the port
        end_with(server)
    set_switch_interval()
    release_freed_pages()
    drain_on_sigterm(worker)
    silence_libraries()


def silence_libraries() -> None:
    """Turn off the log lines of libraries about single requests."""
    # uvicorn prepares a line for each request, even if the level then discards it, as BentoML's
    # does unless it runs with --debug.
    access = logging.getLogger("uvicorn.access")
    access.propagate = access.isEnabledFor(logging.INFO)
    # The form parser logs a warning for every malformed form.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def freeze_gc() -> None:
    """Collect garbage once, then exclude all existing objects from later collections.

    Takes about 0.1 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def set_switch_interval() -> None:
    """Shorten Python's switch interval, so that other threads delay the event loop less."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def drain_on_sigterm(worker: ModelWorker) -> None:
    """Drain this worker on SIGTERM before uvicorn's handler, which is already installed, ends it.

    END_NOW ends it without draining.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # an application inside somebody else's process
    loop, end = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    if not callable(end):
        return  # no server

    def begin() -> None:
        if worker.is_draining:
            return
        has_traffic = worker.model is not None
        worker.drain()
        delay = worker.settings.drain_s if has_traffic else 0
        loop.call_later(delay, end, signal.SIGTERM, None)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)

    def on_end_now(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(end, signal.SIGTERM, None)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(END_NOW, on_end_now)
