"""The Open Inference Protocol: `/v2`, its health, the model's metadata, and `infer`.

There is one model, `slipway`, in one version at a time: that which `/predict` answers with.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serving.api_docs.schemas import ANYTHING
from serving.endpoints.predicting import predict_within_deadline
from serving.extension import Extension, Hooks
from serving.http.responses import Refusal, Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.models.model import ServedModel
from serving.open_inference.adapting import (
    as_outputs,
    as_payload,
    describe,
    is_quickly_read,
    is_quickly_written,
)
from serving.open_inference.errors import ERROR_SHAPE
from serving.open_inference.messages import HEAD_LENGTH, InferRequest, parse_request, response
from serving.open_inference.worker_thread import OwnThread
from serving.requests.payload import Payload
from serving.requests.reading import read_body
from serving.worker import ModelWorker

MODEL = "slipway"
_EXTENSIONS = ["binary_tensor_data", "classification"]
_JSON = {"application/json": ANYTHING}
_SERVER = Operation("The Open Inference Protocol: which server this is.", answers=_JSON)
_LIVE = Operation("Whether the process can answer at all.", answers=_JSON)
_READY = Operation("Whether the model is ready.", answers=_JSON, errors=("not_ready",))
_METADATA = Operation(
    "The tensors that the model takes and answers.", answers=_JSON, errors=("not_ready",)
)
_INFER = Operation(
    "What `/predict` answers, as tensors.",
    _JSON,
    _JSON,
    ("tensor_mismatch", "not_ready"),
    "-d @request.json",
)
_VERSIONED = replace(
    _INFER,
    summary="What `/predict` answers, as tensors, by the model in one version.",
    errors=(*_INFER.errors, "unknown_model"),
)
_BELOW = Operation(
    "The metadata or the readiness of the model in one version; of anything else, that it is not there.",
    answers=_JSON,
    errors=("not_ready", "unknown_model", "not_found", "method_not_allowed"),
)
_MODEL_PARTS = 2  # "models" and the name


def protocol_routes(worker: ModelWorker, translating: OwnThread) -> Routes:
    """`/v2` and all below it. Large messages are translated on a thread of their own."""
    protocol = _Protocol(worker, translating)

    async def below(request: Request) -> Response:
        return await protocol.answer(request)

    async def server(request: Request) -> Response:
        version = worker.model.version if worker.model else ""
        return json_response({"name": MODEL, "version": version, "extensions": _EXTENSIONS})

    async def live(request: Request) -> Response:
        return json_response({"live": True})

    async def ready(request: Request) -> Response:
        worker.require_ready()
        return json_response({"ready": True})

    routes: Routes = {
        "/v2": Route(READING, server, "caller", always(_SERVER)),
        "/v2/health/live": Route(READING, live, "open", always(_LIVE)),
        "/v2/health/ready": Route(READING, ready, "open", always(_READY)),
        f"/v2/models/{MODEL}": Route(READING, below, "caller", always(_METADATA)),
        f"/v2/models/{MODEL}/ready": Route(READING, below, "caller", always(_READY)),
        f"/v2/models/{MODEL}/infer": Route(("POST",), below, "caller", always(_INFER)),
        f"/v2/models/{MODEL}/versions/*/infer": Route(
            ("POST",), below, "caller", always(_VERSIONED)
        ),
        # POST: it is refused with the reason that there is no such model.
        "/v2/*": Route((*READING, "POST"), below, "caller", always(_BELOW)),
    }
    return {
        path: replace(route, error_shape=ERROR_SHAPE) if path != "/v2" else route
        for path, route in routes.items()
    }


class _Protocol:
    """What lies below `/v2/models/slipway`, with or without a version."""

    def __init__(self, worker: ModelWorker, translating: OwnThread) -> None:
        self._worker = worker
        self._translating = translating
        self._known: dict[
            str, tuple[str, Callable[[Request, ServedModel], Awaitable[Response]]]
        ] = {
            "": ("GET", self._metadata),
            "ready": ("GET", self._ready),
            "infer": ("POST", self._infer),
        }

    async def answer(self, request: Request) -> Response:
        """Find what the path names."""
        parts = request.path.strip("/").split("/")[1:]
        if len(parts) < _MODEL_PARTS or parts[0] != "models":
            raise Refusal(
                "not_found",
                f"there is nothing at this path; known: /v2/health/live, /v2/health/ready, /v2/models/{MODEL}",
            )
        if parts[1] != MODEL:
            raise Refusal(
                "unknown_model", f"there is no model {parts[1][:80]!r}, this service has {MODEL!r}"
            )
        model = self._worker.require_model()
        rest = parts[_MODEL_PARTS:]
        if rest[:1] == ["versions"]:
            self._require_version("".join(rest[1:2]), model)
            rest = rest[2:]
        found = self._known.get("/".join(rest))
        if found is None:
            raise Refusal(
                "not_found",
                f"there is nothing at this path; below /v2/models/{MODEL} there are ready and infer",
            )
        method, handler = found
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise Refusal(
                "method_not_allowed",
                f"this path takes {method}, found {request.method[:20]}",
                headers=(("allow", method),),
            )
        return await handler(request, model)

    def _require_version(self, version: str, model: ServedModel) -> None:
        if version != model.version:
            raise Refusal(
                "unknown_model",
                f"there is no version {version[:80]!r} of {MODEL}, this service has {model.version}",
            )

    async def _metadata(self, request: Request, model: ServedModel) -> Response:
        content: dict[str, Any] = {
            "name": MODEL,
            "versions": [model.version],
            "platform": model.selection.actual.backend,
        }
        return json_response(content | describe(model.bundle.manifest))

    async def _ready(self, request: Request, model: ServedModel) -> Response:
        self._worker.require_ready()
        return json_response({"name": MODEL, "ready": True})

    async def _infer(self, request: Request, model: ServedModel) -> Response:
        settings, manifest, translating = (
            self._worker.settings,
            model.bundle.manifest,
            self._translating,
        )
        asked: list[InferRequest] = []  # without its tensors, which no answer needs

        async def read() -> Callable[[], Payload | Awaitable[Payload]]:
            body = await read_body(request, settings.max_body_bytes, self._worker.require_room)
            head_length = _head_length(request)

            def understand() -> Payload:
                parsed = parse_request(body, head_length)
                payload = as_payload(parsed, manifest, settings.max_items, settings.max_rows)
                asked.append(replace(parsed, inputs=[]))
                return payload

            if is_quickly_read(len(body), head_length, manifest):
                return understand
            return lambda: self._or_expired(translating.run(understand))

        def encode(answer: dict[str, Any]) -> Response | Awaitable[Response]:
            def write() -> Response:
                return response(
                    MODEL, answer["model_version"], asked[0], as_outputs(answer, asked[0], manifest)
                )

            return write() if is_quickly_written(answer, manifest) else translating.run(write)

        return await predict_within_deadline(self._worker, request, read(), encode)

    async def _or_expired(self, reading: Awaitable[Payload]) -> Payload:
        """What is read, counted if its time is over before."""
        try:
            return await reading
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
    translating = OwnThread("slipway-translate", worker.settings.max_queue)

    async def close() -> None:
        translating.close()

    return Hooks(routes=protocol_routes(worker, translating), close=close)


EXTENSION = Extension("open_inference", _attach)
