"""Writes the access log to the folder that SLIPWAY_ACCESS_LOG_DIRECTORY names.

Segments and their limits are those of the request log.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Annotated

import orjson
from prometheus_client import Counter
from pydantic import Field

from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.routes import STAGES, Exchange, Headers
from slipway.serving.process.background import OUTCOMES, LineLog
from slipway.serving.settings import OptionalPath, SettingsSection
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import SegmentWriter

logger = logging.getLogger("bentoml.slipway")

# Most requests that are gathered for one write, and the time for which they are gathered.
_MAX_REQUESTS, _GATHER_S = 64, 0.05
_WRITE_S = 0.5  # between two writes: each costs what some hundred lines cost
_MAX_WAITING, MAX_WAITING_BYTES = 4096, 8 << 20  # most groups that wait, and their bytes
_LINE_BYTES = 1024  # more than the longest line
_DAY_S = 86400.0
_METHOD_CHARACTERS = 20


class AccessLogSettings(SettingsSection):
    """Folder, sampling rate and retention of the access log."""

    access_log_directory: OptionalPath = None  # unset or empty: no access log
    access_log_sampling_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    access_log_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20  # folder size, over all workers
    access_log_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: until the folder is full


class _Gatherer:
    """Formats the lines of many requests at once, on the event loop, and passes them to the log.

    Formatting many lines in succession takes half the time of formatting them one by one. On the
    log's thread it would take more: two threads would compete for the interpreter.
    """

    def __init__(self, log: LineLog[bytes], max_requests: int) -> None:
        self._log, self._max_requests = log, max_requests
        self._ended: list[Exchange] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, exchange: Exchange, headers: Headers) -> tuple[()]:
        """Add a request, whose line is logged within _GATHER_S seconds. It gets no headers."""
        self._ended.append(exchange)
        if len(self._ended) >= self._max_requests:
            self.pass_on()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.pass_on)
        return ()

    def pass_on(self) -> None:
        """Format the lines of all gathered requests, and pass them to the log."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        now = time.time() - time.perf_counter()
        lines = b"".join([encode_line(exchange, now) for exchange in ended])
        self._log.put(lines, len(lines), len(ended))

    def close(self) -> None:
        """Write all lines. Waits only seconds, because the disk may hang."""
        self.pass_on()
        self._log.close()


def encode_line(exchange: Exchange, clock_offset: float) -> bytes:
    """Return a request's line; `clock_offset` converts its times to seconds since 1970."""
    trace = exchange.trace
    line = {
        "time": datetime.fromtimestamp(exchange.ended + clock_offset, UTC),
        "request_id": exchange.request_id,
        "trace_id": trace.trace_id,
        "method": exchange.method[:_METHOD_CHARACTERS],
        "route": exchange.route,
        "status": exchange.status,
        "error": exchange.error,
        "key": exchange.caller,
        "model_version": trace.model_version,
        "rows": trace.num_rows,
        "total_us": int((exchange.ended - exchange.started) * 1e6),
        "stages_us": _stages_us(trace.times) if trace.is_recorded else None,
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _stages_us(times: tuple[float, ...]) -> dict[str, int]:
    """Return the microseconds of each stage that took place."""
    if len(times) == 10:  # a prediction: written out, the stages take half the time of a loop
        begin, read, decoding, decoded, queued, taken, begun, inferred, encoding, end = times
        return {
            "read": int((read - begin) * 1e6),
            "decode": int((decoded - decoding) * 1e6),
            "queue": int((taken - queued) * 1e6),
            "infer": int((inferred - begun) * 1e6),
            "encode": int((end - encoding) * 1e6),
        }
    pairs = zip(STAGES, times[::2], times[1::2], strict=False)
    return {stage: int((end - begin) * 1e6) for stage, begin, end in pairs}


def _attach(worker: ModelWorker) -> Hooks:
    settings = worker.settings.section(AccessLogSettings)
    directory, rate = settings.access_log_directory, settings.access_log_sampling_rate
    lines = Counter(
        "slipway_access_log_lines_total",
        "Sampled requests by whether the access log has them.",
        ["outcome"],
        registry=worker.metrics.registry,
    )
    counters = {outcome: lines.labels(outcome) for outcome in OUTCOMES}
    if directory is None:
        return Hooks()
    if directory == worker.request_log:
        logger.error(
            "the access log is off: SLIPWAY_ACCESS_LOG_DIRECTORY is %s, the folder of the request "
            "log; give it a folder of its own",
            directory,
        )
        return Hooks()
    max_age_s = settings.access_log_days * _DAY_S or None
    writer = SegmentWriter(directory, settings.access_log_bytes, worker.settings.workers, max_age_s)
    log: LineLog[bytes] = LineLog(
        "access log",
        writer,
        bytes,
        lambda outcome, number: counters[outcome].inc(number),
        _MAX_WAITING,
        MAX_WAITING_BYTES,
        max_age_s=max_age_s,
        gather_s=_WRITE_S,
    )
    max_requests = max(1, min(_MAX_REQUESTS, writer.segment_bytes // _LINE_BYTES))
    gatherer = _Gatherer(log, max_requests)

    async def close() -> None:
        gatherer.close()

    return Hooks(
        on_response=gatherer.note,
        sampling_rate=rate,
        receives_faults=True,
        close=close,
    )


EXTENSION = Extension("access_log", _attach, AccessLogSettings)
