"""The one door to the package onnxruntime: its telemetry is on by default and is read at import."""

from typing import Any

from slipway.system.telemetry import switch_off_telemetry


def import_onnxruntime() -> Any:
    """The module `onnxruntime`. Call it before importing one of its submodules, too."""
    switch_off_telemetry()
    import onnxruntime

    return onnxruntime
