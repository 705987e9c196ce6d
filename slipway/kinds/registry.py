"""The registry of task kinds: to add a kind, add one record to `KINDS`."""

import functools
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from slipway.kinds.inputs import COLUMNS, IMAGES, TEXTS, InputKind
from slipway.kinds.targets import CLASS, LABELS, NUMBER, TargetKind
from slipway.system.errors import ParamsError, nearest


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: the combination of a kind of input and a kind of target."""

    name: str  # `data.task` in params.yaml
    input: InputKind
    target: TargetKind


KINDS = {
    kind.name: kind
    for kind in (
        TaskKind("image_classification", IMAGES, CLASS),
        TaskKind("image_multilabel", IMAGES, LABELS),
        TaskKind("image_regression", IMAGES, NUMBER),
        TaskKind("table_classification", COLUMNS, CLASS),
        TaskKind("table_multilabel", COLUMNS, LABELS),
        TaskKind("table_regression", COLUMNS, NUMBER),
        TaskKind("text_classification", TEXTS, CLASS),
        TaskKind("text_multilabel", TEXTS, LABELS),
        TaskKind("text_regression", TEXTS, NUMBER),
    )
}


def kind_of(task: str) -> TaskKind:
    """Return the record of a task; ParamsError lists the known tasks if there is none."""
    if task not in KINDS:
        raise ParamsError(f"unknown task {task!r}, expected one of {', '.join(KINDS)}.")
    return KINDS[task]


def task_for(inputs: InputKind, target: TargetKind) -> str:
    """Return the name of the task with this input and this target, for messages."""
    return next(
        kind.name for kind in KINDS.values() if (kind.input, kind.target) == (inputs, target)
    )


def input_kinds() -> dict[str, InputKind]:
    """Return the kinds of input by name."""
    return {kind.input.name: kind.input for kind in KINDS.values()}


@functools.cache  # each request needs it; unknown names are not cached
def input_kind(name: str) -> InputKind:
    """Return a kind of input by its name; ParamsError lists the known kinds if there is none."""
    kinds = input_kinds()
    if name not in kinds:
        raise ParamsError(f"unknown kind of input {name!r}, expected one of {', '.join(kinds)}.")
    return kinds[name]


def are_trees(network: str) -> bool:
    """Return True if `network` names gradient-boosted trees, which have no gradient steps."""
    return any(network in kind.trees for kind in input_kinds().values())


def _known(task: str) -> str:
    if task not in KINDS:
        close = nearest(task, KINDS)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"found {task!r}, expected one of {', '.join(KINDS)}{hint}")
    return task


# The type of a field of a record that holds the name of a task.
Task = Annotated[str, AfterValidator(_known), Field(examples=list(KINDS))]
