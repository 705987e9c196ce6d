"""The content of `reports/clean.json` and its page: counts and examples by rule.

The record is the same for images and tables. `slipway.reports.pages.clean_page` draws the page
from this record only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeInt

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.label_sets import label_counts
from slipway.data.engine.rows import row_numbers
from slipway.data.rules.class_names import class_hints
from slipway.data.rules.result import Cleaned
from slipway.data.rules.rules import not_checked
from slipway.kinds.registry import kind_of
from slipway.system.contract import Contract

MAX_EXAMPLES = 20
_MAX_CLUSTERS, _MAX_OF_CLUSTER = 8, 4


class Example(Contract):
    """One sample that breaks a rule."""

    source: str
    detail: str


class RuleCount(Contract):
    """The number of samples that broke a rule, and the first few, ordered by source."""

    count: NonNegativeInt
    severity: Literal["error", "duplicate", "flag"]
    meaning: str
    examples: list[Example]  # at most MAX_EXAMPLES


class TargetSummary(Contract):
    """Statistics over the kept rows, of a numeric target or of a size."""

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
    note: str  # may be empty


class Clusters(Contract):
    """Near duplicates among the kept images."""

    count: NonNegativeInt
    rows: NonNegativeInt  # in any cluster
    largest: NonNegativeInt  # rows in one cluster
    examples: list[list[str]]  # sources of the largest clusters, at most four of each


class SharedPassage(Contract):
    """A lower-case passage that texts of one class share and texts of other classes lack."""

    text: str
    of: str  # the class
    fraction: float  # of the sampled texts of the class


class TextProfile(Contract):
    """Scripts of the kept texts, and the words and passages that distinguish each class."""

    scripts: dict[str, NonNegativeInt]  # kept rows by their main script
    sampled: NonNegativeInt  # rows that the terms and passages were found in
    terms: dict[str, list[str]]  # the most telling words and pairs of each class
    passages: list[SharedPassage]


class CleanReport(Contract):
    """The content of `reports/clean.json`; `kept` and the refused rows add up to `read`."""

    read: NonNegativeInt
    kept: NonNegativeInt
    refused: dict[str, RuleCount]  # by rule
    flagged: dict[str, RuleCount]  # by rule
    corrections: dict[str, NonNegativeInt]  # rows by correction: {"label: Cat -> cat": 3}
    classes: dict[str, NonNegativeInt] | None  # kept rows by class; null for a numeric target
    target: TargetSummary | None  # null for classes
    checks: list[str]  # the rules that ran
    not_checked: dict[str, str]  # the rules that did not run, with reasons
    columns: list[ColumnSummary]  # of a table; empty for images
    hints: list[str] = Field(default_factory=list)  # with lines of params.yaml to paste
    sizes: dict[str, TargetSummary] = Field(default_factory=dict)  # of kept images, by quantity
    clusters: Clusters | None = None  # null for tables, and unless near duplicates are flagged
    texts: TextProfile | None = None  # null without texts
    excerpts: dict[str, str] = Field(default_factory=dict)  # of the texts in examples, by source


@dataclass(frozen=True)
class CleanResult:
    """Cleaned data, and the outputs of the stage that depend on the kind of input."""

    cleaned: Cleaned
    report: Callable[[], CleanReport]  # only for usable data
    columns_yaml: str
    write: Callable[[Path], None] = lambda folder: None  # further files beside the rows
    notes: Callable[[Path], str] = lambda columns: ""  # for the console; names the columns' file
    hint: str = ""  # a likely cause if too many rows were refused
    hints: Sequence[str] = ()  # those that need no usable data


def clean_report(
    cleaned: Cleaned,
    rules: Mapping[str, str],
    data: DataParams,
    clean: CleanParams,
    columns: Sequence[ColumnSummary] = (),
    clusters: Clusters | None = None,
    hints: Sequence[str] = (),
    texts: TextProfile | None = None,
    characters: ArrayLike | None = None,
) -> CleanReport:
    """Summarise cleaned data; `rules` are those for its kind of input.

    `characters` are the lengths of the kept texts.
    """
    rows = cleaned.rows
    skipped = not_checked(rules, data, clean)
    target = kind_of(data.task).target
    has_classes = target.has_classes
    classes = None
    if has_classes:
        classes = label_counts(rows["label"]) if target.several else _counts(rows["label"])
    return CleanReport(
        read=cleaned.num_read,
        kept=rows.num_rows,
        refused=_rule_counts(cleaned.quarantine, rules),
        flagged=_rule_counts(cleaned.flagged, rules),
        corrections=_counts(pc.list_flatten(rows["corrections"])),
        classes=classes,
        target=None if has_classes else target_summary(rows["target"].to_numpy()),
        checks=sorted(rules.keys() - skipped.keys()),
        not_checked=dict(sorted(skipped.items())),
        columns=list(columns),
        hints=[*hints, *(class_hints(classes, data.label_map) if classes else [])],
        sizes=_sizes(rows, characters),
        clusters=clusters,
        texts=texts,
    )


def summarise_clusters(rows: pa.Table) -> Clusters:
    """Summarise the clusters of kept rows (`rows.ROWS`)."""
    named = rows.select(["cluster", "source"]).filter(pc.is_valid(rows["cluster"]))
    named = named.append_column("number", row_numbers(named["source"]))
    sizes = (
        named.group_by("cluster")
        .aggregate([("source", "count")])
        .sort_by([("source_count", "descending"), ("cluster", "ascending")])
    )
    counts = sizes["source_count"]
    shown = [
        named.filter(pc.equal(named["cluster"], cluster))
        .sort_by([("number", "ascending"), ("source", "ascending")])["source"]
        .slice(0, _MAX_OF_CLUSTER)
        .to_pylist()
        for cluster in sizes["cluster"].slice(0, _MAX_CLUSTERS).to_pylist()
    ]
    return Clusters(
        count=len(counts),
        rows=named.num_rows,
        largest=counts[0].as_py() if len(counts) else 0,
        examples=shown,
    )


def _sizes(rows: pa.Table, characters: ArrayLike | None) -> dict[str, TargetSummary]:
    if characters is not None:
        return {"characters": target_summary(characters)}
    if rows["width"].null_count == rows.num_rows:
        return {}
    return {name: target_summary(rows[name].to_numpy()) for name in ("width", "height", "bytes")}


def _rule_counts(findings: pa.Table, meanings: Mapping[str, str]) -> dict[str, RuleCount]:
    names = sorted(pc.unique(findings["rule"]).to_pylist())
    by_rule = {name: findings.filter(pc.equal(findings["rule"], name)) for name in names}
    return {name: _rule_count(table, meanings[name]) for name, table in by_rule.items()}


def _rule_count(table: pa.Table, meaning: str) -> RuleCount:
    table = table.append_column("number", row_numbers(table["source"]))
    keys = [(name, "ascending") for name in ("number", "source", "detail")]
    first = table.take(pc.select_k_unstable(table, MAX_EXAMPLES, keys)).to_pylist()
    examples = [Example(source=row["source"], detail=row["detail"]) for row in first]
    return RuleCount(
        count=table.num_rows, severity=first[0]["severity"], meaning=meaning, examples=examples
    )


def _counts(texts: pa.ChunkedArray) -> dict[str, int]:
    counts = pc.value_counts(texts).to_pylist()
    return dict(sorted((entry["values"], entry["counts"]) for entry in counts))


def target_summary(targets: ArrayLike, num_bins: int = 30) -> TargetSummary:
    """Summarise (N,) finite numbers, N at least 1."""
    values = np.asarray(targets, np.float64)
    names = ("min", "p25", "median", "p75", "max")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return TargetSummary(
        **dict(zip(names, quantiles, strict=True)),
        mean=float(values.mean()),
        std=float(values.std()),
        histogram=np.histogram(values, num_bins)[0].tolist(),
    )
