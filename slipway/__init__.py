"""Slipway: certified, monitored inference services from images or a table.

`load` and the like come from slipway/inference on first use. No module lives here directly.
"""

import importlib

_PUBLIC = {
    "load": "local",
    "LoadedModel": "local",
    "Client": "client",
    "predict_files": "files",
    "ClassPrediction": "predictions",
    "ValuePrediction": "predictions",
    "Explanation": "predictions",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.inference.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
