"""Whether a candidate may take the place of the model that is served: what callers send and get, and how good it is by its own metrics.

Callers of the stable model must go on as they are: an image contract is the same, and of a table every column, category and bound that was
taken is still taken, what was ignored is still ignored, and nothing new is required.
How columns are standardised is the model's own affair.
"""

from serving.rollout.state import Allowed, RolloutError
from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import Column, ColumnContract
from slipway.kinds.registry import is_classification


def require_successor(candidate: Bundle, stable: Bundle, allowed: Allowed) -> None:
    """RolloutError with every reason why `candidate` may not take the place of `stable`."""
    if candidate.input.kind != stable.input.kind:
        raise RolloutError(
            f"the candidate takes {candidate.input.kind}, the stable model {stable.input.kind}: no running service changes that. "
            "Point SLIPWAY_BUNDLE at it, and start the service again."
        )
    problems = (
        []
        if allowed.other_contract
        else [*_input_problems(candidate, stable), *_output_problems(candidate, stable)]
    )
    advice = "; --allow-other-contract if callers know" if problems else ""
    worse = _metric_problem(candidate, stable, allowed.metric_loss)
    if problems or worse:
        raise RolloutError(
            "; ".join(problems) + advice + ("; " if problems and worse else "") + worse
        )


def explained_disagreement(candidate: Bundle, stable: Bundle) -> float:
    """Share of answers in which two models that are as good as their metrics can differ: where both are right they are equal.

    For values, whose metrics say nothing of that, a tenth. At most one half, or nothing could ever be found.
    """
    metrics = [bundle.metrics.get("accuracy") for bundle in (candidate, stable)]
    if not is_classification(stable.task) or None in metrics:
        return 0.1
    errors = sum(
        1 - metric.low for metric in metrics if metric
    )  # the lower ends of their intervals
    return min(max(errors, 0.01), 0.5)


def _input_problems(candidate: Bundle, stable: Bundle) -> list[str]:
    if not isinstance(candidate.input, ColumnContract) or not isinstance(
        stable.input, ColumnContract
    ):
        fields = [
            name
            for name, value in dict(stable.input).items()
            if getattr(candidate.input, name) != value
        ]
        return [
            f"its input has another {name}: {getattr(candidate.input, name)!r}, expected {getattr(stable.input, name)!r}"
            for name in fields
        ]
    new, old = (
        {column.name: column for column in contract.columns}
        for contract in (candidate.input, stable.input)
    )
    problems = [
        f"it has no column {name!r}" for name in old if name not in candidate.input.accepted
    ]
    ignored = [name for name in stable.input.ignored if name not in candidate.input.ignored]
    problems += [
        f"it {'reads' if name in new else 'refuses'} the column {name!r}, which is ignored so far"
        for name in ignored
    ]
    problems += [
        f"it requires a new column {name!r}"
        for name in new
        if name not in old and _is_required(new[name])
    ]
    return problems + [
        problem for name in old if name in new for problem in _column_problems(new[name], old[name])
    ]


def _column_problems(new: Column, old: Column) -> list[str]:
    name = f"column {old.name!r}"
    if new.kind != old.kind:
        return [f"{name} is a {new.kind}, expected a {old.kind}"]
    problems = []
    if _is_required(new) and not _is_required(old):
        problems.append(f"{name} became required")
    missing = [category for category in old.categories if category not in new.categories]
    if missing and not new.takes_missing:
        problems.append(f"{name} does not take {len(missing)} of the categories, as {missing[0]!r}")
    if (new.min is not None and (old.min is None or old.min < new.min)) or (
        new.max is not None and (old.max is None or old.max > new.max)
    ):
        problems.append(f"{name} takes {new.min} to {new.max}, expected {old.min} to {old.max}")
    return problems


def _is_required(column: Column) -> bool:
    return column.required or not column.takes_missing


def _output_problems(candidate: Bundle, stable: Bundle) -> list[str]:
    if candidate.task != stable.task:
        return [f"its task is {candidate.task}, expected {stable.task}"]
    if candidate.output.labels == stable.output.labels:
        return []
    gone = [label for label in stable.output.labels if label not in candidate.output.labels]
    new = [label for label in candidate.output.labels if label not in stable.output.labels]
    what = [f"without {', '.join(map(repr, gone[:5]))}"] * bool(gone) + [
        f"with {', '.join(map(repr, new[:5]))}"
    ] * bool(new)
    return [f"it has other labels: {' and '.join(what) or 'another order'}"]


def _metric_problem(candidate: Bundle, stable: Bundle, allowance: float | None) -> str:
    name = "accuracy" if is_classification(stable.task) else "rmse"
    before, after = stable.metrics.get(name), candidate.metrics.get(name)
    if allowance is None or before is None:
        return ""
    if after is None:
        return f"its bundle has no {name}, the stable model's has; --allow-metric-loss any compares nothing"
    is_accuracy = name == "accuracy"
    loss = (
        before.value - after.value
        if is_accuracy
        else (after.value / before.value - 1 if before.value else float(after.value > 0))
    )
    if loss <= allowance + 1e-12:  # of two decimals that are no binary numbers
        return ""
    what = "points" if is_accuracy else "of growth"
    figures = f"its {name} is {after.value:.4g}, the stable model's {before.value:.4g}"
    return (
        f"{figures}: a loss of {loss:.4g}, allowed are {allowance:g} {what} (--allow-metric-loss)"
    )
