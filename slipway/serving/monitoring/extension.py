"""Hooks drift detection and feedback into the service."""

import asyncio

from slipway.serving.extension import Extension, Hooks
from slipway.serving.monitoring.endpoint import feedback_routes
from slipway.serving.monitoring.feedback import FeedbackReceiver
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.monitoring.settings import MonitoringSettings
from slipway.serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    settings, metrics = worker.settings, MonitoringMetrics(worker.metrics)
    if not settings.section(MonitoringSettings).monitoring or settings.accept_draft:
        off = dict.fromkeys(("drift", "feedback"), lambda: None)
        return Hooks(routes=feedback_routes(worker, None), status=off)
    report_wrong = worker.report_wrong_answer
    monitor = TrafficMonitor(settings, metrics, lambda: worker.model, report_wrong)
    feedback = FeedbackReceiver(settings, metrics, monitor.queue.recent_items, report_wrong)

    def start() -> None:
        monitor.start(worker.request_log)
        worker.observers.add(monitor)

    async def close() -> None:
        await asyncio.to_thread(feedback.close)

    return Hooks(
        routes=feedback_routes(worker, feedback),
        status={"drift": monitor.drift_status, "feedback": monitor.feedback_status},
        start=start,
        close=close,
    )


EXTENSION = Extension("monitoring", _attach, MonitoringSettings)
