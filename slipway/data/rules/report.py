"""What `clean` found, for `reports/clean.json` and its page: counts and examples by rule, the same for images and tables.

The record is plain: it is made where the rules ran, and drawn by `slipway.reports.pages.clean_page`, which needs nothing else.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike
from pydantic import NonNegativeInt

from slipway.system.contract import Contract

MAX_EXAMPLES = 20
Column: TypeAlias = "pa.ChunkedArray | ArrayLike"


class Example(Contract):
    """One sample that breaks a rule."""

    source: str
    detail: str


class RuleCount(Contract):
    """The number of samples that broke a rule, and the first of them by source."""

    count: NonNegativeInt
    severity: Literal["error", "duplicate", "flag"]
    meaning: str
    examples: list[Example]  # at most MAX_EXAMPLES


class TargetSummary(Contract):
    """Statistics of a numeric target over the kept rows."""

    min: float
    p25: float
    median: float
    p75: float
    max: float
    mean: float
    std: float
    histogram: list[NonNegativeInt]  # rows in bins of equal width between min and max


class ColumnSummary(Contract):
    """A column of a table and its use."""

    name: str
    kind: str
    missing: NonNegativeInt
    note: str  # "" where there is nothing to say


class Clusters(Contract):
    """Near duplicates among the kept images."""

    count: NonNegativeInt
    rows: NonNegativeInt  # in any cluster
    largest: NonNegativeInt  # rows in one cluster
    examples: list[list[str]]  # sources of the largest clusters, at most four of each


class CleanReport(Contract):
    """`reports/clean.json`. `refused` and `flagged` are by the rule's name; `kept` and the refused ones are what was `read`."""

    read: NonNegativeInt
    kept: NonNegativeInt
    refused: dict[str, RuleCount]
    flagged: dict[str, RuleCount]
    corrections: dict[str, NonNegativeInt]  # rows by what was changed: {"label: Cat -> cat": 3}
    classes: dict[str, NonNegativeInt] | None  # kept rows by class; null for a numeric target
    target: TargetSummary | None  # null for classes
    checks: list[str]  # the rules that ran
    not_checked: dict[str, str]  # the rules that did not, and why
    columns: list[ColumnSummary]  # of a table; empty for images
    clusters: Clusters | None = (
        None  # null for tables, and where near duplicates are not looked for
    )


def rule_counts(
    rules: Column, sources: Column, details: Column, severities: Column, meanings: Mapping[str, str]
) -> dict[str, RuleCount]:
    """Count samples by rule, with examples, from four columns of equal length."""
    columns = {"rule": rules, "source": sources, "detail": details, "severity": severities}
    table = pa.table(
        {
            name: column if isinstance(column, pa.ChunkedArray) else pa.array(column)
            for name, column in columns.items()
        }
    )
    names = sorted(pc.unique(table["rule"]).to_pylist())
    return {
        name: _rule_count(table.filter(pc.equal(table["rule"], name)), meanings[name])
        for name in names
    }


def _rule_count(table: pa.Table, meaning: str) -> RuleCount:
    first = table.take(
        pc.select_k_unstable(
            table, MAX_EXAMPLES, [("source", "ascending"), ("detail", "ascending")]
        )
    ).to_pylist()
    examples = [Example(source=row["source"], detail=row["detail"]) for row in first]
    return RuleCount(
        count=table.num_rows, severity=first[0]["severity"], meaning=meaning, examples=examples
    )


def class_counts(labels: pa.ChunkedArray) -> dict[str, int]:
    """Count rows by class name."""
    counts = pc.value_counts(labels).to_pylist()
    return dict(sorted((entry["values"], entry["counts"]) for entry in counts))


def target_summary(targets: ArrayLike, num_bins: int = 30) -> TargetSummary:
    """Summarise (N,) finite numbers, N at least 1."""
    values = np.asarray(targets, np.float64)
    names = ("min", "p25", "median", "p75", "max")
    quantiles = {
        name: float(value)
        for name, value in zip(names, np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), strict=True)
    }
    histogram = [int(count) for count in np.histogram(values, num_bins)[0]]
    return TargetSummary(
        **quantiles, mean=float(values.mean()), std=float(values.std()), histogram=histogram
    )


def correction_counts(corrections: pa.ChunkedArray) -> dict[str, int]:
    """Count rows by correction, from the column `corrections` of `rows.ROWS`."""
    return class_counts(pc.list_flatten(corrections))


def to_json(report: CleanReport) -> dict[str, Any]:
    """Return the content of `reports/clean.json`, without null fields."""
    return report.model_dump(mode="json", exclude_none=True)
