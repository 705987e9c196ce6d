"""Drift detection and feedback: observes answered requests, judges them in windows, and joins labels that callers send."""

import asyncio

from serving.extension import Extension, Hooks
from serving.monitoring.endpoint import feedback_routes
from serving.monitoring.feedback import Feedback
from serving.monitoring.metrics import WatchingMetrics
from serving.monitoring.settings import MonitoringSettings
from serving.monitoring.watcher import Watcher
from serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    settings, metrics = worker.settings, WatchingMetrics(worker.metrics)
    if not settings.section(MonitoringSettings).watch or settings.accept_draft:
        off = dict.fromkeys(("drift", "feedback"), lambda: None)
        return Hooks(routes=feedback_routes(worker, None), status=off)
    feedback = Feedback(settings, metrics, worker.report_wrong_answer)
    watcher = Watcher(settings, metrics, lambda: worker.model, worker.report_wrong_answer)

    def start() -> None:
        watcher.start(worker.request_log)
        worker.observers.add(watcher)

    async def close() -> None:
        await asyncio.to_thread(feedback.close)

    return Hooks(
        routes=feedback_routes(worker, feedback),
        status={"drift": watcher.drift_status, "feedback": watcher.feedback_status},
        start=start,
        close=close,
    )


EXTENSION = Extension("monitoring", _attach, MonitoringSettings)
