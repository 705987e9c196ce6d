"""Chooses the task and the target, or returns a question to the user if they are unclear."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipway.data.rules.class_names import joined_counts
from slipway.data.sources.image_tables import missing_column
from slipway.data.tables.cells import GOOD, typed_column
from slipway.data.tables.column_rules import is_copy
from slipway.data.tables.hints import missing_names
from slipway.inputs.columns import Kind
from slipway.kinds.inputs import TEXTS, InputKind
from slipway.kinds.registry import kind_of, task_for
from slipway.kinds.targets import CLASS, LABELS, NUMBER, TargetKind
from slipway.project.column_roles import Roles, SampledColumn, find_roles, target_kinds
from slipway.project.relations import find_relations
from slipway.project.summary import DataSummary
from slipway.system.errors import DataError, ParamsError

_MOST_CANDIDATES = 30
_MOST_FACTS = 3  # that a question tells
_TWIN_FRACTION = 0.9  # of the rows, in which a twin has a value


@dataclass(frozen=True)
class Question:
    """A choice that only the user can make."""

    option: str  # such as "--task" or "--target"
    text: str
    candidates: tuple[str, ...]  # possible answers, the likeliest first


@dataclass(frozen=True)
class TaskChoice:
    """The chosen task and target, and the roles of the other columns."""

    task: str
    task_reason: str
    target: SampledColumn | None  # None for class folders
    target_reason: str
    roles: Roles
    label_columns: tuple[SampledColumn, ...] = ()  # one for each label, instead of a single target
    text_columns: tuple[SampledColumn, ...] = ()  # the inputs of a task of texts


def choose(
    summary: DataSummary,
    columns: Sequence[SampledColumn],
    task: str | None,
    target: str | None,
    split_by: str | None = None,
) -> TaskChoice | Question:
    """Choose task and target, or check those that the user named.

    `split_by` is the user's choice for the rows of a panel, see `find_roles`.
    Returns a question if the choice is unclear. Raises ParamsError if the user's choice does not
    fit, DataError if nothing can be predicted.
    """
    if task is not None:
        _check_task(summary, columns, task)
    if summary.form in ("class folders", "text folders"):
        if target is not None:
            raise ParamsError(
                f"--target is {target!r}, but the data is a folder of class folders, whose names "
                "are the classes. Leave --target out."
            )
        return _folders_of_classes(summary, columns, task)
    names = [column.name for column in columns]
    if target is not None and target not in names and "," in target:
        return _several_columns(
            summary, columns, task, [part.strip() for part in target.split(",")]
        )
    if target is not None and target not in names:
        raise ParamsError(
            f"--target: expected one of the columns {', '.join(names)}; "
            f"found {target!r}, {missing_column(target, names)}"
        )
    roles = find_roles(columns, target, split_by)
    _check_split_by(roles, split_by)
    texts = _text_columns(summary, columns, roles, task, target)
    inputs = TEXTS if texts else summary.input
    # Beside texts, a column that no model reads, such as an id, is no other target either.
    unread = [column for column in columns if texts and column.guess.kind == "ignore"]
    explained = {column.name for column in (*roles.special, *texts, *unread)}
    chosen = _target(columns, roles, task, target, explained)
    if isinstance(chosen, Question):
        return chosen
    column, target_reason = chosen
    _require_different_values(column)
    kind = _target_kind(column, inputs, task)
    if isinstance(kind, Question):
        return kind
    shown = _examples(column, joined=kind.has_classes and not kind.several)
    held = kind.plural if column.guess.kind != "date" else "dates, each of which becomes a class"
    reason = f"{column.name!r} holds {held}: {shown}"
    found = task_for(inputs, kind)
    return TaskChoice(found, reason, column, target_reason, roles, text_columns=texts)


def chosen_in(data: Mapping[str, Any], columns: Sequence[SampledColumn]) -> TaskChoice:
    """Return the choice that the section `data` of a project's params.yaml holds."""
    known = {column.name: column for column in columns}
    kind, named = kind_of(data["task"]), data.get("target_column", "label")
    several = named if isinstance(named, list) else []
    group, time, weight, split = (
        known.get(data.get(f"{role}_column", "")) for role in ("group", "time", "weight", "split")
    )
    return TaskChoice(
        kind.name,
        "",
        None if several else known.get(named),
        "",
        Roles((), group, time, weight, split, ()),
        tuple(known[name] for name in several if name in known),
        tuple(known[name] for name in data.get("text_columns", ()) if name in known),
    )


def panel_question(roles: Roles) -> Question | None:
    """Return the question by which column of a panel its rows are split."""
    if roles.panel is None:
        return None
    group, time = roles.panel.group.name, roles.panel.time.name
    other = time if roles.panel.usual.name == group else group
    return Question(
        "--split-by",
        f"{group!r} repeats once per {time!r}. Should the test rows have other values of {group!r}"
        f" ({group}), be later ones ({time}), or any rows (none)?",
        (roles.panel.usual.name, other, "none"),
    )


def _check_split_by(roles: Roles, split_by: str | None) -> None:
    question = panel_question(roles)
    expected = question.candidates if question else ("none",)
    if split_by not in (None, *expected):
        found = "" if question else ", because no column repeats once per year or the like"
        raise ParamsError(
            f"--split-by is {split_by!r}, expected {' or '.join(expected)}{found}. "
            "Leave it out, and set data.group_column or data.time_column in params.yaml."
        )


def _target_kind(
    column: SampledColumn, inputs: InputKind, task: str | None
) -> TargetKind | Question:
    """Return the kind of target that a column holds; a question if it may be several."""
    if column.guess.kind == "date" and not column.may_be_classes:
        raise ParamsError(
            f"--target: the column {column.name!r} holds dates, {_examples(column)}; expected "
            "classes or numbers. Name another column, or add one to the table, such as the month "
            "or the days since a date."
        )
    is_number = column.is_numeric or column.guess.kind == "number"
    if task is not None and not kind_of(task).target.has_classes and not is_number:
        raise ParamsError(
            f"--task is {task!r}, but {column.name!r} holds {_examples(column)}, expected numbers. "
            "Name another column with --target, or leave --task out."
        )
    kinds = target_kinds(column) if task is None else [kind_of(task).target]
    if len(kinds) > 1:
        return Question(
            "--task",
            f"Does {column.name!r} hold {' or '.join(kind.plural for kind in kinds)}? "
            f"It has {len(column.counts)} values: {_examples(column)}"
            + (f"; {_divided(column)}." if column.may_be_labels else "."),
            tuple(task_for(inputs, kind) for kind in kinds),
        )
    return kinds[0]


def _require_different_values(target: SampledColumn) -> None:
    if len(target.counts) < 2:
        (value,) = [*target.counts] or [""]
        fault = f"has one value, {value[:40]!r}, in every row" if target.counts else "is empty"
        expected = "at least two different values" if target.counts else "a value in most rows"
        names = " or ".join(map(repr, missing_names(target.raw)))
        rename = (
            f" If {names}, which counts as missing, is a class, write it otherwise."
            if names
            else ""
        )
        raise ParamsError(
            f"--target: the column {target.name!r} {fault}; expected {expected}. "
            f"Name another column with --target.{rename}"
        )


def _divided(column: SampledColumn) -> str:
    labels = column.label_counts
    shown = ", ".join(name[:20] for name, _ in labels.most_common(4)) + ", ..." * (len(labels) > 4)
    return f"{column.separator!r} divides them into {len(labels)} labels: {shown}"


def _several_columns(
    summary: DataSummary, columns: Sequence[SampledColumn], task: str | None, names: list[str]
) -> TaskChoice:
    """Choose a target of one column per label; ParamsError if one is missing or not true/false."""
    by_name = {column.name: column for column in columns}
    problems = [
        f"{name!r}, {missing_column(name, list(by_name))}" for name in names if name not in by_name
    ]
    chosen = tuple(by_name[name] for name in names if name in by_name)
    problems += [
        f"{column.name!r} holds {_examples(column)}, expected true or false"
        for column in chosen
        if not column.may_be_label
    ]
    roles = find_roles([column for column in columns if column.name not in names], None)
    texts = _text_columns(summary, columns, roles, task, None, names)
    found = task_for(TEXTS if texts else summary.input, LABELS)
    if task not in (None, found):
        problems.append(f"--task {task} takes one column, several columns are for {found}")
    if problems or len(set(names)) < len(names):
        named = "; ".join(problems) or "a column is listed twice"
        raise ParamsError(
            f"--target names {len(names)} columns, one for each label: {named}. The columns are "
            f"{', '.join(by_name)}. Correct the list."
        )
    reason = f"a column for each of {len(names)} labels"
    return TaskChoice(found, reason, chosen[0], "as you said", roles, chosen, texts)


def _check_task(summary: DataSummary, columns: Sequence[SampledColumn], task: str) -> None:
    inputs = kind_of(task).input
    is_of_texts = inputs.has_texts and summary.form == "table"
    if is_of_texts and not any(map(_holds_text, columns)):
        raise ParamsError(
            f"--task is {task!r}, but no column of {str(summary.path)!r} holds texts: "
            f"{', '.join(column.name for column in columns)}. Leave --task out."
        )
    if inputs is not summary.input and not is_of_texts:
        expected = [task_for(summary.input, target) for target in (CLASS, LABELS, NUMBER)]
        raise ParamsError(
            f"--task is {task!r}, but {str(summary.path)!r} is a {summary.form}, "
            f"expected {', '.join(expected[:-1])} or {expected[-1]}."
        )


def _folders_of_classes(
    summary: DataSummary, columns: Sequence[SampledColumn], asked: str | None
) -> TaskChoice:
    if len(summary.classes) < 2:
        raise DataError(
            f"{str(summary.path)!r} has one class folder, {next(iter(summary.classes))!r}, "
            "expected at least two. Add the other classes."
        )
    roles = Roles([], None, None, None, None, [])
    task = task_for(summary.input, CLASS)
    if asked not in (None, task):
        raise ParamsError(
            f"--task is {asked!r}, but {str(summary.path)!r} has one folder per class, which suits "
            f"{task}. Leave --task out, or name a table with the targets."
        )
    names = ", ".join(list(summary.classes)[:3]) + ", ..." * (len(summary.classes) > 3)
    reason = f"{len(summary.classes)} class folders: {names}"
    return TaskChoice(task, reason, None, "", roles, text_columns=tuple(columns))


def _target(
    columns: Sequence[SampledColumn],
    roles: Roles,
    task: str | None,
    target: str | None,
    explained: Collection[str],
) -> tuple[SampledColumn, str] | Question:
    if target is not None:
        return next(column for column in columns if column.name == target), "as you said"
    named = roles.named_target
    twins = [] if named is None else _twins(named, columns)
    if named is not None and not twins:
        return named, "its name suggests it"
    fitting = [
        column
        for column in roles.targets
        if task is None or kind_of(task).target in target_kinds(column)
    ]
    if not fitting:
        raise DataError(
            f"none of the columns {', '.join(column.name for column in columns)} can be a target: "
            "expected one with a few classes, or with numbers, in most rows."
        )
    if len(fitting) == 1 and {column.name for column in columns} <= {fitting[0].name, *explained}:
        return fitting[0], "the only column that can be predicted"
    lists = [column for column in fitting if column.holds_lists]
    if len(lists) == 1:
        return lists[0], "the only column of lists"
    last_first = sorted(fitting, key=lambda column: -list(columns).index(column))
    facts = [f"{relation}." for relation in find_relations(fitting)[:_MOST_FACTS]]
    if named is not None and twins:
        facts.insert(
            0,
            f"{named.name!r} is named like a target, but it says the same as "
            f"{' and '.join(repr(twin.name) for twin in twins)}.",
        )
    return Question(
        "--target",
        " ".join([*facts, "Which column should the model predict?"]),
        tuple(column.name for column in last_first[:_MOST_CANDIDATES]),
    )


def _twins(target: SampledColumn, columns: Sequence[SampledColumn]) -> list[SampledColumn]:
    """Return the columns that repeat the target in every row, and are not named like one."""
    kind: Kind = "category" if target.may_be_classes or not target.is_numeric else "number"
    typed = typed_column(target.raw, kind)
    found = []
    for column in columns:
        if column.name == target.name or column.is_named_target or column.raw.stored == "other":
            continue
        other = typed_column(column.raw, kind)
        present = (typed.cell_states == GOOD) & (other.cell_states == GOOD)
        if present.mean() >= _TWIN_FRACTION and is_copy(other, typed, present):
            found.append(column)
    return found


def _text_columns(
    summary: DataSummary,
    columns: Sequence[SampledColumn],
    roles: Roles,
    task: str | None,
    target: str | None,
    targets: Sequence[str] = (),
) -> tuple[SampledColumn, ...]:
    """Return the text columns, if `task` is a task of texts or there are no other inputs.

    If no column is known to be the target, one other column may remain, which is taken as the
    target.
    """
    if summary.form != "table" or (task is not None and not kind_of(task).input.has_texts):
        return ()
    named = roles.named_target
    label = target or (named.name if named else None)
    given = {label, *targets, *(column.name for column in roles.special)}
    others = [column for column in columns if column.name not in given]
    texts = tuple(column for column in others if column.is_free_text)
    if task is not None:
        return texts or tuple(column for column in others if _holds_text(column))
    # Short texts, such as titles, are the inputs if a table would have none.
    texts = texts or tuple(column for column in others if column.is_short_text)
    rest = [c for c in others if c.guess.kind != "ignore" and c not in texts]
    has_target = label is not None or bool(targets)
    return texts if len(rest) <= (0 if has_target else 1) else ()


def _holds_text(column: SampledColumn) -> bool:
    return column.raw.stored == "text" and not column.is_numeric and not column.holds_lists


def _examples(column: SampledColumn, *, joined: bool = False) -> str:
    """Return the most frequent values; `joined` counts the spellings of one class together."""
    counts = joined_counts(column.counts) if joined else column.counts
    most = [name for name, _ in counts.most_common(4)]
    more = ", ..." if len(counts) > len(most) else ""
    return f"{', '.join(name[:20] for name in most)}{more}"
