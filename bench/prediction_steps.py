"""Measures the cost of a small prediction in Python: interpreter steps and processor time.

`python -m bench.prediction_steps` runs the connections, the application and the model of a worker
in one process, without sockets. Each of 32 connections gets a request, and the next when all are
answered. `sys.settrace` counts the interpreter's steps, whose number hardly varies with one version
of Python. Times are those of the event loop's thread under full load, with and without monitoring
in turns of some 20 ms, so that both see the same machine state. The monitoring's own thread is
listed separately. The result is one table, printed and written to a file.
"""

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from bench.conditions import conditions
from bench.monitoring_overhead import CASES
from bench.serving_overhead import http_request
from bench.serving_speed import NUM_CONNECTIONS, PACKAGES
from slipway.serving.app import Application, connection_limits
from slipway.serving.models import batching
from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.process.worker_process import freeze_gc, set_switch_interval
from slipway.serving.worker import ModelWorker
from slipway.system import files
from tests.serving.in_process import full_worker, read_all_settings
from tests.serving.server import environment

RESULT = Path("bench/results/prediction_steps.md")
SETTLE_S = 5.0  # until the monitoring's sampling rate is stable
NUM_TURNS, ROUNDS_A_TURN = 1000, 10
NUM_COUNTED = 8  # rounds whose steps are counted
MOST_LISTED = 12


class Silent(asyncio.Transport):
    """A transport that discards written bytes and counts the answers."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 3000), "peername": ("127.0.0.1", 50000)})
        self.num_written, self.last = 0, b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take an answer: head and body are written at once."""
        self.last = bytes(data)
        self.num_written += 1

    def close(self) -> None:
        """Do nothing: uvicorn closes a connection that was idle for seconds."""

    def is_closing(self) -> bool:
        """Return False: the transport never closes."""
        return False

    def pause_reading(self) -> None:
        """Do nothing: there is nothing more to read."""

    def resume_reading(self) -> None:
        """Do nothing: there is nothing more to read."""

    def get_write_buffer_size(self) -> int:
        """Return 0: every write is accepted at once."""
        return 0


class Replayer:
    """One worker's code path from the first byte of a request to the last byte of its answer."""

    def __init__(self, worker: ModelWorker, request: bytes) -> None:
        async def behind(scope: Scope, receive: Receive, send: Send) -> None:
            raise RuntimeError("nothing here is for BentoML")

        app = Application(behind, worker)
        config = uvicorn.Config(app, log_level="critical", access_log=False, ws="none")
        limits, state = connection_limits(worker), ServerState()
        state.default_headers = [
            (b"date", b"Sun, 22 Nov 2026 20:00:00 GMT"),
        ]
        self._request = request
        self._connections: list[tuple[asyncio.Protocol, Silent]] = []
        for _ in range(NUM_CONNECTIONS):
            connection, transport = limits(config, state, {}), Silent()
            connection.connection_made(transport)
            self._connections.append((connection, transport))

    async def answer_all(self) -> None:
        """Run one round: send a request to each connection, and await all answers."""
        wanted = [transport.num_written + 1 for _, transport in self._connections]
        for connection, _ in self._connections:
            connection.data_received(self._request)
        while any(
            transport.num_written < number
            for (_, transport), number in zip(self._connections, wanted, strict=True)
        ):
            await asyncio.sleep(0)
        if b"200 OK" not in self._connections[-1][1].last:
            raise RuntimeError(f"no prediction: {self._connections[-1][1].last!r}")


class Times(NamedTuple):
    """Processor times of the turns."""

    us: dict[bool, list[float]]  # µs of a prediction by turn, with (True) and without monitoring
    thread_share: float  # processor time of the monitoring's thread / that of the event loop's


async def measure_times(replayer: Replayer, worker: ModelWorker, monitor: TrafficMonitor) -> Times:
    """Measure turns with and without monitoring, in the order on, off, off, on."""
    everyone, clock = (
        worker.observers.all,
        time.pthread_getcpuclockid(cast(int, monitor._thread.ident)),
    )
    us: dict[bool, list[float]] = {True: [], False: []}
    monitor_before, loop_before = time.clock_gettime(clock), time.thread_time()
    for turn in range(NUM_TURNS):
        is_monitored = turn % 4 in (0, 3)
        worker.observers.all = everyone if is_monitored else ()
        began = time.thread_time()
        for _ in range(ROUNDS_A_TURN):
            await replayer.answer_all()
        seconds = time.thread_time() - began
        us[is_monitored].append(seconds / ROUNDS_A_TURN / NUM_CONNECTIONS * 1e6)
    worker.observers.all = everyone
    monitor_seconds = time.clock_gettime(clock) - monitor_before
    return Times(us, monitor_seconds / (time.thread_time() - loop_before))


async def count_steps(replayer: Replayer) -> Counter[str]:
    """Count the interpreter's steps of `NUM_COUNTED` rounds, by function."""
    steps: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                name = frame.f_code.co_filename.removeprefix(os.getcwd() + "/")
                if not name.startswith("bench"):
                    module = name.rpartition("site-packages/")[2].rpartition("/python3")[2]
                    steps[f"{frame.f_code.co_qualname} ({module})"] += 1
            return count

        return count

    sys.settrace(trace)
    for _ in range(NUM_COUNTED):
        await replayer.answer_all()
    sys.settrace(None)
    return steps


def described(steps: dict[bool, Counter[str]], times: Times) -> str:
    """Format the measured times as Markdown tables."""
    num_predictions = NUM_COUNTED * NUM_CONNECTIONS
    lines = ["| | without monitoring | with monitoring | ratio |", "|---|---|---|---|"]
    totals = [steps[is_monitored].total() / num_predictions for is_monitored in (False, True)]
    lines.append(
        f"| steps of the interpreter | {totals[0]:,.0f} | {totals[1]:,.0f} "
        f"| {totals[1] / totals[0]:.3f} |"
    )
    for name, share in (("lowest tenth", 10), ("lowest quarter", 4), ("median", 2)):
        off, on = (
            statistics.quantiles(times.us[is_monitored], n=share)[0]
            for is_monitored in (False, True)
        )
        lines.append(
            f"| microseconds of the event loop's thread, {name} of the turns "
            f"| {off:.1f} | {on:.1f} | {on / off:.3f} |"
        )
    ratios = [on / off for on, off in zip(times.us[True], times.us[False], strict=True)]
    lines += [
        "",
        f"Neighbouring turns, with over without: median {statistics.median(ratios):.3f}, "
        f"n = {len(ratios)} pairs. The monitoring's own thread takes {times.thread_share:.2%} of "
        "the time of the event loop's; half of the requests are monitored.",
        "",
    ]
    most = [
        f"| {name} | {count / num_predictions:.0f} |"
        for name, count in steps[True].most_common(MOST_LISTED)
    ]
    heading = "| most steps, with monitoring | for each prediction |"
    return "\n".join([*lines, heading, "|---|---|", *most])


async def run(folder: Path) -> str:
    """Measure times and steps, and return the report."""
    batching.SLOW_S = math.inf  # while steps are counted, the model would get a thread of its own
    case = CASES["small"]
    case.write(folder)
    worker = full_worker(
        read_all_settings(environment(folder, state=folder / "state")), settle=freeze_gc
    )
    worker.start()
    await worker.loaded()
    set_switch_interval()
    replayer = Replayer(worker, http_request("/predict", case.media_type, case.image()))
    (monitor,) = (one for one in worker.observers.all if isinstance(one, TrafficMonitor))
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        await replayer.answer_all()
    times = await measure_times(replayer, worker, monitor)
    # Tracing is slow: the sampler would skip most requests.
    monitor.queue.sampler.adapt = lambda num_offered, num_used: None  # type: ignore[method-assign]
    everyone, steps = worker.observers.all, {}
    for is_monitored in (True, False):
        worker.observers.all = everyone if is_monitored else ()
        await replayer.answer_all()
        steps[is_monitored] = await count_steps(replayer)
    worker.observers.all = everyone
    await worker.stop()
    return (
        "# A small prediction in Python\n\n"
        f"{case.title}, {NUM_CONNECTIONS} connections without sockets\n\n"
        f"{described(steps, times)}\n\n"
        f"{NUM_TURNS} turns of {ROUNDS_A_TURN * NUM_CONNECTIONS} predictions. "
        f"{conditions(*PACKAGES)}\n"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        text = uvloop.run(run(Path(temporary)))
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
