"""Hooks GPU metrics into the service, if there is a GPU."""

from serving.extension import Extension, Hooks
from serving.gpu.metrics import open_gpu_metrics
from serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    gpus = open_gpu_metrics(worker.metrics.registry)
    if gpus is None:
        return Hooks(status={"gpu": lambda: None})
    return Hooks(status={"gpu": gpus.status}, gauges=(gpus,))


EXTENSION = Extension("gpu", _attach)
