"""Writes the access log: SLIPWAY_ACCESS_LOG_DIRECTORY.

Segments and their bounds are those of the request log, in a folder of their own.
"""

import logging
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from prometheus_client import Counter
from pydantic import Field

from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.routes import Exchange, is_sampled
from slipway.serving.process.outbox import OUTCOMES, LineLog
from slipway.serving.settings import OptionalPath, SettingsSection
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import SegmentWriter

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 16384  # lines
_FAULT = 500  # from this status on, every request is logged
_DAY_S = 86400.0
_METHOD_CHARACTERS = 20


class AccessLogSettings(SettingsSection):
    """Folder, sampling rate and retention of the access log."""

    access_log_directory: OptionalPath = None  # unset or empty: no access log
    access_log_sampling_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    access_log_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20  # of the folder, all workers
    access_log_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: until the folder is full


def encode_line(moment: float, exchange: Exchange) -> bytes:
    """Return the line of a request that ended at `moment`, in seconds since 1970."""
    trace = exchange.trace
    # Whole numbers, and a time that orjson formats: a line costs less than half of the time.
    content: dict[str, Any] = {
        "time": datetime.fromtimestamp(moment, UTC),
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
        "stages_us": {name: int((end - begin) * 1e6) for name, begin, end in trace.stages},
    }
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)


def _attach(worker: ModelWorker) -> Hooks:
    settings = worker.settings.section(AccessLogSettings)
    directory, rate = settings.access_log_directory, settings.access_log_sampling_rate
    lines = Counter(
        "slipway_access_log_lines",
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
    log: list[LineLog[bytes]] = []

    def start() -> None:
        max_age_s = settings.access_log_days * _DAY_S or None
        writer = SegmentWriter(
            directory, settings.access_log_bytes, worker.settings.workers, max_age_s
        )
        log.append(
            LineLog(
                "access log",
                writer,
                bytes,
                lambda outcome, number: counters[outcome].inc(number),
                MAX_WAITING,
                max_age_s=max_age_s,
            )
        )

    def note(exchange: Exchange) -> tuple[tuple[str, str], ...]:
        is_fault = exchange.status is not None and exchange.status >= _FAULT
        if log and (is_fault or is_sampled(exchange.request_id, rate)):
            # Here, not on the log's thread: there a line takes three times as long, because two
            # threads would take turns in the interpreter (bench/results/tracing_overhead.md).
            log[0].put(encode_line(time.time(), exchange))
        return ()

    async def close() -> None:
        if log:
            log[0].close()

    return Hooks(on_response=note, start=start, close=close)


EXTENSION = Extension("access_log", _attach, AccessLogSettings)
