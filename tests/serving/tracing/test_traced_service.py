"""A real service with traces, access log and gRPC, and the data that a collector receives."""

import json
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as triton

from slipway.traffic.request_log import segments
from tests import plain_http
from tests.serving.bundles import SIZE_PX, picture
from tests.serving.ready_service import ready_service
from tests.serving.server import free_port
from tests.serving.tracing.test_extension import (
    OPEN_METRICS,
    PARENT,
    STAGES,
    TRACE,
    collector,
    exemplars,
)

pytestmark = pytest.mark.process
OVER_HTTP, OVER_GRPC = f"00-{TRACE}-{PARENT}-01", f"00-{'ab' * 16}-{PARENT}-01"


def test_requests_over_http_and_grpc_are_traced_and_logged(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "access"
    with (
        collector() as (url, received),
        ready_service(
            tmp_path,
            grpc_port=port,
            tracing_endpoint=url,
            access_log_directory=log,
            access_log_sampling_rate=1.0,
        ) as server,
    ):
        headers = {"content-type": "image/png", "traceparent": OVER_HTTP}
        answer = plain_http.post(server.url + "/predict", content=picture(), headers=headers)
        assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
        image = triton.InferInput("image", [1, SIZE_PX, SIZE_PX, 3], "UINT8")
        image.set_data_from_numpy(np.zeros((1, SIZE_PX, SIZE_PX, 3), np.uint8))
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.infer("slipway", [image], headers={"traceparent": OVER_GRPC})
        open_metrics = plain_http.get(server.url + "/metrics", headers=OPEN_METRICS).text
    spans = [  # sent at the latest when the service ended
        span
        for one in received
        for resource in one.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == 2 * (1 + len(STAGES))
    wholes = {span.trace_id.hex(): span.name for span in spans if span.name not in STAGES}
    assert wholes == {TRACE: "POST /predict", "ab" * 16: "POST /v2/models/slipway/infer"}
    for trace_id in wholes:
        assert {span.name for span in spans if span.trace_id.hex() == trace_id} >= STAGES
    assert set(exemplars(open_metrics).values()) <= wholes.keys()
    assert exemplars(open_metrics)
    lines = b"".join(segment.read_bytes() for segment in segments(log)).splitlines()
    logged = {one["trace_id"]: one for one in map(json.loads, lines) if one["trace_id"] in wholes}
    assert {one["status"] for one in logged.values()} == {200}
    assert logged.keys() == wholes.keys()
    assert all(segment.stat().st_mode & 0o777 == 0o600 for segment in segments(log))
