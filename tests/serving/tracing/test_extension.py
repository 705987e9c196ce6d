"""Traces: the header `traceparent`, spans of real requests, and an unreachable collector."""

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Exchange, RequestTrace, sample_number
from slipway.serving.settings import SettingsError
from slipway.serving.tracing import tracer as tracer_module
from slipway.serving.tracing.tracer import Tracer
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run

PNG = {"content-type": "image/png"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"read", "decode", "queue", "infer", "encode"}


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Start a receiver of OTLP over HTTP. Yields its URL and the list of parsed requests."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class's own name
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_collector_receives_spans_of_a_request_and_its_stages(
    make_settings: MakeSettings,
) -> None:
    headers = PNG | {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answers: list[httpx.Response] = []
    workers: list[ModelWorker] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        workers.append(worker)
        answers.append(await client.post("/predict", content=picture(), headers=headers))

    before = time.time_ns()
    with collector() as (url, received):
        run(make_settings(tracing_endpoint=url), work)
    assert metric(workers[0], 'slipway_spans_total{outcome="exported"}') == 1 + len(STAGES)
    (resource,) = received[0].resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "slipway"
    whole, *stages = [span for scope in resource.scope_spans for span in scope.spans]
    assert (whole.name, whole.trace_id.hex()) == ("POST /predict", TRACE)
    assert whole.parent_span_id.hex() == PARENT
    found = attributes(whole)
    assert found["slipway.request_id"] == "mine"
    assert found["slipway.model_version"] == answers[0].json()["model_version"]
    assert (found["http.response.status_code"], found["slipway.rows"]) == (200, 1)
    assert answers[0].headers["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    assert {span.name for span in stages} == STAGES
    assert len({span.span_id for span in [whole, *stages]}) == 1 + len(STAGES)
    for span in stages:
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert before < whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
    ends = {span.name: span.end_time_unix_nano for span in stages}
    assert ends["read"] <= ends["queue"] <= ends["infer"] <= ends["encode"]


def exchange(number: int = 0, status: int = 200, started: float = 1.0) -> Exchange:
    trace = RequestTrace((1.0, 1.5, 1.5, 2.0), "version", 1)
    return Exchange(f"id-{number}", "POST", "/predict", status, None, None, started, 2.0, trace)


def traced(
    rate: float, *exchanges: Exchange, given: str | None = None, most: int = 10_000
) -> tuple[list[str], InMemorySpanExporter]:
    """Return the headers of the responses, empty if untraced, and the exporter with the spans.

    All requests have the `traceparent` `given`; `most` traces begin in a second.
    """
    sent = {} if given is None else {b"traceparent": given.encode()}
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "memory", rate, most, lambda outcome, number: None)
    headers = [dict(tracer.note(one, sent)).get("traceparent", "") for one in exchanges]
    tracer.close()
    return headers, exporter


@pytest.mark.parametrize(
    ("given", "is_continued"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", True),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        ("\n", False),
        ("00-", False),
    ],
)
def test_only_a_valid_traceparent_is_continued(given: str, is_continued: bool) -> None:
    (header,), exporter = traced(0.0, exchange(), given=given)
    assert header.startswith(f"00-{TRACE}-") is is_continued
    assert bool(exporter.get_finished_spans()) is is_continued


def test_caller_decides_if_its_own_trace_is_sampled_and_the_rate_about_new_traces() -> None:
    (header,), exporter = traced(1.0, exchange(), given=f"00-{TRACE}-{PARENT}-00")
    assert header.endswith("-00")
    assert exporter.get_finished_spans() == ()
    headers, exporter = traced(0.25, *(exchange(number) for number in range(1000)))
    spans = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert 180 < len(spans) < 320
    ids = {f"id-{number}" for number in range(1000)}  # those of the access log's sample, too
    drawn = {span.attributes["slipway.request_id"] for span in spans if span.attributes}
    assert drawn == {name for name in ids if sample_number(name) < 0.25}
    own = [header for header in headers if header]
    assert all(header.endswith("-01") for header in own)
    assert len({header.split("-")[1] for header in own}) == len(own) == len(spans)


def test_a_second_begins_no_more_than_the_given_number_of_traces() -> None:
    moments = (0.1, 5.1, 5.2, 5.3, 5.9, 6.0, 5.9, 6.2)
    requests = [exchange(started=moment) for moment in moments]
    headers, _ = traced(1.0, *requests, most=2)
    assert [bool(header) for header in headers] == [1, 1, 1, 0, 0, 1, 1, 0]
    headers, _ = traced(1.0, *requests, given=f"00-{TRACE}-{PARENT}-01", most=2)
    assert all(headers)


def test_internal_fault_marks_the_span_as_an_error() -> None:
    _, exporter = traced(1.0, exchange(status=500), exchange(status=422))
    statuses = [
        span.status.status_code.name for span in exporter.get_finished_spans() if not span.parent
    ]
    assert statuses == ["ERROR", "UNSET"]


def test_unreachable_collector_affects_no_response_and_lost_spans_are_counted(
    make_settings: MakeSettings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracer_module, "GATHER_S", 0.01)
    monkeypatch.setattr(tracer_module, "EXPORT_S", 0.2)
    failed = 'slipway_spans_total{outcome="failed"}'

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for _ in range(3):
            assert (await client.post("/predict", content=picture(), headers=PNG)).is_success
        async with asyncio.timeout(20):
            while metric(worker, failed) < 18:
                await asyncio.sleep(0.02)
        assert (await client.post("/predict", content=picture(), headers=PNG)).is_success

    settings = make_settings(tracing_endpoint="http://127.0.0.1:9/", tracing_sampling_rate=1)
    run(settings, work)
    assert caplog.text.count("cannot export traces to http://127.0.0.1:9/") == 1


class HangingExporter(SpanExporter):
    """An exporter that hangs until `free` is set."""

    def __init__(self) -> None:
        self.free, self.hangs = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.hangs.set()
        assert self.free.wait(20)
        return SpanExportResult.SUCCESS


def test_full_tracing_queue_drops_requests_and_counts_their_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracer_module, "MAX_WAITING", 4)
    monkeypatch.setattr(tracer_module, "GATHER_S", 0.01)
    counts: dict[str, int] = {}

    def count(outcome: str, number: int) -> None:
        counts[outcome] = counts.get(outcome, 0) + number

    exporter = HangingExporter()
    tracer = Tracer(exporter, "memory", 1.0, 100, count)
    tracer.note(exchange(), {})
    assert exporter.hangs.wait(20)
    for number in range(10):
        tracer.note(exchange(number), {})
    assert counts == {"dropped": 18}  # of six requests
    exporter.free.set()
    tracer.close()
    assert counts == {"dropped": 18, "exported": 15}


def test_access_log_line_contains_the_trace_id(make_settings: MakeSettings, tmp_path: Any) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.get("/livez", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
        worker.refused_unread(Refusal("not_ready", "not ready"), "unread")

    run(
        make_settings(
            tracing_endpoint="http://127.0.0.1:9",
            access_log_directory=tmp_path / "log",
            access_log_sampling_rate=1.0,
        ),
        work,
    )
    (segment,) = (tmp_path / "log").iterdir()
    assert f'"trace_id":"{TRACE}"' in segment.read_text()


OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


def exemplars(text: str) -> dict[str, str]:
    """Return the trace ids of the latency histogram's exemplars, by bucket."""
    families: Any = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for family in families
        for sample in family.samples
        if family.name == "slipway_prediction_duration_seconds" and sample.exemplar
    }


def test_open_metrics_contain_the_trace_id_of_a_sampled_prediction_as_exemplar(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await client.get("/livez", headers=sampled)
        await client.post("/predict", content=picture(), headers=PNG)
        assert (
            "text/plain"
            in (await client.get("/metrics", headers=OPEN_METRICS)).headers["content-type"]
        )
        await client.post("/predict", content=picture(), headers=PNG | sampled)
        answer = await client.get("/metrics", headers=OPEN_METRICS)
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert set(exemplars(answer.text).values()) == {TRACE}
        assert "trace_id" not in (await client.get("/metrics")).text

    with collector() as (url, _):
        run(make_settings(tracing_endpoint=url, tracing_sampling_rate=0), work)


def test_tracing_is_off_by_default_and_an_invalid_endpoint_is_refused(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.hooks["tracing"].on_response is None
        assert "traceparent" not in (await client.get("/livez")).headers

    run(make_settings(tracing_endpoint=""), work)
    with pytest.raises(SettingsError, match="SLIPWAY_TRACING_ENDPOINT: found 'collector:4318'"):
        make_settings(tracing_endpoint="collector:4318")


def test_a_request_that_is_not_sampled_has_no_trace_and_no_header(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.new_trace("", {}) is None
        assert "traceparent" not in (await client.get("/livez")).headers
        continued = await client.get("/livez", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert continued.headers["traceparent"].startswith(f"00-{TRACE}-")

    run(make_settings(tracing_endpoint="http://127.0.0.1:9", tracing_sampling_rate=0), work)
