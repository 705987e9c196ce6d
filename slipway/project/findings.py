"""Finds in sampled data what the user should look at, such as rare classes and suspected leaks.

Each function yields warnings in words.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from slipway.config.yaml_text import as_plain_yaml, as_yaml
from slipway.data.rules.class_names import listed_variants, misspellings
from slipway.data.tables import hints
from slipway.data.tables.cells import GOOD, typed_column
from slipway.data.tables.column_rules import is_copy
from slipway.data.tables.target_copies import ColumnScore, best_score
from slipway.inputs.columns import Kind
from slipway.project.column_roles import Panel, SampledColumn
from slipway.project.relations import find_relations

_FEW_CLASS_ROWS = 20
_MUCH_MISSING = 0.4
_MOST_NAMED = 5  # columns or classes that one warning names


def date_columns(columns: Sequence[SampledColumn]) -> Iterator[str]:
    """Warn of dates, if none of them orders the rows."""
    missing = [column.missing_fraction for column in columns]
    names = ", ".join(
        f"{column.name!r}" + f" ({fraction:.1%} of the rows have none)" * bool(fraction)
        for column, fraction in zip(columns, missing, strict=True)
    )
    if names:
        yield (
            f"columns of dates: {names}. If the model is to predict the future, set "
            "data.time_column to the one that orders the rows; rows without it are refused"
        )


def missing_targets(target: SampledColumn) -> Iterator[str]:
    """Warn of rows without a target, from which nothing can be learned."""
    if target.missing_fraction:
        yield (
            f"{target.name!r} has no value in {target.missing_fraction:.1%} of the rows: they are "
            "set aside, for `slipway predict`"
        )


def missing_names(target: SampledColumn, data: Mapping[str, Any]) -> Iterator[str]:
    """Warn of labels such as NA, which count as missing, with the setting that keeps them."""
    classes, label_map = data.get("classes"), data.get("label_map", {})
    if found := hints.missing_names(target.raw, label_map):
        shown = ", ".join(f"{name!r} ({rows} rows)" for name, rows in found.items())
        kept = {**label_map, **{name: name for name in found}}
        remedy = f"data.label_map to {as_plain_yaml(kept)}"
        if classes is not None:
            remedy = f"data.classes to {as_plain_yaml([*classes, *found])}"
        yield f"labels that count as missing: {shown}. If they are classes, set {remedy}"


def panel(found: Panel) -> str:
    """Return a warning on rows that repeat once per time, with the commands for either split."""
    group, time = found.group.name, found.time.name
    commands = [
        f"slipway set {shlex.join(f'data.{key}={as_plain_yaml(name)}' for key, name in keys)}"
        for keys in (
            (("group_column", group), ("time_column", None)),
            (("group_column", None), ("time_column", time)),
        )
    ]
    return "\n".join(
        [
            f"{group!r} repeats once per {time!r}, so its rows are alike. The first command tests "
            f"the model on values of {group!r} that it has not seen, the second on later rows:",
            *commands,
        ]
    )


def misspelt(counts: Mapping[str, int], label_map: Mapping[str, str]) -> Iterator[str]:
    """Warn of classes whose names resemble those of larger classes."""
    if slips := misspellings(counts):
        yield (
            f"classes that may be misspelt: {listed_variants(slips, counts)}. If they are, "
            f"set data.label_map to {as_plain_yaml({**label_map, **slips})}"
        )


def small_classes(counts: Mapping[str, int]) -> Iterator[str]:
    """Warn of classes whose metrics will be rough."""
    few = [f"{name!r} ({rows})" for name, rows in counts.items() if rows < _FEW_CLASS_ROWS]
    if few:
        yield (
            f"classes with fewer than {_FEW_CLASS_ROWS} rows, whose figures will be rough: "
            f"{', '.join(few[:_MOST_NAMED])}{', ...' if len(few) > _MOST_NAMED else ''}"
        )


def other_dates(columns: Sequence[SampledColumn], formats: Mapping[str, str]) -> Iterator[str]:
    """Warn of dates in `formats`, by column, that params.yaml cannot name as well."""
    read = {column.name for column in columns if column.guess.kind == "date"}
    for name, written in formats.items():
        if name not in read:
            yield (
                f"{name!r} looks like dates in the format {as_plain_yaml(written)}, but "
                "data.date_format takes one format: write its dates as ISO 8601 (2026-11-20)"
            )


def free_texts(columns: Sequence[SampledColumn], task: str) -> Iterator[str]:
    """Warn of texts that a table's task ignores; `task` would learn from them."""
    for column in columns:
        if column.is_free_text and column.guess.kind == "ignore":
            yield (
                f"{column.name!r} is free text, which tables do not use. To learn from "
                f"texts only, start with --task {task}"
            )


def unread(columns: Sequence[SampledColumn], others: Collection[str]) -> Iterator[str]:
    """Warn of columns that the model will not read, with reasons; not of texts and `others`."""
    found = [
        f"{column.name!r} ({column.guess.reason})"
        for column in columns
        if column.guess.kind == "ignore" and not column.is_free_text and column.name not in others
    ]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        yield (
            f"columns that the model will not read: {', '.join(found[:_MOST_NAMED])}{more}. "
            "To use one, name its kind in data.columns"
        )


def units(columns: Sequence[SampledColumn]) -> Iterator[str]:
    """Name the units of the numbers, which the model and the service read without."""
    for column in columns:
        typed = typed_column(column.raw, "number")
        if column.is_numeric and typed.unit:
            place = int(np.argmax(typed.states == GOOD))
            written, value = column.raw.values[place].as_py(), float(typed.values[place])
            yield (
                f"{column.name!r} has the unit {typed.unit}: {written!r} is read as {value:g}, "
                f"and the service takes {value:g}"
            )


def mostly_missing(inputs: Sequence[SampledColumn]) -> Iterator[str]:
    """Warn of inputs that many rows lack."""
    for column in inputs:
        if column.missing_fraction >= _MUCH_MISSING:
            yield f"{column.name!r} has no value in {column.missing_fraction:.0%} of the rows"


def suspected_leaks(
    inputs: Sequence[SampledColumn],
    target: SampledColumn,
    columns: Mapping[str, object],
    *,
    of_classes: bool,
) -> Iterator[str]:
    """Warn of inputs that alone predict the target nearly without error.

    `columns` is the proposed data.columns. Copies of the target, which `clean` ignores by itself,
    are left out.
    """
    kind: Kind = "category" if of_classes else "number"
    typed = typed_column(target.raw, kind)
    present = typed.cell_states == GOOD
    targets = typed.keys.astype(float) if of_classes else np.asarray(typed.cells, float)
    found = []
    for column in inputs:
        guess = column.guess.kind
        cells = typed_column(column.raw, "category" if guess == "ignore" else guess)
        values = pa.array(cells.cells[present], from_pandas=True)
        if guess == "category":
            values = pa.array([cell or None for cell in values.to_pylist()], pa.string())
        best = best_score(pa.chunked_array([values]), targets[present], of_classes=of_classes)
        score = None if best is None else ColumnScore(column.name, *best)
        if score is None or not score.is_suspicious:
            continue
        if not is_copy(cells, typed, present):
            found.append(score)
    if found:
        shown = "; ".join(score.in_words(of_classes=of_classes) for score in found)
        them = "them" if found[1:] else "it"
        command = ignoring([score.column for score in found], columns)
        yield (
            f"suspected leak: {shown}. Ignore {them} if a service would know {them} only after "
            f"{target.name!r}:\n{command}"
        )


def computed_columns(
    inputs: Sequence[SampledColumn], target: SampledColumn, columns: Mapping[str, object]
) -> Iterator[str]:
    """Warn of columns that are computed from others; `columns` is the proposed data.columns."""
    for relation in find_relations([*inputs, target])[:_MOST_NAMED]:
        parts = [name for name, _ in relation.terms]
        if target.name not in relation.names:
            yield f"{relation} in every row, so it tells a model nothing new"
        else:
            names = parts if relation.result == target.name else [relation.result]
            yield (
                f"{relation} in every row: together they tell the target {target.name!r}. Ignore "
                f"what a service would know only after it:\n{ignoring(names, columns)}"
            )


def ignoring(names: Sequence[str], columns: Mapping[str, object]) -> str:
    """Return the command that makes columns no inputs; `columns` is the present data.columns."""
    entry = {"kind": "ignore"}
    changes = [f"data.columns.{name}={as_plain_yaml(entry)}" for name in names]
    if any(re.search(r"[.=]|^\s|\s$", name) for name in names):
        changes = [f"data.columns={as_yaml({**columns, **dict.fromkeys(names, entry)})}"]
    return f"slipway set {shlex.join(changes)}"
