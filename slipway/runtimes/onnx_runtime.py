"""Imports onnxruntime with its telemetry off, which is on by default and read at import."""

from typing import Any

from slipway.system.telemetry import switch_off_telemetry


def import_onnxruntime() -> Any:
    """Import `onnxruntime`. Also call this before importing one of its submodules."""
    switch_off_telemetry()
    import onnxruntime

    return onnxruntime
