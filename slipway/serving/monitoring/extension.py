"""Adds drift detection and `POST /feedback` to the service."""

import asyncio
import json
import shlex
from functools import partial

from slipway.artifacts.bundle import Bundle
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Refusal, Response, json_response
from slipway.serving.http.routes import Operation, Request, Route, Routes
from slipway.serving.monitoring.feedback import (
    ACCEPTED_FEEDBACK,
    MAX_LABELS,
    SANE_ID,
    FeedbackReceiver,
)
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.monitoring.settings import MonitoringSettings
from slipway.serving.requests.bodies import BODY_ERRORS, read_json
from slipway.serving.schemas import ANYTHING, only_list
from slipway.serving.worker import ModelWorker

_ERRORS = (
    *BODY_ERRORS, "malformed_json", "too_many_rows", "not_a_row", "no_rows", "missing_field",
    "unknown_field", "type_violation", "out_of_range", "unknown_label", "feedback_full",
    "not_ready", "feedback_unavailable",
)  # fmt: skip


def _attach(worker: ModelWorker) -> Hooks:
    settings, metrics = worker.settings, MonitoringMetrics(worker.metrics)
    if not settings.section(MonitoringSettings).monitoring or settings.accept_draft:
        off = dict.fromkeys(("drift", "feedback"), lambda: None)
        return Hooks(routes=feedback_routes(worker, None), status=off)
    report_wrong = worker.report_wrong_answer
    monitor = TrafficMonitor(settings, metrics, lambda: worker.model, report_wrong)
    feedback = FeedbackReceiver(settings, metrics, monitor.queue.recent_items, report_wrong)

    limits = settings.section(MonitoringSettings).limits
    forwarder = None
    if limits.database_url is not None:
        from slipway.serving.monitoring.outbox import Forwarder  # only then are its modules loaded

        forwarder = Forwarder(settings, limits, metrics, lambda: worker.model, report_wrong)

    def start() -> None:
        monitor.start(worker.request_log)
        if forwarder:
            forwarder.rounds.start()
        worker.observers.add(monitor)

    async def close() -> None:
        await asyncio.to_thread(feedback.close)
        if forwarder:
            await asyncio.to_thread(forwarder.rounds.close)

    return Hooks(
        routes=feedback_routes(worker, feedback),
        status={"drift": monitor.drift_status, "feedback": monitor.feedback_status},
        start=start,
        close=close,
    )


def feedback_routes(worker: ModelWorker, receiver: FeedbackReceiver | None) -> Routes:
    """Return the route `/feedback`; `receiver` is None if monitoring is off."""

    async def feedback(request: Request) -> Response:
        manifest = worker.require_model().bundle.manifest
        settings = worker.settings
        if receiver is None:
            raise Refusal(
                "feedback_unavailable",
                "this service accepts no feedback: SLIPWAY_MONITORING is false",
            )
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                body = await read_json(request, settings.max_body_bytes, ACCEPTED_FEEDBACK)
                code, message = "deadline_exceeded", "the feedback was not stored within"
                status, answer = await receiver.receive(body, manifest, request.caller)
        except TimeoutError:
            raise Refusal(
                code, f"{message} {settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            ) from None
        return json_response(answer | {"request_id": request.id}, status)

    most = max(worker.settings.max_rows, worker.settings.max_items)
    describe = partial(_describe, most)
    return {"/feedback": Route(("POST",), feedback, "caller", describe)}


def _describe(max_items: int, bundle: Bundle | None) -> Operation:
    labels = bundle.output.labels if bundle else ["7"]
    truth = {"type": "string", "enum": labels} if labels else {"type": "number"}
    label = {
        "type": "object",
        "required": ["request_id", "ground_truth"],
        "properties": {
            "request_id": {"type": "string", "pattern": f"^{SANE_ID}$"},
            "item": {"type": "integer", "minimum": 0, "maximum": max_items - 1, "nullable": True},
            "ground_truth": truth if bundle else {},
        },
        "additionalProperties": False,
    }
    example = json.dumps(
        {"request_id": "9b2f6c1d8e7a4053", "ground_truth": labels[0] if labels else 3.25},
        ensure_ascii=False,
    )
    return Operation(
        "True label of one prediction, or of several.",
        {"application/json": {"oneOf": [label, only_list("feedback", label, MAX_LABELS)]}},
        {"application/json": ANYTHING},
        _ERRORS,
        f"-H 'content-type: application/json' -d {shlex.quote(example)}",
        # 202: the prediction is not known yet.
        (200, 202),
    )


EXTENSION = Extension("monitoring", _attach, MonitoringSettings)
