"""Content of `reports/clean.json`: the counts of samples and examples for each rule.

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
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeInt

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.label_sets import label_counts
from slipway.data.engine.rows import row_numbers
from slipway.data.engine.scratch import (
    numbers_of,
    order_by,
    scratch_array,
    slices,
    take_rows,
    true_rows,
)
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
    """The number of samples that broke a rule, and the first few by source."""

    count: NonNegativeInt
    severity: Literal["error", "unlabelled", "duplicate", "flag"]
    meaning: str
    examples: list[Example]  # at most MAX_EXAMPLES of them


class TargetSummary(Contract):
    """Statistics of a numeric target, or of a size, over the kept rows."""

    min: float
    p25: float
    median: float
    p75: float
    max: float
    mean: float
    std: float
    histogram: list[NonNegativeInt]  # rows in bins of equal width between min and max


class ColumnSummary(Contract):
    """A column of a table, and the use that is made of it."""

    name: str
    kind: str
    missing: NonNegativeInt
    note: str  # may be empty


class Clusters(Contract):
    """The clusters of near duplicates among the kept images."""

    count: NonNegativeInt
    rows: NonNegativeInt  # rows that are in any cluster
    largest: NonNegativeInt  # rows in the largest cluster
    examples: list[list[str]]  # sources of the largest clusters, at most four of each


class SharedPassage(Contract):
    """A passage in lower case that texts of one class share and texts of other classes lack."""

    text: str
    of: str  # the class whose texts share the passage
    fraction: float  # fraction of the sampled texts of the class


class TextProfile(Contract):
    """The scripts of the kept texts, and the words and passages that are typical of each class."""

    scripts: dict[str, NonNegativeInt]  # kept rows by their main script
    sampled: NonNegativeInt  # rows that the terms and passages were found in
    terms: dict[str, list[str]]  # the most telling words and pairs of each class
    passages: list[SharedPassage]


class CleanReport(Contract):
    """The content of `reports/clean.json`; `kept` and the refused rows add up to `read`."""

    read: NonNegativeInt
    kept: NonNegativeInt
    refused: dict[str, RuleCount]  # numbers of refused rows by rule
    flagged: dict[str, RuleCount]  # numbers of flagged rows by rule
    corrections: dict[str, NonNegativeInt]  # rows by correction: {"label: Cat -> cat": 3}
    classes: dict[str, NonNegativeInt] | None  # kept rows by class; null for a numeric target
    target: TargetSummary | None  # null for classes
    checks: list[str]  # the rules that ran
    not_checked: dict[str, str]  # the rules that did not run, with reasons
    columns: list[ColumnSummary]  # columns of a table; empty for images
    hints: list[str] = Field(default_factory=list)  # advice with lines of params.yaml to paste
    sizes: dict[str, TargetSummary] = Field(default_factory=dict)  # of kept images, by quantity
    clusters: Clusters | None = None  # null for tables, and unless near duplicates are flagged
    texts: TextProfile | None = None  # null without texts
    excerpts: dict[str, str] = Field(default_factory=dict)  # of the texts in examples, by source


@dataclass(frozen=True)
class CleanResult:
    """Cleaned data, and the further outputs of `clean` that depend on the kind of input."""

    cleaned: Cleaned
    report: Callable[[], CleanReport]  # called only for usable data
    columns_yaml: str
    write: Callable[[Path], None] = lambda folder: None  # further files beside the rows
    notes: Callable[[Path], str] = lambda columns: ""  # for the console; names the columns' file
    hint: str = ""  # a likely cause if too many rows were refused
    hints: Sequence[str] = ()  # hints that need no usable data


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
    """Return the report on cleaned data; `rules` are the rules for its kind of input.

    `characters` are the lengths of the kept texts, in characters.
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
    """Summarise the clusters in kept rows of the schema ROWS."""
    named = true_rows(numbers_of(pc.is_valid(rows["cluster"]), np.bool_))
    keys = scratch_array((len(named), 2), np.uint64)
    begin = 0
    for chunk in rows["cluster"].chunks:
        ids = bytes.fromhex("".join(chunk.drop_null().to_pylist()))
        found = np.frombuffer(ids, ">u8").reshape(-1, 2)
        keys[begin : begin + len(found)] = found
        begin += len(found)
    order = order_by(*keys.T)  # by cluster, and within it by id
    is_new = scratch_array((len(order),), np.bool_)
    is_new[:1] = True
    for part in slices(max(0, len(order) - 1)):
        is_new[1:][part] = (keys[order[1:][part]] != keys[order[:-1][part]]).any(axis=1)
    begins = np.append(true_rows(is_new), len(order))
    sizes = np.diff(begins)
    largest = np.argsort(-sizes, kind="stable")[:_MAX_CLUSTERS]

    def first_sources(place: int) -> list[str]:
        own = np.sort(named[order[begins[place] : begins[place + 1]]])
        table = take_rows(rows.select(["source"]), own)
        table = table.append_column("number", row_numbers(table["source"]))
        table = table.sort_by([("number", "ascending"), ("source", "ascending")])
        shown: list[str] = table["source"].slice(0, _MAX_OF_CLUSTER).to_pylist()
        return shown

    return Clusters(
        count=len(sizes),
        rows=len(named),
        largest=int(sizes.max(initial=0)),
        examples=[first_sources(place) for place in largest.tolist()],
    )


def _sizes(rows: pa.Table, characters: ArrayLike | None) -> dict[str, TargetSummary]:
    if characters is not None:
        return {"characters": target_summary(characters)}
    if rows["width"].null_count == rows.num_rows:
        return {}
    return {name: target_summary(rows[name].to_numpy()) for name in ("width", "height", "bytes")}


def _rule_counts(findings: pa.Table, meanings: Mapping[str, str]) -> dict[str, RuleCount]:
    counts = _counts(findings["rule"])
    return {name: _rule_count(findings, name, counts[name], meanings[name]) for name in counts}


def _rule_count(findings: pa.Table, rule: str, count: int, meaning: str) -> RuleCount:
    keys = [(name, "ascending") for name in ("number", "source", "detail")]
    first: pa.Table | None = None
    for batch in findings.to_batches():
        own = pa.Table.from_batches([batch]).filter(pc.equal(batch["rule"], rule))
        own = own.append_column("number", row_numbers(own["source"]))
        both = own if first is None else pa.concat_tables([first, own])
        if both.num_rows:  # pyarrow before 26 fails on an empty table
            first = both.take(pc.select_k_unstable(both, MAX_EXAMPLES, keys))
    rows = first.to_pylist() if first else []
    examples = [Example(source=row["source"], detail=row["detail"]) for row in rows]
    return RuleCount(count=count, severity=rows[0]["severity"], meaning=meaning, examples=examples)


def _counts(texts: pa.ChunkedArray) -> dict[str, int]:
    counts = pc.value_counts(texts).to_pylist()
    return dict(sorted((entry["values"], entry["counts"]) for entry in counts))


def target_summary(targets: ArrayLike, num_bins: int = 30) -> TargetSummary:
    """Summarise (N,) finite numbers in a histogram and other statistics; N is at least 1."""
    given = np.asarray(targets)
    values, squares = (scratch_array((len(given),), np.float64) for _ in range(2))
    values[:] = given
    mean = float(values.mean())
    np.square(np.subtract(values, mean, out=squares), out=squares)
    histogram = bin_counts(values, num_bins, float(values.min()), float(values.max()))
    values.sort()
    names = ("min", "p25", "median", "p75", "max")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1], overwrite_input=True).tolist()
    return TargetSummary(
        **dict(zip(names, quantiles, strict=True)),
        mean=mean,
        std=float(np.sqrt(squares.mean())),
        histogram=histogram,
    )


def bin_counts(values: NDArray[np.float64], num_bins: int, low: float, high: float) -> list[int]:
    """Count (N,) finite numbers in bins of equal width between `low` and `high`."""
    edges = np.linspace(low, high, num_bins + 1)
    if not (np.diff(edges) > 0).all():  # float64 has too few numbers between such large ones
        values, low, high = values - low, 0.0, high - low
    counts: list[int] = np.histogram(values, num_bins, (low, high))[0].tolist()
    return counts
