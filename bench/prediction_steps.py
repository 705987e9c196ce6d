"""What is done in Python for one small prediction, and what the watching adds to it: steps of the interpreter, and processor time.

`python -m bench.prediction_steps` has the connections, the application and the model of a worker in one process, without sockets: 32 connections
are given a request each, again when all are answered. Steps are counted by `sys.settrace`, nearly the same number each time with one
version of Python. Times are those of the event loop's thread, under full load, with the watching and without it in turns of some 20 ms,
so that both see the same machine; the watching's own thread is told apart. It prints and writes one table.
"""

import asyncio
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
from bench.serving_overhead import http_request
from bench.serving_speed import NUM_CONNECTIONS, PACKAGES
from bench.watching_overhead import CASES
from serving.app import Application
from serving.http.connections import tracked
from serving.monitoring.watcher import Watcher
from serving.process.interpreter import put_aside_what_stays, take_short_turns
from serving.process.operator_port import connection_limits
from serving.worker import ModelWorker
from slipway.system import files
from tests.serving.in_process import full_worker, read_all_settings
from tests.serving.server import environment

RESULT = Path("bench/results/prediction_steps.md")
SETTLE_S = 5.0  # in which the share of requests that the watching takes in whole finds its place
NUM_TURNS, ROUNDS_A_TURN = 1000, 10
NUM_COUNTED = 8  # rounds whose steps are counted
MOST_LISTED = 12


class Silent(asyncio.Transport):
    """The other end of a connection: takes what is written, and counts the answers."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 3000), "peername": ("127.0.0.1", 50000)})
        self.num_written, self.last = 0, b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """A head and a body are written for each answer."""
        if bytes(data[:8]) == b"HTTP/1.1":
            self.last = bytes(data)
        else:
            self.num_written += 1

    def is_closing(self) -> bool:
        """Never."""
        return False

    def pause_reading(self) -> None:
        """There is nothing more to read."""

    def resume_reading(self) -> None:
        """The same."""

    def get_write_buffer_size(self) -> int:
        """Everything is taken."""
        return 0


class Replayer:
    """One worker's way from the first byte of a request to the last one of its answer."""

    def __init__(self, worker: ModelWorker, request: bytes) -> None:
        async def behind(scope: Scope, receive: Receive, send: Send) -> None:
            raise RuntimeError("nothing here is for BentoML")

        app = tracked(Application(behind, worker))
        config = uvicorn.Config(app, log_level="critical", access_log=False, ws="none")
        limits, state = connection_limits(worker), ServerState()
        state.default_headers = [
            (b"date", b"Sun, 22 Nov 2026 20:00:00 GMT"),
            (b"server", b"uvicorn"),
        ]
        self._request = request
        self._connections: list[tuple[asyncio.Protocol, Silent]] = []
        for _ in range(NUM_CONNECTIONS):
            connection, transport = limits(config, state, {}), Silent()
            connection.connection_made(transport)
            self._connections.append((connection, transport))

    async def answer_all(self) -> None:
        """One round: a request to each connection, and all answers."""
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
    """Of the turns."""

    us: dict[
        bool, list[float]
    ]  # of the event loop's thread for a prediction, in each turn; by whether it was watched
    thread_share: float  # processor time of the watching's thread, of the event loop's


async def measure_times(replayer: Replayer, worker: ModelWorker, watcher: Watcher) -> Times:
    """Turns with and without, in the order on, off, off, on."""
    everyone, clock = (
        worker.observers.all,
        time.pthread_getcpuclockid(cast(int, watcher._thread.ident)),
    )
    us: dict[bool, list[float]] = {True: [], False: []}
    watching_before, all_before = time.clock_gettime(clock), time.thread_time()
    for turn in range(NUM_TURNS):
        is_watched = turn % 4 in (0, 3)
        worker.observers.all = everyone if is_watched else ()
        began = time.thread_time()
        for _ in range(ROUNDS_A_TURN):
            await replayer.answer_all()
        seconds = time.thread_time() - began
        us[is_watched].append(seconds / ROUNDS_A_TURN / NUM_CONNECTIONS * 1e6)
    worker.observers.all = everyone
    return Times(
        us, (time.clock_gettime(clock) - watching_before) / (time.thread_time() - all_before)
    )


async def count_steps(replayer: Replayer) -> Counter[str]:
    """Of a prediction, by function."""
    steps: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                name = frame.f_code.co_filename.removeprefix(os.getcwd() + "/")
                if not name.startswith("bench"):
                    steps[
                        f"{frame.f_code.co_qualname} ({name.rpartition('site-packages/')[2].rpartition('/python3')[2]})"
                    ] += 1
            return count

        return count

    sys.settrace(trace)
    for _ in range(NUM_COUNTED):
        await replayer.answer_all()
    sys.settrace(None)
    return steps


def described(steps: dict[bool, Counter[str]], times: Times) -> str:
    """The tables."""
    num_predictions = NUM_COUNTED * NUM_CONNECTIONS
    lines = ["| | without watching | with watching | ratio |", "|---|---|---|---|"]
    totals = [steps[is_watched].total() / num_predictions for is_watched in (False, True)]
    lines.append(
        f"| steps of the interpreter | {totals[0]:,.0f} | {totals[1]:,.0f} | {totals[1] / totals[0]:.3f} |"
    )
    for name, share in (("lowest tenth", 10), ("lowest quarter", 4), ("median", 2)):
        off, on = (
            statistics.quantiles(times.us[is_watched], n=share)[0] for is_watched in (False, True)
        )
        lines.append(
            f"| microseconds of the event loop's thread, {name} of the turns | {off:.1f} | {on:.1f} | {on / off:.3f} |"
        )
    ratios = [on / off for on, off in zip(times.us[True], times.us[False], strict=True)]
    lines += [
        "",
        f"Neighbouring turns, with over without: median {statistics.median(ratios):.3f}, n = {len(ratios)} pairs. The watching's own "
        f"thread takes {times.thread_share:.2%} of the time of the event loop's; half of the requests are watched.",
        "",
    ]
    most = [
        f"| {name} | {count / num_predictions:.0f} |"
        for name, count in steps[True].most_common(MOST_LISTED)
    ]
    return "\n".join([*lines, "| most steps, watched | for each prediction |", "|---|---|", *most])


async def run(folder: Path) -> str:
    """Everything."""
    case = CASES["small"]
    case.write(folder)
    worker = full_worker(
        read_all_settings(environment(folder, state=folder / "state")), settle=put_aside_what_stays
    )
    worker.start()
    await worker.loaded()
    take_short_turns()
    replayer = Replayer(worker, http_request("/predict", case.media_type, case.image()))
    (watcher,) = (one for one in worker.observers.all if isinstance(one, Watcher))
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        await replayer.answer_all()
    times = await measure_times(replayer, worker, watcher)
    watcher._thinning.adapt = lambda num_offered, num_used: None  # type: ignore[method-assign]  # traced, it is slow: nothing would be thinned out
    everyone, steps = worker.observers.all, {}
    for is_watched in (True, False):
        worker.observers.all = everyone if is_watched else ()
        await replayer.answer_all()
        steps[is_watched] = await count_steps(replayer)
    worker.observers.all = everyone
    await worker.stop()
    text = f"# A small prediction in Python\n\n{case.title}, {NUM_CONNECTIONS} connections without sockets\n\n{described(steps, times)}"
    return f"{text}\n\n{NUM_TURNS} turns of {ROUNDS_A_TURN * NUM_CONNECTIONS} predictions. {conditions(*PACKAGES)}\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        text = uvloop.run(run(Path(temporary)))
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
