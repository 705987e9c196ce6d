"""Which variant `auto` is to serve on a provider: of those that lose no more than the goal allows, the fastest or the smallest.

What the measured rounds show to be slower than fp32 is never chosen, and "faster" is only what they show to be faster. fp32 is the
answer where nothing else is better. Every variant gets its verdict in words.
"""

from collections.abc import Mapping, Sequence

from slipway.artifacts.bundle import Choice, VariantFigures
from slipway.config.sections import GoalParams
from slipway.kinds.registry import Task
from slipway.reports.console import size
from slipway.reports.pages.leaderboard_page import loss_text, times_text

MOST_BATCH_DEPENDENCE = 1e-5  # of an answer on the CPU; float32 rounding alone stays below 1e-6
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary


def choose(
    figures: Mapping[str, VariantFigures],
    meant_for: Mapping[str, bool],
    goal: GoalParams,
    task: Task,
    provider: str,
    hardware: dict[str, str],
) -> Choice:
    """The choice, and the verdict on each variant filled into its figures. fp32 must be among them."""
    against = {
        variant: why_not(found, goal, task, provider, is_meant_for=meant_for[variant])
        for variant, found in figures.items()
        if variant != "fp32"
    }
    fitting = ["fp32", *(variant for variant, reason in against.items() if reason is None)]
    if goal.prefer == "fastest":
        chosen = max(
            fitting,
            key=lambda variant: figures[variant].throughput.value if variant != "fp32" else 1.0,
        )
    else:
        chosen = min(fitting, key=lambda variant: figures[variant].bytes)
    verdicts = {
        variant: reason or _behind(figures[variant], figures[chosen], chosen, goal)
        for variant, reason in against.items()
    }
    verdicts |= {"fp32": "the reference", chosen: "chosen"}
    judged = {
        variant: found.model_copy(update={"verdict": verdicts[variant]})
        for variant, found in figures.items()
    }
    rivals = [variant for variant in judged if variant != "fp32" and meant_for[variant]]
    reason = _reason(chosen, judged, rivals, goal, task)
    return Choice(
        variant=chosen,
        max_metric_loss=goal.max_metric_loss,
        prefer=goal.prefer,
        reason=reason,
        figures=judged,
        hardware=hardware,
    )


def why_not(
    found: VariantFigures, goal: GoalParams, task: Task, provider: str, *, is_meant_for: bool
) -> str | None:
    """Why a variant cannot be chosen on a provider, or None if it may be."""
    if not is_meant_for:
        return f"not meant for {provider}"
    if provider == "cpu" and not found.batch_dependence <= MOST_BATCH_DEPENDENCE:
        return f"an answer depends on the rows beside it, by up to {found.batch_dependence:.2g}"
    if not found.metric_loss.value <= goal.max_metric_loss + _ROUNDING:
        return f"over the budget: loses {loss_text(found.metric_loss.value, task)}, at most {loss_text(goal.max_metric_loss, task)}"
    if found.throughput.high < 1:
        return f"slower than fp32: {times_text(found.throughput)} its rows a second"
    if found.latency.high < 1:
        return f"slower than fp32 for one row: {times_text(found.latency)} as fast"
    if goal.prefer == "fastest" and not found.throughput.low > 1:
        return f"not shown to be faster than fp32: {times_text(found.throughput)} its rows a second"
    return None


def _behind(found: VariantFigures, best: VariantFigures, chosen: str, goal: GoalParams) -> str:
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
    asked = (
        f"Asked for: lose at most {loss_text(goal.max_metric_loss, task)}, then the {goal.prefer}."
    )
    if chosen == "fp32":
        others = "; ".join(f"{variant}: {figures[variant].verdict}" for variant in rivals)
        return f"{asked} Nothing else is better" + (f". {others}." if others else ".")
    found = figures[chosen]
    return (
        f"{asked} {chosen} loses {loss_text(found.metric_loss.value, task)}, answers {times_text(found.throughput)} the rows of fp32 in a "
        f"second and one row {times_text(found.latency)} as fast, in {size(found.bytes)} instead of {size(figures['fp32'].bytes)}."
    )
