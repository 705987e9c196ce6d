"""Asks `clean`, `split` and `precompute` about a table before its project is written.

What these stages would refuse, `init` then says at once. A refusal that a key of params.yaml
answers, such as a group that leaves a split empty, becomes a proposal with its reason. The stages'
own functions read the whole table, in a temporary folder. Of more than a million rows, or 50,000
with texts, they read the sample, which says nothing about the split.
"""

import contextlib
import copy
import io
import itertools
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from slipway.config.params import Params, parse_params
from slipway.data.rules.report import CleanReport, CleanResult, RuleCount
from slipway.data.rules.result import Cleaned, check_usable
from slipway.data.sources.archives import ArchiveLimits, archives_of, shown_as, unpacked
from slipway.data.sources.sources import with_given_split
from slipway.data.splits.split import (
    Split,
    assign_rows,
    check_columns,
    check_split,
    short_classes,
)
from slipway.data.store.targets import target_scale
from slipway.data.tables.clean_files import in_order_of, read_cells, write_raw_rows
from slipway.data.tables.packing import fit_columns
from slipway.kinds.registry import kind_of
from slipway.project.column_roles import SampledColumn
from slipway.project.summary import DataSummary
from slipway.system.errors import DataError

_MOST_ROWS = 1_000_000  # of a table that is read as a whole: 34 s for 13 columns
_MOST_TEXTS = 50_000  # of a table of texts, whose comparison takes longer
_MOST_BAD = 0.5  # fraction of bad rows; with more, the table is not what the user thinks
_MOST_NAMED = 5
_FEWEST_UNITS = 30  # with fewer sets of rows that stay together, val and test have 4 or less
_CONTRARY = ("conflicting_label", "conflicting_target")
_STAGES = ("clean", "split", "precompute")


class Change(NamedTuple):
    """A value for a key of params.yaml, with its reason."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Settled:
    """The changes with which no stage refuses the table, and what `clean` will do with it."""

    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Outcome:
    """The number of stages that passed, and the refusal of the next one."""

    passed: int
    refusal: DataError | None = None
    cleaned: Cleaned | None = None
    report: CleanReport | None = None
    short: tuple[str, ...] = ()  # classes that lack rows in a split
    empty: tuple[str, ...] = ()  # columns without a value in the training rows
    num_units: int = 0  # sets of rows that stay in one split; 0 if no split was tried

    @property
    def progress(self) -> tuple[int, float]:
        """The stages that passed, and at `split` minus the number of classes that lack rows."""
        return self.passed, -len(self.short) if self.short else -math.inf


def settle(
    summary: DataSummary, content: Mapping[str, Any], columns: Sequence[SampledColumn]
) -> Settled:
    """Return changes to the params `content` with which the stages accept the table.

    Raises DataError, with the refusal of the stage, if there are none.
    """
    path = summary.path.absolute()
    most = _MOST_TEXTS if kind_of(content["data"]["task"]).input.has_texts else _MOST_ROWS
    with _readable(summary, most) as sample:
        settled: dict[str, Change] = {}

        def tried(changes: Sequence[Change]) -> _Outcome:
            changed = _changed(content, [*settled.values(), *changes])
            changed["data"]["path"] = str(path)
            if sample is not None:
                changed["data"].update(path=str(sample), sources=None, encoding="utf-8")
            return _run(parse_params(changed), is_whole=sample is None)

        outcome = tried([])
        while outcome.refusal is not None:
            params = parse_params(_changed(content, [*settled.values()]))
            for option in _options(outcome, params):
                better = tried(option)
                if better.progress > outcome.progress:
                    settled |= {change.key: change for change in option}
                    outcome = better
                    break
            else:
                refusal = str(outcome.refusal).replace(str(sample), str(summary.path))
                raise DataError(
                    f"`{_STAGES[outcome.passed]}` would refuse this table, so nothing is written: "
                    f"{refusal}\nOr name another column with --target."
                )
        for change in _repeats(outcome, parse_params(_changed(content, [*settled.values()]))):
            if (better := tried([change])).refusal is None:
                settled[change.key], outcome = change, better
    assert outcome.report is not None
    inputs = {column.name for column in columns if column.guess.kind != "ignore"}
    if "data.columns" in settled:
        inputs -= settled["data.columns"].value.keys()
    return Settled(tuple(settled.values()), tuple(_in_words(outcome.report, inputs)))


@contextlib.contextmanager
def _readable(summary: DataSummary, most: int) -> Iterator[Path | None]:
    """Enter a temporary folder, as the stages write below the working directory.

    Yields None, or the file of the sample if the table has more than `most` rows.
    """
    table = summary.table
    assert table is not None
    with tempfile.TemporaryDirectory(prefix="slipway-") as folder, contextlib.chdir(folder):
        if summary.num_rows <= most:
            yield None
        else:
            sample = Path(folder, "sample.parquet").resolve()
            write_raw_rows(sample, table, np.arange(len(table.numbers)))
            yield sample


def _changed(content: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(content))
    for change in changes:
        *sections, name = change.key.split(".")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = change.value
    return changed


def _run(params: Params, *, is_whole: bool) -> _Outcome:
    """Run the stages' own functions until one refuses the table."""
    data, kind = params.data, kind_of(params.data.task)
    cleaned: Cleaned | None = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # `inspect` has the remarks on archives
            data = unpacked(data, ArchiveLimits.of(params.clean))
        with shown_as(archives_of(params.data)):
            data, _ = with_given_split(data)
            result: CleanResult = kind.input.load_part("clean")(data, params.clean)
            cleaned = result.cleaned
            check_usable(cleaned, params.clean, data.task)
            report = result.report()
    except DataError as error:
        return _Outcome(0, error, cleaned)
    if not is_whole:
        return _Outcome(len(_STAGES), None, cleaned, report)
    split: Split | None = None
    try:
        check_columns(cleaned.rows, data.split_column, data.time_column)
        several = kind.target.several
        split = assign_rows(cleaned.rows, params.split, params.seed, several=several)
        check_split(split, params.split)
    except DataError as error:
        short = () if split is None else tuple(short_classes(split))
        return _Outcome(1, error, cleaned, report, short)
    result.write(Path())
    passed = _Outcome(len(_STAGES), None, cleaned, report, num_units=len(split.unit_sizes))
    return _fitted(params, split, passed)


def _fitted(params: Params, split: Split, outcome: _Outcome) -> _Outcome:
    """Fit the target and the columns to the training rows, as `precompute` does."""
    is_training, kind = pc.equal(split.rows["split"], "train"), kind_of(params.data.task)
    try:
        if not kind.target.has_classes:
            target_scale(split.rows["target"].filter(is_training).to_numpy())
    except DataError as error:
        return _Outcome(2, error, outcome.cleaned, outcome.report)
    if kind.input.has_texts:
        return outcome
    stored, columns = read_cells(Path())
    cells = in_order_of(split.rows, stored, "cells")
    try:
        fit_columns(cells, is_training.to_numpy(), columns.inputs, params.precompute)
    except DataError as error:
        training = cells.filter(is_training)
        names = [column.name for column in columns.inputs]
        empty = [name for name in names if training[name].null_count == training.num_rows]
        return _Outcome(2, error, outcome.cleaned, outcome.report, empty=tuple(empty))
    return outcome


# Options ------------------------------------------------------------------------------------------


def _options(outcome: _Outcome, params: Params) -> Iterator[list[Change]]:
    """Yield changes that may answer the refusal; those that lose least come first."""
    if outcome.passed == 0 and outcome.cleaned is not None:
        yield from ([change] for change in _more_bad_rows(outcome.cleaned))
    elif outcome.passed == 1:
        changes = list(_changes_of_split(params))
        yield from ([change] for change in changes)
        yield from (changes[:number] for number in range(2, len(changes) + 1))
        yield from _left_out(outcome, params)
    elif outcome.empty:
        yield [_without(outcome.empty, params)]


def _repeats(outcome: _Outcome, params: Params) -> Iterator[Change]:
    """Yield a change for a table whose rows repeat a few inputs, with other answers each time.

    Such inputs are the settings of an experiment, or coarse categories. If rows of equal inputs
    stayed in one split, val and test would have a few inputs each, and training none of these.
    """
    assert outcome.report is not None
    assert outcome.cleaned is not None
    rules, num_rows = outcome.report.flagged, outcome.cleaned.rows.num_rows
    contrary = [rules[rule].count for rule in _CONTRARY if rule in rules]
    is_input_few = 0 < outcome.num_units < _FEWEST_UNITS and params.data.group_column is None
    if (
        params.clean.rules.near_duplicate == "flag"
        and is_input_few
        and 2 * sum(contrary) > num_rows
    ):
        reason = (
            f"{outcome.num_units} different inputs repeat in {num_rows:,} rows, with different "
            "answers; flag would keep the rows of each in one split"
        )
        yield Change("clean.rules.near_duplicate", None, reason)


def _more_bad_rows(cleaned: Cleaned) -> Iterator[Change]:
    num_labelled = cleaned.num_read - cleaned.num_unlabelled
    fraction = cleaned.num_bad / max(1, num_labelled)
    if cleaned.rows.num_rows and fraction <= _MOST_BAD:
        enough = math.ceil(100 * fraction) / 100
        reason = f"{cleaned.num_bad:,} of {num_labelled:,} rows are bad; see the report of clean"
        yield Change("clean.max_bad_fraction", enough, reason)


def _changes_of_split(params: Params) -> Iterator[Change]:
    if params.split.assignment == "stable":
        yield Change("split.assignment", "exact", "so that every split has every class")
    if params.clean.rules.near_duplicate is not None:
        reason = "so many rows share their inputs that no split could keep them together"
        yield Change("clean.rules.near_duplicate", None, reason)
    if params.data.time_column is not None:
        reason = f"the times of {params.data.time_column!r} leave a split empty"
        yield Change("data.time_column", None, reason)
    if params.data.group_column is not None:
        reason = f"the groups of {params.data.group_column!r} are too few or too large to split"
        yield Change("data.group_column", None, reason)


def _left_out(outcome: _Outcome, params: Params) -> Iterator[list[Change]]:
    """Leave out the classes that cannot be in every split, if two others are left."""
    assert outcome.cleaned is not None
    if not outcome.short or kind_of(params.data.task).target.several:
        return
    rows = outcome.cleaned.rows
    kept = sorted({*pc.unique(rows["label"]).to_pylist()} - {*outcome.short})
    if len(kept) < 2:
        return
    left_out = pc.sum(pc.is_in(rows["label"], pc.cast(list(outcome.short), "string"))).as_py()
    num_labelled = outcome.cleaned.num_read - outcome.cleaned.num_unlabelled
    fraction = (outcome.cleaned.num_bad + left_out) / num_labelled
    shown = ", ".join(map(repr, outcome.short[:_MOST_NAMED]))
    reason = f"without {shown}: too few rows for three splits"
    changes = [Change("data.classes", kept, reason)]
    if params.clean.max_bad_fraction < fraction <= _MOST_BAD:
        enough = math.ceil(100 * fraction) / 100
        changes.append(Change("clean.max_bad_fraction", enough, "for the classes left out"))
    yield changes


def _without(names: Sequence[str], params: Params) -> Change:
    entry = {"kind": "ignore", "min": None, "max": None, "required": False}
    given = {name: column.model_dump() for name, column in params.data.columns.items()}
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    reason = f"{shown}: no value in the rows that the model learns from"
    return Change("data.columns", given | dict.fromkeys(names, entry), reason)


# Words --------------------------------------------------------------------------------------------


def _in_words(report: CleanReport, inputs: Collection[str]) -> Iterator[str]:
    """Say in one line what `clean` will refuse and flag, and which of the `inputs` it ignores."""
    ignored = [
        f"{column.name!r} ({column.note})"
        for column in report.columns
        if column.kind == "ignore" and column.name in inputs
    ]
    bad = {name: rule for name, rule in report.refused.items() if rule.severity != "unlabelled"}
    parts = [
        f"{verb} {_counted(rules)}"
        for verb, rules in (("refuse", bad), ("keep and flag", report.flagged))
        if rules
    ]
    if ignored:
        more = f" and {len(ignored) - _MOST_NAMED} more" if len(ignored) > _MOST_NAMED else ""
        parts.append(f"ignore the columns {', '.join(ignored[:_MOST_NAMED])}{more}")
    if parts:
        yield f"of {report.read:,} rows, `clean` will {'; '.join(parts)}"


def _counted(rules: Mapping[str, RuleCount]) -> str:
    most = sorted(rules.items(), key=lambda entry: -entry[1].count)
    shown = [f"{rule.count:,} ({name})" for name, rule in itertools.islice(most, _MOST_NAMED)]
    return ", ".join(shown)
