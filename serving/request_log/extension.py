"""Hooks the request log into the service."""

from prometheus_client import Counter

from serving.extension import Extension, Hooks
from serving.request_log.logger import OUTCOMES, RequestLogSettings, open_keeper
from serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    settings = worker.settings.section(RequestLogSettings)
    kept = Counter(
        "slipway_kept_requests",
        "Sampled requests, by whether they were kept.",
        ["outcome"],
        registry=worker.metrics.registry,
    )
    counters = {outcome: kept.labels(outcome) for outcome in OUTCOMES}
    worker.request_log = settings.keep_directory

    def start() -> None:
        keeper = open_keeper(
            settings,
            worker.settings.workers,
            lambda outcome, num_requests: counters[outcome].inc(num_requests),
        )
        if keeper:
            worker.observers.add(keeper)

    return Hooks(start=start)


EXTENSION = Extension("request_log", _attach, RequestLogSettings)
