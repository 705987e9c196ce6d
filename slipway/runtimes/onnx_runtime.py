"""Imports onnxruntime with its telemetry off, which is on by default and read at import."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slipway.system.environment import switch_off_telemetry
from slipway.system.errors import UnavailableError


def import_onnxruntime() -> Any:
    """Import `onnxruntime`. Also call this before importing one of its submodules."""
    refuse_two_runtimes()
    switch_off_telemetry()
    import onnxruntime

    return onnxruntime


@cache
def refuse_two_runtimes() -> None:
    """Raise UnavailableError if two packages installed onnxruntime and overwrote each other."""
    found = [name for name in ("onnxruntime", "onnxruntime-gpu") if version_of(name)]
    if len(found) == 2:
        raise UnavailableError(
            f"{' and '.join(found)} are both installed, and each has overwritten files of the "
            "other. Expected one of them. Uninstall both, then install slipway-ml[serve-cpu] or, "
            "for CUDA, slipway-ml[serve]."
        )


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
