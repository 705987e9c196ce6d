"""The triggers of a new training: confirmed drift, missed quality objective, enough new labels.

**Drift** is confirmed if the same feature drifted in two consecutive windows. No row is in both
windows, so the second one is independent evidence. Without drift a window alarms with probability
1 / (30 W), where W is the number of windows a day; a false confirmation is then expected at most
once in 30 W times 30 days.

After a cycle that showed no gain, the same drift does not count again: the traffic must have moved
further, or have twice as many labels, so that a smaller gain would show.

**Quality** and **labels** leave out the labels of suspicious keys (slipway/loop/label_keys.py).
**Quality** also leaves out rows that the label queue chose, because they are harder than the usual
traffic.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from slipway.artifacts.bundle import Bundle, Metric
from slipway.config.loop import LoopParams
from slipway.config.sections import Gate
from slipway.drift.reference import Reference
from slipway.drift.verdict import Budget, judge
from slipway.drift.window import Window
from slipway.loop.journal import Cycle
from slipway.serving.monitoring.quality import MIN_COMPARED, NUM_JUDGED, measure_joined
from slipway.traffic.monitoring_records import JoinedLabel, JudgedWindow

_DAY_S = 86400.0


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


def settled_span(
    last: Cycle | None, version: str, num_labels: Callable[[float, float | None], int]
) -> tuple[float, float] | None:
    """Return (begin, end) of the traffic on which the last cycle showed no gain.

    None if it ended otherwise, began without drift or was for another model than `version`, or if
    twice as many labels are known now.

    Args:
        num_labels: returns the number of usable labels of answers since the first argument that had
            arrived by the second; None: by now.
    """
    if last is None or last.is_open or last.detail("ended")["outcome"] != "no_gain":
        return None
    triggered = last.detail("triggered")
    begin, end = triggered["since"], last.time_of("collected")
    if not begin or triggered["served"] != version:
        return None
    has_doubled = num_labels(begin, None) >= 2 * max(1, num_labels(begin, end))
    return None if has_doubled else (begin, end)


def moved_further(
    windows: Sequence[JudgedWindow],
    reference_of: Callable[[str], Reference],
    span: tuple[float, float],
) -> list[JudgedWindow]:
    """Judge the windows after a span of traffic again, in comparison with its newer half.

    The result has only these windows. Their features drifted from both the model's reference and
    the span. Without a window in the newer half, the first judgement stands.

    Args:
        windows: of one model, the oldest first.
        reference_of: returns the drift reference of a `JudgedWindow.model`.
    """
    begin, end = span
    halves: dict[str, Window] = {}
    found = []
    for window in windows:
        if window.opened >= (begin + end) / 2 and window.closed <= end:
            reference = reference_of(window.model)
            half = halves.setdefault(window.model, Window(reference))
            half.merge(Window.from_bytes(reference, window.content))
        elif window.opened >= end:
            if window.drifted_features and (base := halves.get(window.model)):
                own = Window.from_bytes(base.reference, window.content)
                budget = Budget(windows_per_day=_DAY_S / window.seconds)
                verdict = judge(base.as_reference(), own, budget.level)
                again = {feature.name for feature in verdict.features if feature.drifted}
                window = replace(window, drifted_features=window.drifted_features & again)
            found.append(window)
    return found


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
