"""`slipway compare A B`: two experiments side by side, with the differences from A to B."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slipway.artifacts.bundle import Metric
from slipway.config.yaml_text import as_yaml
from slipway.experiments.answers import ExperimentAnswers, read_answers
from slipway.experiments.comparison import Comparison
from slipway.experiments.records import ExperimentRecord, find_record
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import PairedDifference, paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.console import interval, number, text_table
from slipway.system.errors import ParamsError, SlipwayError

_MIN_ROWS = 2


@dataclass(frozen=True)
class ExperimentPair:
    """Two experiments with their stored predictions.

    An experiment without stored predictions has None in `answers`, and the reason in `remarks`.
    """

    first: ExperimentRecord
    second: ExperimentRecord
    answers: tuple[ExperimentAnswers | None, ExperimentAnswers | None]
    remarks: Sequence[str]

    @property
    def names(self) -> tuple[str, str]:
        """The names of both experiments."""
        return self.first.name, self.second.name

    @cached_property
    def changed(self) -> list[list[str]]:
        """Keys of params.yaml that differ, with both values; "" for a missing key."""
        both = [self.first, self.second]
        return [
            [key, *(as_yaml(one.params[key]) if key in one.params else "" for one in both)]
            for key in Comparison(both, both).changed
        ]

    @cached_property
    def metrics(self) -> list[tuple[str, Metric | None, Metric | None]]:
        """The name and both values of each metric; None for an experiment that lacks it."""
        first, second = (
            found.metrics if found else _headline(record)
            for found, record in zip(self.answers, (self.first, self.second), strict=True)
        )
        return [(name, first.get(name), second.get(name)) for name in {**first, **second}]

    @cached_property
    def shared_ids(self) -> list[str]:
        """Ids of the test rows that both have; empty if rows cannot be compared."""
        first, second = self.answers
        if first is None or second is None:
            return []
        known = set(second.ids)
        return [name for name in first.ids if name in known]

    @cached_property
    def why_unpaired(self) -> str:
        """The reason why there is no paired interval; "" if there is one."""
        first, second = self.answers
        if first is None or second is None:
            return "; ".join(self.remarks)
        if (first.task, first.classes) != (second.task, second.classes):
            return "the experiments have different tasks or classes"
        if len(self.shared_ids) < _MIN_ROWS:
            return f"the experiments share {len(self.shared_ids)} test rows"
        if (first.rows(self.shared_ids)[0] != second.rows(self.shared_ids)[0]).any():
            return "shared test rows have different labels or targets"
        return ""

    @cached_property
    def paired(self) -> dict[str, PairedDifference]:
        """Paired differences on the shared test rows, by metric; empty if there are none."""
        first, second = self.answers
        if self.why_unpaired or first is None or second is None:
            return {}
        targets, before = first.rows(self.shared_ids)
        after, params = second.rows(self.shared_ids)[1], self.second.params
        resampling = Resampling(
            params["seed"], params["evaluate.bootstrap_samples"], params["evaluate.confidence"]
        )
        names = kind_of(first.task).target.compared_metrics
        return {
            name: paired_difference(
                first.task,
                name,
                targets,
                before,
                after,
                resampling,
                thresholds=(first.thresholds, second.thresholds),
            )
            for name in names
        }

    @property
    def note(self) -> str:
        """A sentence that explains the differences, or why they have no intervals."""
        if self.why_unpaired:
            return f"No paired intervals: {self.why_unpaired}."
        num_rows = len(self.shared_ids)
        others = sum(len(found.ids) - num_rows for found in self.answers if found)
        left_out = f" {others:,} test rows that only one has are left out." if others else ""
        return (
            f"Difference: {self.second.name} - {self.first.name}, on the same {num_rows:,} test "
            f"rows, with its paired interval. An interval without 0 shows a difference.{left_out}"
        )

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the columns and rows of the table of metrics."""
        columns = ["metric", self.first.name, "interval", self.second.name, "its interval"]
        rows = []
        for name, before, after in self.metrics:
            values: list[str] = []
            for found in (before, after):
                values += [number(found.value), interval(found)] if found else ["", ""]
            pair = self.paired.get(name)
            bounds = f"{_signed(pair.low)} to {_signed(pair.high)}" if pair else ""
            change = ""
            if pair:
                change = _signed(pair.difference)
            elif before and after:
                change = _signed(after.value - before.value)
            rows.append([name, *values, change, bounds])
        return [*columns, "difference", "paired interval"], rows

    def text(self) -> str:
        """Build the tables for a terminal."""
        params = text_table(["param", *self.names], self.changed) if self.changed else "same params"
        return f"{params}\n\n{text_table(*self.cells())}\n\n{self.note}"


def read_pair(comparison: Comparison, names: Sequence[str]) -> ExperimentPair:
    """Read two experiments; raises ParamsError unless `names` are two that exist."""
    if len(names) != 2 or names[0] == names[1]:
        raise ParamsError(
            f"compare was given {', '.join(names)}; expected two different experiments, or none "
            "for a table of all. Name two, such as `slipway compare run-1 run-2`."
        )
    known = {record.name: record for record in comparison.every}
    for name in names:
        if name not in known:
            find_record(name, list(comparison.every))  # raises an error that lists the known names
    records = [known[name] for name in names]
    found: list[ExperimentAnswers | None] = []
    remarks = []
    for record in records:
        try:
            found.append(read_answers(record))
        except SlipwayError as error:
            found.append(None)
            remarks.append(str(error).rstrip("."))
    return ExperimentPair(records[0], records[1], (found[0], found[1]), remarks)


def _signed(value: float) -> str:
    return f"{value:+.4g}" if value else "0"


def _headline(record: ExperimentRecord) -> dict[str, Metric]:
    """Return the headline metric, the only one in the record, by name."""
    results: Any = record.results
    return {results.headline: results.metric} if results and results.metric else {}
