"""Adds the routes of the Open Inference Protocol: `/v2`, health, metadata and `infer`.

There is one model, SLIPWAY_MODEL_NAME, in one version at a time: the model that answers `/predict`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric

from slipway.artifacts.bundle import Bundle
from slipway.serving.endpoints.predict import ERRORS, predict_within_deadline
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import (
    RETRY_AFTER,
    Refusal,
    Response,
    describe_refusal,
    json_response,
)
from slipway.serving.http.routes import (
    READING,
    Describe,
    ErrorShape,
    Handler,
    Operation,
    Request,
    Route,
    Routes,
    always,
)
from slipway.serving.http.strict_json import parse
from slipway.serving.metrics.service_metrics import PREDICTION_ROUTES
from slipway.serving.models.model import ServedModel
from slipway.serving.open_inference.conversion import (
    as_outputs,
    as_payload,
    configure,
    describe,
    is_quickly_read,
    is_quickly_written,
)
from slipway.serving.open_inference.messages import (
    HEAD_LENGTH,
    REQUEST,
    InferRequest,
    parse_request,
    response,
)
from slipway.serving.requests.bodies import BODY_ERRORS, read_body
from slipway.serving.requests.payload import Payload
from slipway.serving.schemas import ANYTHING, ERROR_FIELDS, TEXT, ImageApi, input_api
from slipway.serving.worker import ModelWorker

Result = TypeVar("Result")
_DURATION = "slipway_prediction_duration_seconds"
_FAILED_SECONDS = "slipway_failed_prediction_seconds_total"
_STAGES = {
    "queue": "queue",
    "compute_input": "decode",
    "compute_infer": "infer",
    "compute_output": "encode",
}
_BACKEND = "slipway"
_EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "statistics",
]
_JSON = {"application/json": ANYTHING}
_SERVER = Operation("The Open Inference Protocol: name and version of the server.", answers=_JSON)
_LIVE = Operation("Liveness of the process.", answers=_JSON)
_READY = Operation("Readiness of the model.", answers=_JSON, errors=("not_ready",))
_METADATA = Operation("Input and output tensors.", answers=_JSON, errors=("not_ready",))
_INFER = Operation(
    "The answer of `/predict`, as tensors.",
    {"application/json": REQUEST},
    _JSON,
    (*ERRORS, "malformed_json", "tensor_mismatch"),
    "-d @request.json",
)
_BELOW = Operation("404 for any other path.", answers=_JSON, errors=("unknown_model", "not_found"))
_CONFIG = Operation("Triton's model configuration.", answers=_JSON, errors=("not_ready",))
_STATISTICS = Operation(
    "Triton's statistics of the predictions.", answers=_JSON, errors=("not_ready",)
)
_INDEX = Operation(
    "Triton's list of models.",
    {
        "application/json": {
            "type": "object",
            "properties": {"ready": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
    {"application/json": {"type": "array", "items": ANYTHING}},
    (*BODY_ERRORS, "malformed_json", "unknown_field"),
    requires_body=False,
)
_MAX_INDEX_BYTES = 1 << 10
_ERROR_FIELDS = {"error": TEXT} | {
    name: schema for name, schema in ERROR_FIELDS.items() if name != "message"
}


def _describe_versioned(describe: Describe, bundle: Bundle | None) -> Operation:
    operation = describe(bundle)
    summary = f"{operation.summary.removesuffix('.')}; of the model in one version."
    return replace(operation, summary=summary, errors=(*operation.errors, "unknown_model"))


def _describe_infer(bundle: Bundle | None) -> Operation:
    api = input_api(bundle.input) if bundle else ImageApi
    return replace(_INFER, errors=(*_INFER.errors, *api.errors, "missing_field"))


def _respond_with_error(refusal: Refusal, request_id: str) -> Response:
    """Return the protocol's error response, in which `error` is a text, not an object."""
    described = describe_refusal(refusal, request_id)
    content = {"error": described.pop("message"), **described}
    return json_response(content, refusal.status, refusal.headers)


_ERROR_SHAPE = ErrorShape(
    "ProtocolError",
    {"type": "object", "required": list(_ERROR_FIELDS), "properties": _ERROR_FIELDS},
    _respond_with_error,
)


class WorkerThread:
    """One thread for conversions that would block the event loop.

    It runs one call at a time. At most `max_waiting` calls wait, the running call included, because
    each may hold a whole body.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread and return its result, unless the caller is cancelled first.

        Raises Refusal if too many calls wait.
        """
        if self._num_waiting >= self._max_waiting:
            message = (
                f"{self._num_waiting} large requests are waiting, the limit (SLIPWAY_MAX_QUEUE); "
                "try again later"
            )
            raise Refusal("queue_full", message, headers=(RETRY_AFTER,))
        waiting = [work]
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: waiting.pop()()
            )
        finally:
            waiting.clear()  # or the queue of the thread would hold the body until its turn
            self._num_waiting -= 1

    async def close(self) -> None:
        """Let the thread end after the running call, without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def protocol_routes(worker: ModelWorker, thread: WorkerThread) -> Routes:
    """Return `/v2` and all routes below it. Large messages are converted on `thread`."""
    protocol = _Protocol(worker, thread)
    name = worker.settings.model_name

    async def server(request: Request) -> Response:
        version = worker.model.version if worker.model else ""
        return json_response({"name": _BACKEND, "version": version, "extensions": _EXTENSIONS})

    async def live(request: Request) -> Response:
        return json_response({"live": True})

    async def ready(request: Request) -> Response:
        worker.require_ready()
        return json_response({"ready": True})

    routes: Routes = {
        "/v2": Route(READING, server, "caller", always(_SERVER)),
        "/v2/health/live": Route(READING, live, "open", always(_LIVE)),
        "/v2/health/ready": Route(READING, ready, "open", always(_READY), is_probe=True),
        "/v2/models/stats": Route(
            READING, protocol.of_model(protocol.statistics), "caller", always(_STATISTICS)
        ),
        "/v2/repository/index": Route(("POST",), protocol.index, "caller", always(_INDEX)),
        # To answer that there is no such model.
        "/v2/*": Route(
            (*READING, "POST"), protocol.refuse_path, "caller", always(_BELOW), is_unknown=True
        ),
    }
    for path, methods, handler, words in (
        ("", READING, protocol.metadata, always(_METADATA)),
        ("/config", READING, protocol.config, always(_CONFIG)),
        ("/ready", READING, protocol.ready, always(_READY)),
        ("/stats", READING, protocol.statistics, always(_STATISTICS)),
        ("/infer", ("POST",), protocol.infer, _describe_infer),
    ):
        is_probe = path == "/ready"
        route = Route(methods, protocol.of_model(handler), "caller", words, is_probe=is_probe)
        routes[f"/v2/models/{name}{path}"] = route
        routes[f"/v2/models/{name}/versions/*{path}"] = replace(
            route, describe=partial(_describe_versioned, words)
        )
    return {path: replace(route, error_shape=_ERROR_SHAPE) for path, route in routes.items()}


class _Protocol:
    """Handlers of the paths below `/v2/models/NAME`, with or without a model version."""

    def __init__(self, worker: ModelWorker, thread: WorkerThread) -> None:
        self._worker = worker
        self._thread = thread
        self._name = worker.settings.model_name

    async def refuse_path(self, request: Request) -> Response:
        """Raise Refusal for a path of another model, or one that the protocol does not have."""
        parts = request.path.strip("/").split("/")[1:]
        name = parts[1] if parts[:1] == ["models"] and len(parts) > 1 else self._name
        if name != self._name:
            raise Refusal(
                "unknown_model", f"there is no model {name[:80]!r}, this service has {self._name!r}"
            )
        raise Refusal(
            "not_found",
            "there is nothing at this path; known: /v2/health/live, /v2/health/ready, "
            f"/v2/repository/index, and /v2/models/{self._name} with config, infer, ready and "
            "stats",
        )

    def of_model(self, handler: Callable[[Request, ServedModel], Awaitable[Response]]) -> Handler:
        """Return a handler that calls `handler` with the served model.

        A path may name the model's version: in hex, or as the decimal number that the answer of
        the endpoint for statistics shows. Raises Refusal if it names a version that is not served.
        """

        async def answer(request: Request) -> Response:
            model = self._worker.require_model()
            _, named, version = request.path.partition(f"/{self._name}/versions/")
            version = version.split("/")[0]
            if named and version not in (model.version, str(int(model.version, 16))):
                raise Refusal(
                    "unknown_model",
                    f"there is no version {version[:80]!r} of {self._name}, "
                    f"this service has {model.version}",
                )
            return await handler(request, model)

        return answer

    async def config(self, request: Request, model: ServedModel) -> Response:
        """Return the model's configuration in Triton's format."""
        platform = model.selection.actual.backend
        content = {"name": self._name, "platform": platform, "backend": _BACKEND}
        return json_response(content | configure(model.bundle.manifest))

    async def statistics(self, request: Request, model: ServedModel) -> Response:
        """Return Triton's statistics, over all workers and since the service started."""
        metrics = await asyncio.to_thread(self._worker.metrics.collect)
        return json_response({"model_stats": [summarize(metrics, self._name, model.version)]})

    async def index(self, request: Request) -> Response:
        """Return Triton's list of models; with `ready`, only ready models."""
        is_sent = request.headers.keys() & {b"content-length", b"transfer-encoding"}
        body = await read_body(request, _MAX_INDEX_BYTES) if is_sent else b""
        content = parse(body) if body else {}
        is_known = isinstance(content, dict) and content.keys() <= {"ready"}
        if not is_known or not isinstance(content.get("ready", False), bool):
            raise Refusal("unknown_field", 'expected no body, {} or {"ready": true}', field="body")
        model = self._worker.model
        entry = {
            "name": self._name,
            "version": model.version if model else "",
            "state": "READY" if model else "UNAVAILABLE",
            "reason": "" if model else self._worker.reason,
        }
        return json_response([entry] if model or not content.get("ready") else [])

    async def metadata(self, request: Request, model: ServedModel) -> Response:
        content: dict[str, Any] = {
            "name": self._name,
            "versions": [model.version],
            "platform": model.selection.actual.backend,
        }
        return json_response(content | describe(model.bundle.manifest))

    async def ready(self, request: Request, model: ServedModel) -> Response:
        self._worker.require_ready()
        return json_response({"name": self._name, "ready": True})

    async def infer(self, request: Request, model: ServedModel) -> Response:
        settings, manifest = self._worker.settings, model.bundle.manifest
        parsed: list[InferRequest] = []  # without its tensors, which no answer needs

        async def read() -> Callable[[], Payload | Awaitable[Payload]]:
            body = await read_body(
                request, settings.max_body_bytes, self._worker.admission.require_room
            )
            head_length = _head_length(request)

            def convert() -> Payload:
                infer = parse_request(body, head_length)
                payload = as_payload(infer, manifest, settings.max_items, settings.max_rows)
                parsed.append(replace(infer, inputs=[]))
                return payload

            if is_quickly_read(len(body), head_length, manifest):
                return convert
            return lambda: self._convert_on_thread(convert)

        def encode(answer: dict[str, Any]) -> Response | Awaitable[Response]:
            def write() -> Response:
                outputs = as_outputs(answer, parsed[0], manifest)
                return response(self._name, answer["model_version"], parsed[0], outputs)

            return write() if is_quickly_written(answer, manifest) else self._thread.run(write)

        return await predict_within_deadline(self._worker, request, read(), encode)

    async def _convert_on_thread(self, convert: Callable[[], Payload]) -> Payload:
        """Convert a large request on the thread. Counts it as expired if its deadline passes."""
        try:
            return await self._thread.run(convert)
        except asyncio.CancelledError:
            self._worker.metrics.expired()
            raise


def _head_length(request: Request) -> int | None:
    declared = request.headers.get(HEAD_LENGTH.encode())
    if declared is None:
        return None
    if not declared.isdigit() or len(declared) > 12:
        raise Refusal("malformed_body", "it is not a number of bytes", field=HEAD_LENGTH)
    return int(declared)


def _attach(worker: ModelWorker) -> Hooks:
    thread = WorkerThread("slipway-translate", worker.settings.max_queue)
    return Hooks(routes=protocol_routes(worker, thread), close=thread.close)


def summarize(metrics: Iterable[Metric], name: str, version: str) -> dict[str, Any]:
    """Return the entry of `model_stats`. It counts predictions of all versions since the start.

    The hexadecimal `version` becomes decimal: Triton's perf_analyzer reads it as an integer, and
    fails or finds no statistics for any other text.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    num_failed = 0
    for sample in (sample for metric in metrics for sample in metric.samples):
        sums[sample.name + sample.labels.get("stage", "")] += sample.value
        is_prediction = sample.labels.get("route", "").endswith(PREDICTION_ROUTES)
        if sample.name == "slipway_requests_total" and is_prediction:
            num_failed += int(sample.value) if sample.labels["code"] != "200" else 0

    def duration(count: str, seconds: str) -> dict[str, int]:
        return {"count": int(sums[count]), "ns": round(1e9 * sums[seconds])}

    stages = {
        theirs: duration(f"slipway_stage_seconds_count{ours}", f"slipway_stage_seconds_sum{ours}")
        for theirs, ours in _STAGES.items()
    }
    return {
        "name": name,
        "version": str(int(version, 16)),
        "inference_count": int(sums["slipway_batch_size_sum"]),  # rows
        "execution_count": int(sums["slipway_batch_size_count"]),  # batches
        "inference_stats": {
            "success": duration(f"{_DURATION}_count", f"{_DURATION}_sum"),
            "fail": {"count": num_failed, "ns": round(1e9 * sums[_FAILED_SECONDS])},
            **stages,
        },
        "batch_stats": [],
    }


EXTENSION = Extension("open_inference", _attach)
