"""Sends traces to a collector: SLIPWAY_TRACING_ENDPOINT.

A request continues the trace of its `traceparent`, or begins one if it is sampled. Its response has
the `traceparent` of its span. Any other request gets no ids and no header.
https://www.w3.org/TR/trace-context/
"""

import logging
from importlib.util import find_spec
from typing import Annotated

from prometheus_client import Counter
from pydantic import BeforeValidator, Field, HttpUrl, field_validator

from slipway.serving.extension import Extension, Hooks
from slipway.serving.settings import SettingsSection
from slipway.serving.worker import ModelWorker

OUTCOMES = ("exported", "dropped", "failed")
_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


class TracingSettings(SettingsSection):
    """The collector, and the requests that begin a trace."""

    # URL to which traces are sent; unset or empty: no traces.
    tracing_endpoint: Annotated[HttpUrl | None, BeforeValidator(lambda url: url or None)] = None
    tracing_sampling_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    tracing_max_per_second: Annotated[int, Field(ge=1)] = 10  # traces begun by one worker

    @field_validator("tracing_endpoint")
    @classmethod
    def _has_its_package(cls, url: HttpUrl | None) -> HttpUrl | None:
        if url and not _is_installed():
            raise ValueError(
                "The exporter of traces is missing. Install it: pip install 'slipway-ml[tracing]'"
            )
        return url


def _is_installed() -> bool:
    try:
        return find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:  # no exporter of OpenTelemetry is installed
        return False


def _attach(worker: ModelWorker) -> Hooks:
    spans = Counter(
        "slipway_spans_total",
        "Spans of sampled requests by whether the collector took them.",
        ["outcome"],
        registry=worker.metrics.registry,
    )
    counters = {outcome: spans.labels(outcome) for outcome in OUTCOMES}
    settings = worker.settings.section(TracingSettings)
    if settings.tracing_endpoint is None:
        return Hooks()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from slipway.serving.tracing.tracer import EXPORT_S, Tracer

    # The exporter would log each attempt; the tracer logs the first one that fails.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    endpoint = str(settings.tracing_endpoint)
    tracer = Tracer(
        OTLPSpanExporter(endpoint, timeout=EXPORT_S),
        endpoint,
        settings.tracing_sampling_rate,
        settings.tracing_max_per_second,
        lambda outcome, number: counters[outcome].inc(number),
        worker.metrics.add_exemplar,
    )

    async def close() -> None:
        tracer.close()

    return Hooks(
        on_response=tracer.note,
        sampling_rate=settings.tracing_sampling_rate,
        continues_traces=True,
        close=close,
    )


EXTENSION = Extension("tracing", _attach, TracingSettings)
