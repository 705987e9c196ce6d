"""Compares a candidate with the stable model: its contract for callers, and its metrics.

Callers of the stable model must be able to continue unchanged. An image contract has to be the
same. A table contract has to accept every column, category and range that the stable one accepts,
has to ignore the same columns, and may not require new ones. Standardization may differ. A text
contract has to read and to ignore the same columns, to accept texts as long, and to mask as much;
the length that the network sees, and its tokenizer, may differ.
"""

from collections.abc import Collection

from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.texts import TextContract
from slipway.kinds.registry import kind_of
from slipway.serving.rollout.state import Allowed, RolloutError


def require_successor(candidate: Bundle, stable: Bundle, allowed: Allowed) -> None:
    """Raise RolloutError unless `candidate` may replace `stable`; the message has every reason."""
    if candidate.input.kind != stable.input.kind:
        raise RolloutError(
            f"the input of the candidate is {candidate.input.kind}, expected {stable.input.kind} "
            "as for the stable model: a running service cannot change that. "
            "Point SLIPWAY_BUNDLE at it, and start the service again."
        )
    problems = []
    if not allowed.other_contract:
        problems = [*_input_problems(candidate, stable), *_output_problems(candidate, stable)]
    if problems:
        problems[-1] += "; --allow-other-contract if callers know"
    problems += _metric_problems(candidate, stable, allowed.metric_loss)
    if problems:
        raise RolloutError("; ".join(problems))


def explained_disagreement(candidate: Bundle, stable: Bundle) -> float:
    """Return the fraction of differing predictions that both models' error rates can explain.

    Both agree where both are right, so the fraction is the sum of their error rates, at the lower
    ends of the intervals. It is at most one half, because a larger one would hide any difference.
    For values, whose metrics do not bound it, it is a tenth.
    """
    target = kind_of(stable.task).target
    metrics = [bundle.metrics.get(target.headline) for bundle in (candidate, stable)]
    if not target.headline_is_fraction or None in metrics:
        return 0.1
    errors = sum(1 - metric.low for metric in metrics if metric)
    return min(max(errors, 0.01), 0.5)


def _input_problems(candidate: Bundle, stable: Bundle) -> list[str]:
    after, before = candidate.input, stable.input
    if isinstance(after, ColumnContract) and isinstance(before, ColumnContract):
        return _table_problems(after, before)
    if isinstance(after, TextContract) and isinstance(before, TextContract):
        return _text_problems(after, before)
    return [
        f"its input has another {name}: {getattr(after, name)!r}, expected {value!r}"
        for name, value in dict(before).items()
        if getattr(after, name) != value
    ]


def _table_problems(after: ColumnContract, before: ColumnContract) -> list[str]:
    new = {column.name: column for column in after.columns}
    old = {column.name: column for column in before.columns}
    problems = [f"it has no column {name!r}" for name in old if name not in after.accepted]
    problems += _ignored_problems(after.ignored, before.ignored, new)
    for name, column in new.items():
        if name in old:
            continue
        if _is_required(column):
            problems.append(f"it requires a new column {name!r}")
    for name in old:
        if name in new:
            problems += _column_problems(new[name], old[name])
    return problems


def _text_problems(after: TextContract, before: TextContract) -> list[str]:
    problems = [
        f"it does not read the column {name!r}"
        for name in before.columns
        if name not in after.columns
    ]
    problems += _ignored_problems(after.ignored, before.ignored, after.columns)
    most, before_most = after.max_characters, before.max_characters
    if most is not None and (before_most is None or most < before_most):
        problems.append(f"it accepts {most} characters, expected {before_most or 'any number'}")
    shown = [kind for kind in before.masked if kind not in after.masked]
    if shown:
        problems.append(f"it does not mask {', '.join(shown)}, which the stable model masks")
    return problems


def _ignored_problems(
    after: Collection[str], before: Collection[str], read: Collection[str]
) -> list[str]:
    return [
        f"it {'reads' if name in read else 'refuses'} the column {name!r}, which the stable "
        "model ignores"
        for name in before
        if name not in after
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
        problems.append(f"{name} lacks {len(missing)} of the categories, such as {missing[0]!r}")
    is_higher = new.min is not None and (old.min is None or old.min < new.min)
    is_lower = new.max is not None and (old.max is None or old.max > new.max)
    if is_higher or is_lower:
        problems.append(f"{name} accepts {new.min} to {new.max}, expected {old.min} to {old.max}")
    return problems


def _is_required(column: Column) -> bool:
    return column.required or not column.takes_missing


def _output_problems(candidate: Bundle, stable: Bundle) -> list[str]:
    if candidate.task != stable.task:
        return [f"its task is {candidate.task}, expected {stable.task}"]
    if candidate.output.labels == stable.output.labels:
        return []
    after, before = candidate.output.labels, stable.output.labels
    gone = [repr(label) for label in before if label not in after]
    new = [repr(label) for label in after if label not in before]
    differences = []
    if gone:
        differences.append(f"without {', '.join(gone[:5])}")
    if new:
        differences.append(f"with {', '.join(new[:5])}")
    return [f"it has other labels: {' and '.join(differences) or 'another order'}"]


def _metric_problems(candidate: Bundle, stable: Bundle, allowance: float | None) -> list[str]:
    target = kind_of(stable.task).target
    name = target.headline
    before, after = stable.metrics.get(name), candidate.metrics.get(name)
    if allowance is None or before is None:
        return []
    if after is None:
        return [
            f"its bundle has no {name}, the stable model's has; "
            "`--allow-metric-loss any` skips the comparison"
        ]
    if target.headline_is_fraction:
        loss, unit = before.value - after.value, "points"
    else:
        loss = after.value / before.value - 1 if before.value else float(after.value > 0)
        unit = "of growth"
    if loss <= allowance + 1e-12:  # tolerates the rounding of decimals in binary
        return []
    return [
        f"its {name} is {after.value:.4g}, the stable model's {before.value:.4g}: "
        f"a loss of {loss:.4g}, expected at most {allowance:g} {unit} (--allow-metric-loss)"
    ]
