"""Makes spans of completed requests, on a thread, and exports them.

The SDK's own spans take 20 µs each on the event loop, and its queue does not count what it drops.
So a request costs the event loop only its ids, and the thread makes the finished spans.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from slipway.serving.http.routes import (
    FAULT,
    STAGES,
    Exchange,
    Headers,
    new_request_id,
    sample_number,
)
from slipway.serving.process.background import BackgroundQueue
from slipway.system.version import installed_version

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 8192  # requests in the queue
# As in OpenTelemetry's SDK. An export takes milliseconds of processor time, however few its spans.
GATHER_S = 5.0
EXPORT_S = 5.0  # time limit of one export, retries included
_REQUESTS_PER_EXPORT = 128
_PARENT = re.compile(
    rb"([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_METHOD_CHARACTERS = 20


class _Traced(NamedTuple):
    """A sampled request, with its trace and span ids as hex digits."""

    trace_id: str
    span_id: str
    parent_id: str | None
    exchange: Exchange

    @property
    def num_spans(self) -> int:
        return 1 + len(self.exchange.trace.times) // 2


class _HashedOnce(Resource):
    """A copy of a resource that keeps its hash.

    The exporter hashes the resource of every span. Each time, the SDK would encode all attributes
    as JSON, which took a quarter of the time of an export.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Tracer:
    """One worker's traces. `count` gets each outcome: exported, dropped or failed.

    `max_per_second` is the largest number of traces that it begins in a second; traces of callers
    do not count. `add_exemplar` gets the seconds and the trace id of each sampled prediction.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        endpoint: str,
        sampling_rate: float,
        max_per_second: int,
        count: Callable[[str, int], None],
        add_exemplar: Callable[[float, str], None] = lambda seconds, trace_id: None,
    ) -> None:
        self._add_exemplar = add_exemplar
        self._exporter, self._endpoint, self._count = exporter, endpoint, count
        self._rate, self._max_per_second = sampling_rate, max_per_second
        self._second, self._num_begun = 0, 0
        self._is_failing = False
        version = installed_version()
        own = {"service.name": "slipway", "service.version": version}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over our own attributes.
        self._resource = _HashedOnce(Resource.create(own).merge(OTELResourceDetector().detect()))
        self._scope = InstrumentationScope("slipway", version)
        self._queue: BackgroundQueue[_Traced] = BackgroundQueue(
            "slipway-tracing", self._export, MAX_WAITING, gather_s=GATHER_S
        )

    def note(self, exchange: Exchange, headers: Headers) -> tuple[tuple[str, str], ...]:
        """Trace a request that is in the sample, or may continue the trace of its caller.

        Returns its header `traceparent`; nothing for a request without a trace.
        """
        header, parent_id = headers.get(b"traceparent"), None
        if parent := _read_parent(header):
            trace_id, parent_id, has_spans = parent
        elif sample_number(exchange.request_id) < self._rate and self._may_begin(exchange):
            trace_id, has_spans = new_request_id() + new_request_id(), True
        else:
            return ()
        span_id = new_request_id()
        exchange.trace.trace_id = trace_id
        if has_spans:
            traced = _Traced(trace_id, span_id, parent_id, exchange)
            if not self._queue.put(traced):
                self._count("dropped", traced.num_spans)
            if traced.num_spans > len(STAGES):  # a prediction: it has all stages
                self._add_exemplar(exchange.trace.times[-1] - exchange.started, trace_id)
        return (("traceparent", f"00-{trace_id}-{span_id}-{'01' if has_spans else '00'}"),)

    def _may_begin(self, exchange: Exchange) -> bool:
        """Count a new trace; return False if its second has as many as it may."""
        if exchange.started >= self._second + 1:
            self._second, self._num_begun = int(exchange.started), 0
        self._num_begun += 1
        return self._num_begun <= self._max_per_second

    def close(self) -> None:
        """Export the queued requests, without waiting for a collector that does not respond."""
        if self._is_failing:
            self._exporter.shutdown()
            self._queue.close()
        else:
            self._queue.close()
            self._exporter.shutdown()

    def _export(self, waiting: list[_Traced]) -> bool:
        for begin in range(0, len(waiting), _REQUESTS_PER_EXPORT):
            chunk = waiting[begin : begin + _REQUESTS_PER_EXPORT]
            if not self._export_chunk(chunk):
                rest = waiting[begin:]
                self._count("failed", sum(one.num_spans for one in rest))
                return False
            self._count("exported", sum(one.num_spans for one in chunk))
        return True

    def _export_chunk(self, chunk: list[_Traced]) -> bool:
        offset = time.time_ns() - time.perf_counter_ns()
        reason = "it did not take them"
        try:
            spans = [span for one in chunk for span in self._spans(one, offset)]
            is_exported = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:
            is_exported, reason = False, repr(error)
        if is_exported == self._is_failing:
            if is_exported:
                logger.info("traces are exported again to %s", self._endpoint)
            else:
                logger.error(
                    "cannot export traces to %s (%s); spans are lost until it answers, requests "
                    "are not; check SLIPWAY_TRACING_ENDPOINT",
                    self._endpoint,
                    reason,
                )
        self._is_failing = not is_exported
        return is_exported

    def _spans(self, traced: _Traced, offset: int) -> list[ReadableSpan]:
        """Return the spans of a request and its stages; `offset` makes times Unix times, in ns."""
        exchange, trace = traced.exchange, traced.exchange.trace
        found = {
            "http.request.method": exchange.method[:_METHOD_CHARACTERS],
            "http.route": exchange.route,
            "http.response.status_code": exchange.status,
            "error.type": exchange.error,
            "slipway.request_id": exchange.request_id,
            "slipway.key": exchange.caller,
            "slipway.model_version": trace.model_version,
            "slipway.rows": trace.num_rows,
        }
        is_fault = exchange.status is not None and exchange.status >= FAULT
        trace_id = int(traced.trace_id, 16)
        own = _context(trace_id, traced.span_id)
        whole = ReadableSpan(
            f"{exchange.method[:_METHOD_CHARACTERS]} {exchange.route}".strip(),
            own,
            _context(trace_id, traced.parent_id, is_remote=True) if traced.parent_id else None,
            self._resource,
            {name: value for name, value in found.items() if value is not None},
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if is_fault else StatusCode.UNSET),
            start_time=_nanoseconds(exchange.started, offset),
            end_time=_nanoseconds(exchange.ended, offset),
            instrumentation_scope=self._scope,
        )
        stages = [
            ReadableSpan(
                name,
                # Ids of stages may be made on this thread: nobody else needs them.
                _context(trace_id, f"{int(traced.span_id, 16) ^ place:016x}"),
                own,
                self._resource,
                start_time=_nanoseconds(begin, offset),
                end_time=_nanoseconds(end, offset),
                instrumentation_scope=self._scope,
            )
            for place, (name, begin, end) in enumerate(trace.stages(), start=1)
        ]
        return [whole, *stages]


def _read_parent(header: bytes | None) -> tuple[str, str, bool] | None:
    """Parse `traceparent`: trace id, span id, and True if the caller samples.

    Returns None if it is invalid.
    """
    found = _PARENT.fullmatch(header) if header else None
    if not found:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest):
        return None
    return trace_id.decode(), span_id.decode(), bool(int(flags, 16) & TraceFlags.SAMPLED)


def _context(trace_id: int, span_id: str, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(moment: float, offset: int) -> int:
    """Convert seconds of `time.perf_counter` to nanoseconds since 1970."""
    return int(moment * 1e9) + offset
