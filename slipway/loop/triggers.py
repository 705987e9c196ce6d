"""The triggers of a new training: confirmed drift, missed quality objective, enough new labels.

**Drift** is confirmed if the same feature drifted in two consecutive windows. No row is in both
windows, so the second one is independent evidence. Without drift a window alarms with probability
1 / (30 W), where W is the number of windows a day; a false confirmation is then expected at most
once in 30 W times 30 days.

**Quality** and **labels** leave out the labels of suspicious keys (slipway/loop/label_keys.py).
**Quality** also leaves out rows that the label queue chose, because they are harder than the usual
traffic.
"""

from collections.abc import Sequence
from itertools import pairwise

from slipway.artifacts.bundle import Bundle, Metric
from slipway.config.loop import LoopParams
from slipway.config.sections import Gate
from slipway.serving.monitoring.quality import MIN_COMPARED, NUM_JUDGED, measure_joined
from slipway.traffic.monitoring_records import JoinedLabel, JudgedWindow


def confirmed_drift(windows: Sequence[JudgedWindow], after: float) -> tuple[str, float] | None:
    """Find the first drift that the next window confirms.

    Args:
        windows: drift windows of one model, the oldest first; each variant is judged separately.
        after: windows that began earlier do not count; seconds since 1970.

    Returns:
        The reason in words and the begin of the drift (seconds since 1970), or None.
    """
    by_variant: dict[str, list[JudgedWindow]] = {}
    for window in windows:
        if window.opened >= after:
            by_variant.setdefault(window.model, []).append(window)
    for own in by_variant.values():
        for first, second in pairwise(own):
            if both := sorted(first.drifted_features & second.drifted_features):
                return f"drift of {', '.join(both[:3])} in two windows in a row", first.opened
    return None


def missed_objective(
    manifest: Bundle, labels: Sequence[JoinedLabel], objective: dict[str, Gate]
) -> str:
    """Describe the first metric whose whole confidence interval misses its objective.

    `labels` are the labels of this model's answers, the latest first. Returns "" if every objective
    is met or there are too few labels.
    """
    own = [label for label in labels if not label.is_chosen][:NUM_JUDGED]
    joined = [(label.truth, label.predicted) for label in own]
    if len(joined) < MIN_COMPARED:
        return ""
    measured = measure_joined(manifest, joined)
    for name, gate in objective.items():
        if name in measured and _is_outside(measured[name], gate):
            found = measured[name]
            return (
                f"{name} by feedback is {found.value:.4g} ({found.low:.4g} to {found.high:.4g}, "
                f"{found.rows} rows), its objective {_bounds(gate)}"
            )
    return ""


def enough_labels(num_new: int, params: LoopParams) -> str:
    """Return "N new labels" if they are enough to trigger a training; "" otherwise."""
    wanted = params.triggers.new_labels
    return f"{num_new} new labels" if wanted is not None and num_new >= wanted else ""


def _is_outside(metric: Metric, gate: Gate) -> bool:
    is_low = gate.min is not None and metric.high < gate.min
    return is_low or (gate.max is not None and metric.low > gate.max)


def _bounds(gate: Gate) -> str:
    bounds = (("at least", gate.min), ("at most", gate.max))
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
