"""Chooses the variant that `auto` serves on a provider: the fastest or smallest within the budget.

A variant counts as faster than fp32 only if the interval of its speed-up is above 1, and it is
never chosen if the interval is below 1. fp32 is chosen if no variant is better. Every variant gets
a verdict in words.
"""

from collections.abc import Mapping, Sequence

from slipway.artifacts.bundle import Choice, MeasuredFigures, VariantFigures
from slipway.config.sections import GoalParams
from slipway.kinds.registry import Task
from slipway.reports.console import size
from slipway.reports.pages.leaderboard_page import loss_text, times_text

MAX_BATCH_DEPENDENCE = 1e-5  # for an answer on the CPU; float32 rounding alone stays below 1e-6
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary


def choose(
    figures: Mapping[str, MeasuredFigures],
    meant_for: Mapping[str, bool],
    goal: GoalParams,
    task: Task,
    provider: str,
    hardware: dict[str, str],
) -> Choice:
    """Choose one of the variants in `figures`, which include fp32, and give each a verdict."""
    reasons = {
        variant: why_not(found, goal, task, provider, is_meant_for=meant_for[variant])
        for variant, found in figures.items()
        if variant != "fp32"
    }
    fitting = ["fp32", *(variant for variant, reason in reasons.items() if reason is None)]
    if goal.prefer == "fastest":
        speeds = {variant: figures[variant].throughput.value for variant in fitting}
        speeds["fp32"] = 1.0
        chosen = max(fitting, key=lambda variant: speeds[variant])
    else:
        chosen = min(fitting, key=lambda variant: figures[variant].bytes)
    verdicts = {
        variant: reason or _why_behind(figures[variant], figures[chosen], chosen, goal)
        for variant, reason in reasons.items()
    }
    verdicts |= {"fp32": "the reference", chosen: "chosen"}
    judged = {
        variant: VariantFigures(**dict(found), verdict=verdicts[variant])
        for variant, found in figures.items()
    }
    rivals = [variant for variant in judged if variant != "fp32" and meant_for[variant]]
    return Choice(
        variant=chosen,
        max_metric_loss=goal.max_metric_loss,
        prefer=goal.prefer,
        reason=_reason(chosen, judged, rivals, goal, task),
        figures=judged,
        hardware=hardware,
    )


def why_not(
    found: MeasuredFigures, goal: GoalParams, task: Task, provider: str, *, is_meant_for: bool
) -> str | None:
    """Return the reason why a variant cannot be chosen for a provider; None if it can."""
    if not is_meant_for:
        return f"not meant for {provider}"
    if provider == "cpu" and not found.batch_dependence <= MAX_BATCH_DEPENDENCE:
        changed = f"{found.batch_dependence:.2g}"
        return f"an answer depends on the other rows of its batch, by up to {changed}"
    if not found.metric_loss.value <= goal.max_metric_loss + _ROUNDING:
        lost = loss_text(found.metric_loss.value, task)
        return f"over the budget: loses {lost}, at most {loss_text(goal.max_metric_loss, task)}"
    if found.throughput.high < 1:
        return f"slower than fp32: {times_text(found.throughput)} its rows per second"
    if found.latency.high < 1:
        return f"slower than fp32 for one row: {times_text(found.latency)} as fast"
    if goal.prefer == "fastest" and not found.throughput.low > 1:
        ratio = times_text(found.throughput)
        return f"not shown to be faster than fp32: {ratio} its rows per second"
    return None


def _why_behind(
    found: MeasuredFigures, best: MeasuredFigures, chosen: str, goal: GoalParams
) -> str:
    if goal.prefer == "smallest":
        return f"not smaller than {chosen}: {size(found.bytes)}, {size(best.bytes)}"
    return f"fits, but {chosen} is faster"


def _reason(
    chosen: str,
    figures: Mapping[str, VariantFigures],
    rivals: Sequence[str],
    goal: GoalParams,
    task: Task,
) -> str:
    budget = loss_text(goal.max_metric_loss, task)
    wanted = f"Goal: lose at most {budget}, then the {goal.prefer}."
    if chosen == "fp32":
        others = "; ".join(f"{variant}: {figures[variant].verdict}" for variant in rivals)
        return f"{wanted} Nothing else is better" + (f". {others}." if others else ".")
    found = figures[chosen]
    return (
        f"{wanted} {chosen} {_change_text(found.metric_loss.value, task)}, "
        f"answers {times_text(found.throughput)} the rows of fp32 per second "
        f"and one row {times_text(found.latency)} as fast, "
        f"in {size(found.bytes)} instead of {size(figures['fp32'].bytes)}."
    )


def _change_text(loss: float, task: Task) -> str:
    """Format a loss, or a gain if it is negative: "loses 0.20 points", "gains 1.49 points"."""
    lost = loss_text(loss, task)
    return f"gains {lost.removeprefix('-')}" if lost.startswith("-") else f"loses {lost}"
