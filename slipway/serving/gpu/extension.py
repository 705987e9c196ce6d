"""Adds GPU metrics to the service if the machine has an NVIDIA GPU."""

from slipway.serving.extension import Extension, Hooks
from slipway.serving.gpu.metrics import open_gpu_metrics
from slipway.serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    gpus = open_gpu_metrics(worker.metrics.registry)
    if gpus is None:
        return Hooks(status={"gpu": lambda: None})
    return Hooks(status={"gpu": gpus.status}, gauges=(gpus,))


EXTENSION = Extension("gpu", _attach)
