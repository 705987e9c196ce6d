"""Adds the request log to the service."""

from prometheus_client import Counter

from slipway.serving.extension import Extension, Hooks
from slipway.serving.request_log.logger import RequestLogSettings, open_request_logger
from slipway.serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    settings = worker.settings.section(RequestLogSettings)
    requests = Counter(
        "slipway_logged_requests_total",
        "Sampled requests by whether they were logged.",
        ["outcome"],
        registry=worker.metrics.registry,
    )
    counters = {outcome: requests.labels(outcome) for outcome in ("logged", "dropped", "failed")}
    worker.request_log = settings.request_log_directory

    def start() -> None:
        logger = open_request_logger(
            settings,
            worker.settings.workers,
            lambda outcome, num_requests: counters[outcome].inc(num_requests),
        )
        if logger:
            worker.observers.add(logger)

    return Hooks(start=start)


EXTENSION = Extension("request_log", _attach, RequestLogSettings)
