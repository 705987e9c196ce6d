"""The registry of task kinds. Adding a kind means adding one record to `KINDS`."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from slipway.kinds.inputs import COLUMNS, IMAGES, InputKind
from slipway.kinds.targets import CLASS, NUMBER, TargetKind
from slipway.system.errors import ParamsError


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: a kind of input and a kind of target."""

    name: str  # `data.task` in params.yaml
    input: InputKind
    target: TargetKind


KINDS = {
    kind.name: kind
    for kind in (
        TaskKind("image_classification", IMAGES, CLASS),
        TaskKind("image_regression", IMAGES, NUMBER),
        TaskKind("table_classification", COLUMNS, CLASS),
        TaskKind("table_regression", COLUMNS, NUMBER),
    )
}


def kind_of(task: str) -> TaskKind:
    """The record of a task. ParamsError with the known tasks if there is none."""
    if task not in KINDS:
        raise ParamsError(f"unknown task {task!r}. Known tasks: {', '.join(KINDS)}.")
    return KINDS[task]


def input_kind(name: str) -> InputKind:
    """The record of a kind of input. ParamsError with the known kinds if there is none."""
    for kind in KINDS.values():
        if kind.input.name == name:
            return kind.input
    known = dict.fromkeys(kind.input.name for kind in KINDS.values())
    raise ParamsError(f"unknown kind of input {name!r}. Known kinds: {', '.join(known)}.")


def _known(task: str) -> str:
    if task not in KINDS:
        raise ValueError(f"found {task!r}, expected one of {', '.join(KINDS)}")
    return task


Task = Annotated[str, AfterValidator(_known)]  # the name of a task in a typed record


def is_classification(task: Task) -> bool:
    """Return True if the target is a class, False if it is a number.

    ParamsError for any other target, so that code with these two branches never guesses.
    """
    target = kind_of(task).target
    if target in (CLASS, NUMBER):
        return target is CLASS
    raise ParamsError(f"{task} predicts a {target.name}; this step knows classes and numbers only.")


def is_table(task: Task) -> bool:
    """Return True if a row is a table's columns, False if it is an image.

    ParamsError for any other input, so that code with these two branches never guesses.
    """
    inputs = kind_of(task).input
    if inputs in (COLUMNS, IMAGES):
        return inputs is COLUMNS
    raise ParamsError(f"{task} takes {inputs.name}; this step knows images and columns only.")


def metric_names(task: Task) -> tuple[str, ...]:
    """Return the metrics of a task; slipway/metrics/scores.py computes them."""
    return kind_of(task).target.metrics
