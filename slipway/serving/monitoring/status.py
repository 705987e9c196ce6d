"""Describes drift and feedback for `/status` and the gauges.

Windows are those of `Store.history` that have a verdict, newest first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway.serving.monitoring.metrics import GaugeValues
from slipway.serving.monitoring.models import MonitoredModel
from slipway.serving.monitoring.proposals import proposal_path
from slipway.serving.monitoring.quality import NUM_JUDGED
from slipway.serving.monitoring.settings import MonitoringSettings

Windows = Sequence[dict[str, Any]]


def describe_drift(
    model: MonitoredModel,
    windows: Windows,
    opened: tuple[float, int] | None,
    settings: MonitoringSettings,
    state: Path,
) -> dict[str, Any]:
    """Return the open window, the last verdict and the earlier windows as JSON."""
    return {
        "state": _state(model),
        "model_version": model.version,
        "open_window": {"since": opened[0], "rows": opened[1]} if opened else None,
        "window_rows": settings.window_rows,
        "window_minutes": settings.window_minutes,
        **_last_window(windows),
        "windows": [_brief(window) for window in windows],
        "proposal": _last_proposal(model, windows, state),
    }


def describe_feedback(
    model: MonitoredModel, windows: Windows, quality: dict[str, Any] | None
) -> dict[str, Any]:
    """Return as JSON the quality measured by feedback, and its estimate without labels."""
    return {
        "state": "measured" if quality else "no labels yet",
        "model_version": model.version,
        "joined": _num_joined(quality),
        "of_the_last": NUM_JUDGED,
        "quality": quality or {},
        "estimate": windows[0]["judgement"]["estimate"] if windows else None,
    }


def gauge_values(
    windows: Windows, quality: dict[str, Any] | None, num_waiting: int = 0
) -> GaugeValues:
    """Return the values of the gauges for drift and quality."""
    bounds = {
        name: (metric["value"], metric["low"], metric["high"])
        for name, metric in (quality or {}).items()
    }
    num_joined = _num_joined(quality)
    if not windows:
        return GaugeValues(quality=bounds, num_joined=num_joined, num_waiting=num_waiting)
    judgement = windows[0]["judgement"]
    estimate = judgement["estimate"]
    is_valid = bool(estimate["valid"])
    return GaugeValues(
        alarm=bool(windows[0]["drifted"]),
        features=[
            (feature["name"], abs(feature["value"]), feature["threshold"])
            for feature in judgement["features"]
        ],
        estimate=(estimate["value"], estimate["low"], estimate["high"]) if is_valid else None,
        is_estimate_valid=is_valid,
        quality=bounds,
        num_joined=num_joined,
        num_waiting=num_waiting,
    )


def _state(model: MonitoredModel) -> str:
    if model.lacks_reference:
        return "the drift reference cannot be read; it is tried again every minute"
    return "monitoring" if model.reference is not None else "the bundle has no reference for drift"


def _last_window(windows: Windows) -> dict[str, Any]:
    if not windows:
        return {"verdict": None, "features": [], "estimate": None}
    window = windows[0]
    return {
        "verdict": "drifted" if window["drifted"] else "clean",
        "opened": window["opened"],
        "closed": window["closed"],
        "rows": window["rows"],
        "features": [
            feature | {"test": feature["statistic"], "statistic": abs(feature["value"])}
            for feature in window["judgement"]["features"]
        ],
        "estimate": window["judgement"]["estimate"],
    }


def _brief(window: dict[str, Any]) -> dict[str, Any]:
    judgement = window["judgement"]
    strongest = None
    if judgement["features"]:
        feature = judgement["features"][0]
        strength = abs(feature["value"]) / feature["threshold"]
        strongest = {"name": feature["name"], "strength": strength}
    return {
        "opened": window["opened"],
        "closed": window["closed"],
        "rows": window["rows"],
        "drifted": bool(window["drifted"]),
        "strongest": strongest,
        "estimate": judgement["estimate"],
    }


def _last_proposal(model: MonitoredModel, windows: Windows, state: Path) -> dict[str, Any] | None:
    """Return the newest proposal that still exists, written by any worker; None without one."""
    for window in windows:
        path = proposal_path(state, window["closed"], model.key)
        if window["has_proposal"] and path.exists():
            return {"path": str(path), "closed": window["closed"]}
    return None


def _num_joined(quality: dict[str, Any] | None) -> int:
    return next((metric["rows"] for metric in (quality or {}).values()), 0)
