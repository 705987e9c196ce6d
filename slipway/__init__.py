"""Slipway: certified, monitored inference services from images, a table or texts.

`load` and the like come from slipway/inference on first use. No module lives here directly.
"""

import importlib
import os
import sys

# Of other systems we know what to do there. A pip on them installs the package all the same.
_ELSEWHERE = {
    "darwin": ("macOS", "Run it in a container, such as `docker run -it python:3.12 bash`."),
    "win32": ("Windows", "Run it in WSL 2 or in a container."),
}
if sys.platform != "linux":
    _name, _way = _ELSEWHERE.get(sys.platform, (sys.platform, "Run it in a container."))
    _text = (
        f"Slipway runs on Linux, and this is {_name}. Expected Linux on x86-64 or aarch64. {_way}"
    )
    if os.path.basename(sys.argv[0]).startswith("slipway"):  # the command: no traceback
        sys.exit(f"error: {_text}")
    raise ImportError(_text)

_PUBLIC = {
    "load": "inference.local",
    "LoadedModel": "inference.local",
    "Client": "inference.client",
    "ServiceError": "inference.client",
    "predict_files": "inference.files",
    "PredictedFile": "inference.files",
    **dict.fromkeys(
        (
            *("ClassPrediction", "LabelsPrediction", "ValuePrediction"),
            *("Prediction", "Predictions", "Explanation"),
        ),
        "inference.predictions",
    ),
    **dict.fromkeys(
        ("SlipwayError", "BundleError", "DataError", "UnavailableError"), "system.errors"
    ),
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
