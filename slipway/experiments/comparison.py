"""`slipway compare`: a row for each experiment, newest first, as text, CSV, JSON or HTML.

The rows come from the records of `slipway run`. An experiment without a record, made by
`dvc exp run` or `dvc exp pull`, has a row with params and metrics but no duration.
"""

import csv
import io
import re
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from slipway.artifacts.locations import GATES, METRICS, TRAINED, VERIFIED
from slipway.config.mistakes import hint
from slipway.config.params import read_content
from slipway.config.yaml_text import as_yaml
from slipway.experiments import repository
from slipway.experiments.records import ExperimentRecord, params_of, read_records, shortened
from slipway.experiments.results import read_results
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.reports.console import interval, number, text_table
from slipway.system.errors import ParamsError

_CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*")
_LONGEST_CAUSE = 200  # characters of a cause in a terminal
_NARROWEST = 40  # columns of a wrapped line
_PARAMS = "changed params"
_NETWORK, _ARGUMENTS = "train.network", "train.network_arguments."
_MISSING = object()  # stands for the value of a key that an experiment does not have


@dataclass(frozen=True)
class Comparison:
    """A comparison of experiments: the rows in order, and the columns that they need."""

    records: Sequence[ExperimentRecord]
    every: Sequence[ExperimentRecord]  # all experiments, also those that a filter removed
    gpu_hour: float | None = None  # price of a GPU for an hour; None shows no costs

    @cached_property
    def changed(self) -> list[str]:
        """Keys of params.yaml whose value differs between any two experiments."""
        keys = {key: None for record in self.every for key in record.params}
        return [
            key
            for key in keys
            if any(
                record.params.get(key, _MISSING) != self.every[0].params.get(key, _MISSING)
                for record in self.every
            )
        ]

    def changed_params(self, record: ExperimentRecord) -> dict[str, Any]:
        """Return the experiment's values of the keys that differ."""
        return {key: record.params[key] for key in self.changed if key in record.params}

    def filtered(self, conditions: Sequence[str]) -> "Comparison":
        """Return the experiments that meet all conditions, such as "train.epochs>5"."""
        tests = [self._condition(text) for text in conditions]
        kept = [record for record in self.records if all(test(record) for test in tests)]
        return replace(self, records=kept)

    def sorted(self, key: str, *, reverse: bool = False) -> "Comparison":
        """Sort by a column: `metric` from the best down, others ascending, empty cells last."""
        self._check(key)
        filled = [record for record in self.records if value_of(record, key) is not None]
        empty = [record for record in self.records if value_of(record, key) is None]
        is_best_first = key == "metric" and any(
            record.results and record.results.headline not in UNBOUNDED_METRICS for record in filled
        )

        def order(record: ExperimentRecord) -> tuple[bool, Any]:
            value = value_of(record, key)
            is_number = isinstance(value, int | float)
            return (not is_number, value if is_number else str(value))

        filled.sort(key=order, reverse=is_best_first is not reverse)
        return replace(self, records=[*filled, *empty])

    def cost(self, record: ExperimentRecord) -> float | None:
        """Return the price of the GPUs for the whole run; None without GPUs, or if it is unknown.

        All stages count, because GPUs are rented while the other stages run, too.
        """
        gpus = record.results and record.results.gpus
        if self.gpu_hour is None or record.seconds is None or not gpus:
            return None
        return self.gpu_hour * gpus * record.seconds / 3600

    def text(self, width: int = 100) -> str:
        """Return the table for a terminal of `width` columns, followed by the failures.

        If the table is wider, the changed params follow it, wrapped.
        """
        if not self.records:
            if self.every:
                return f"none of the {len(self.every)} experiments meets the filter"
            return "no experiment; `slipway run` makes one"
        columns, rows = self.cells()
        table, params = text_table(columns, rows), []
        if max(map(len, table.splitlines())) > width:
            place = columns.index(_PARAMS)
            params = [f"{row[0]}: {row[place]}" for row in rows if row[place]]
            shown = [row[:place] + row[place + 1 :] for row in (columns, *rows)]
            table = text_table(shown[0], shown[1:])
        causes = [
            f"{record.name} {record.ended}: {shortened(record.reason, _LONGEST_CAUSE)}"
            for record in self.records
            if record.reason
        ]
        changed = f"{_PARAMS}:\n{_listed(params, width)}" if params else ""
        return "\n\n".join(filter(None, [table, changed, _listed(causes, width)]))

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return (column names, cells of each row)."""
        headlines = {record.results.headline for record in self.records if record.results}
        metric = headlines.pop() if len(headlines) == 1 else "metric"
        columns = [
            *("name", "started", "status", _PARAMS, metric, "interval", "baseline"),
            *("log loss", "seconds", "gates", "certificate"),
        ]
        rows = [self._cells(record) for record in self.records]
        if any(record.validation for record in self.records):
            columns.insert(4, "validation")
            for row, record in zip(rows, self.records, strict=True):
                row.insert(4, _validation(record))
        if self.gpu_hour is not None:
            place = columns.index("seconds") + 1
            columns.insert(place, "cost")
            for row, record in zip(rows, self.records, strict=True):
                cost = self.cost(record)
                row.insert(place, "" if cost is None else f"{cost:,.2f}")
        return columns, rows

    def _cells(self, record: ExperimentRecord) -> list[str]:
        params = self._changed_in_short(record)
        stage = f" to {record.stage}" if record.stage else ""
        cells = [record.name, _local(record.started), f"{record.ended}{stage}", params]
        results = record.results
        found = results and results.metric
        cells += [number(found.value), interval(found)] if found else ["", ""]
        cells += [_number(results.baseline), _number(results.log_loss)] if results else ["", ""]
        cells.append("" if record.seconds is None else f"{record.seconds:.0f}")
        return [*cells, *record.verdicts]

    def _changed_in_short(self, record: ExperimentRecord) -> str:
        """Format the params that differ; a changed network stands for its arguments.

        Arguments that differ between experiments with the same network are named all the same.
        """
        changed = self.changed_params(record)
        network = record.params.get(_NETWORK)
        same = [other for other in self.every if other.params.get(_NETWORK) == network]
        of_network = [key for key in changed if key.startswith(_ARGUMENTS)]
        hidden = [
            key
            for key in of_network
            if _NETWORK in changed and all(other.params.get(key) == changed[key] for other in same)
        ]
        words = {key: f"{key}={as_yaml(value)}" for key, value in changed.items()}
        if len(hidden) > 1:
            words = {key: text for key, text in words.items() if key not in hidden}
            others = "other " if len(hidden) < len(of_network) else ""
            words[_NETWORK] += f" with its {len(hidden)} {others}arguments"
        return "; ".join(words.values())

    def entries(self) -> list[dict[str, Any]]:
        """Return the rows for JSON, with full precision."""
        return [
            {
                "name": record.name,
                "started": record.started,
                "status": record.ended,
                "cause": record.reason,
                "ended_at": record.ended_at,
                "stage": record.stage,
                "seconds": record.seconds,
                "cost": self.cost(record),
                "params": self.changed_params(record),
                "results": record.results.model_dump(mode="json") if record.results else None,
                "search": record.search,
                "validation": record.validation and record.validation.model_dump(mode="json"),
            }
            for record in self.records
        ]

    def csv(self) -> str:
        """Return the rows as CSV, with a column for each param that differs."""
        columns = [
            *("name", "started", "status", "cause", "stage", "metric", "value", "low", "high"),
            *("baseline", "log_loss", "seconds", "gates", "certificate", "validation"),
        ]
        costs = [] if self.gpu_hour is None else ["cost"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*columns, *costs, *self.changed])
        for record in self.records:
            params = self.changed_params(record)
            named = (value_of(record, _CSV_NAMES.get(column, column)) for column in columns)
            cost = [self.cost(record) for _ in costs]
            writer.writerow([*named, *cost, *(params.get(key, "") for key in self.changed)])
        return text.getvalue()

    def _condition(self, text: str) -> Callable[[ExperimentRecord], bool]:
        found = _CONDITION.fullmatch(text)
        if found is None or (found[2][0] in "<>" and not found[3]):
            raise ParamsError(
                f"the filter {text!r} is not understood, expected KEY, one of = != < <= > >=, and "
                "a value, such as 'train.epochs>5' or status=failed."
            )
        key, sign, expected = found.groups()
        self._check(key)
        return lambda record: _holds(value_of(record, key), sign, expected)

    def _check(self, key: str) -> None:
        known = [*_COLUMNS, *dict.fromkeys(key for record in self.every for key in record.params)]
        if self.every and key not in known:
            near = hint(key, known, "a key of params.yaml, or")
            if len(near) > 200:
                near = f"a key of params.yaml, or {', '.join(_COLUMNS)}"
            raise ParamsError(f"{key!r} is not a column to sort or filter by; {near}")


def read_comparison(gpu_hour: float | None = None) -> Comparison:
    """Read all experiments, newest first; ParamsError outside a project."""
    read_content()
    records = read_records()
    known = {record.name for record in records}
    others = [
        _from_commit(name, commit)
        for name, commit in repository.experiments().items()
        if name not in known
    ]
    every = sorted([*records, *others], key=lambda record: _time(record.started), reverse=True)
    return Comparison(every, every, gpu_hour)


def value_of(record: ExperimentRecord, key: str) -> Any:
    """Return a value of an experiment by its column or by its key in params.yaml."""
    return _COLUMNS[key](record) if key in _COLUMNS else record.params.get(key)


def _of_results(name: str) -> Callable[[ExperimentRecord], Any]:
    def value(record: ExperimentRecord) -> Any:
        found = getattr(record.results, name, None)
        return None if found == "" else found

    return value


def _of_metric(name: str) -> Callable[[ExperimentRecord], Any]:
    def value(record: ExperimentRecord) -> Any:
        found = record.results and record.results.metric
        return getattr(found, name) if found else None

    return value


_COLUMNS: Mapping[str, Callable[[ExperimentRecord], Any]] = {
    "name": lambda record: record.name,
    "started": lambda record: record.started,
    "status": lambda record: record.ended,
    "cause": lambda record: record.reason,
    "stage": lambda record: record.stage,
    "metric": _of_metric("value"),
    "low": _of_metric("low"),
    "high": _of_metric("high"),
    "headline": _of_results("headline"),
    "baseline": _of_results("baseline"),
    "log_loss": _of_results("log_loss"),
    "seconds": lambda record: record.seconds,
    "gates": _of_results("gates"),
    "certificate": _of_results("certificate"),
    "validation": lambda record: record.validation and record.validation.value,
}
_CSV_NAMES = {"metric": "headline", "value": "metric"}


def _validation(record: ExperimentRecord) -> str:
    """Format the score by which a search selects, such as "accuracy 0.98 (0.96 to 0.99)"."""
    found = record.validation
    if found is None:
        return ""
    reach = f" ({interval(found.metric)})" if found.metric else f" after epoch {found.epoch}"
    return f"{found.name} {number(found.value)}{reach}"


def _from_commit(name: str, commit: str) -> ExperimentRecord:
    """Return the record of an experiment that only DVC knows, from its commit."""
    paths = ["params.yaml", *(path.as_posix() for path in (METRICS, GATES, TRAINED, VERIFIED))]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        repository.write_files(commit, paths, root)
        content = read_content(root / "params.yaml") if (root / "params.yaml").is_file() else {}
        results = read_results(root, ("evaluate", "verify"), content)
    return ExperimentRecord(
        format_version=1,
        name=name,
        started=repository.commit_time(commit),
        seconds=None,
        status="done",
        cause="",
        stage=None,
        params=params_of(content),
        results=results,
        process=0,
        group=None,
    )


def _holds(value: Any, sign: str, expected: str) -> bool:
    if value is None and expected != "null":
        return sign == "!="
    if sign in ("=", "!="):
        return (as_yaml(value).strip("'") == expected or _equal(value, expected)) is (sign == "=")
    try:
        found, bound = float(value), float(expected)
    except (TypeError, ValueError):
        return False
    return {"<": found < bound, "<=": found <= bound, ">": found > bound, ">=": found >= bound}[
        sign
    ]


def _equal(value: Any, expected: str) -> bool:
    try:
        return float(value) == float(expected)
    except (TypeError, ValueError):
        return False


def _listed(lines: Sequence[str], width: int) -> str:
    """Wrap each line to `width` columns, with an indent."""
    wrapped = [
        textwrap.wrap(
            line,
            max(width, _NARROWEST),
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    ]
    return "\n".join(line for found in wrapped for line in found)


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _local(text: str) -> str:
    """Format a time in this machine's time zone, to the minute."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
