"""Cleaning of images: decodes every image in full and refuses unusable ones under the name of a rule.

Nothing is repaired, relabelled or dropped silently: kept + quarantined == read. The result depends
on the content of the data, not on the order of files or the number of workers. Facts and thumbnails
are in scratch files; memory holds only a few numbers per image.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import CleanParams
from slipway.data.engine.parallel import Engine, ordered_map
from slipway.data.engine.rows import ROWS, hexadecimal, ids
from slipway.data.engine.scratch import store_table, take_rows
from slipway.data.images.duplicate_clusters import (
    NO_CLUSTER,
    ClusteredRows,
    apply_near_duplicate_rule,
)
from slipway.data.images.exact_duplicates import DigestPixels, apply_exact_duplicate_rule
from slipway.data.images.inspection import Inspector, PixelDigester
from slipway.data.images.thumbnails import thumbnail_file
from slipway.data.rules import rules
from slipway.data.rules.findings import FINDINGS, RuleFindings
from slipway.data.rules.outliers import robust_deviations
from slipway.data.sources.checksums import ChecksumList
from slipway.data.sources.samples import RawSample
from slipway.kinds.registry import Task, is_classification
from slipway.system.errors import DataError

_BLOCK_ROWS = 128
_BLOCK_BYTES = 4 << 20
_MAX_SHOWN = 3
_WRITTEN_ROWS = 1 << 14  # in one batch


@dataclass(frozen=True)
class Cleaned:
    """The result of cleaning images or a table."""

    rows: pa.Table  # the kept samples: `rows.ROWS`, by id
    quarantine: pa.Table  # the refused ones: `rows.QUARANTINE`, by rule and source
    num_read: int
    flagged: pa.Table = field(default_factory=FINDINGS.empty_table)  # FINDINGS, by rule and source

    @property
    def num_bad(self) -> int:
        """Number of refused samples, not counting duplicates."""
        return int(pc.sum(pc.equal(self.quarantine["severity"], "error")).as_py() or 0)

    def summary(self, *reports: Path) -> str:
        """Return the counts in one line, and a second line if copies cross given splits."""
        num_kept, num_bad = self.rows.num_rows, self.num_bad
        num_duplicates = self.num_read - num_kept - num_bad
        counts = f"read {self.num_read}, kept {num_kept}, bad {num_bad}"
        summary = f"{counts}, duplicates {num_duplicates}, see {' and '.join(map(str, reports))}"
        is_leak = pc.match_substring(self.quarantine["detail"], rules.IN_ANOTHER_SPLIT)
        num_leaks = pc.sum(is_leak).as_py()
        if not num_leaks:
            return summary
        return (
            f"{summary}\ncopies of rows in another given split: {num_leaks}; "
            "the copy in test, else in val, is kept"
        )


def clean_samples(
    samples: Iterable[RawSample],
    params: CleanParams,
    num_workers: int,
    classes: Iterable[str] | None = None,
    engine: Engine = "local",
) -> Iterator[pa.RecordBatch]:
    """Decode and check each sample on its own; yields batches of FACTS in the order of the samples.

    `num_workers` processes share the work; 0 means one per core.
    """
    inspect = Inspector(params, None if classes is None else frozenset(classes))
    return ordered_map(inspect, _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


def digest_pixels(
    samples: Iterable[RawSample], params: CleanParams, num_workers: int, engine: Engine = "local"
) -> Iterator[pa.RecordBatch]:
    """Digest all pixels of samples that passed inspection; yields batches of PIXELS in order."""
    digest = PixelDigester(params.max_pixels)
    return ordered_map(digest, _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


def _blocks(samples: Iterable[RawSample]) -> Iterator[list[RawSample]]:
    block: list[RawSample] = []
    size = 0
    for sample in samples:
        block.append(sample)
        size += len(sample.payload)
        if len(block) >= _BLOCK_ROWS or size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def compare_samples(
    batches: Iterable[pa.RecordBatch],
    params: CleanParams,
    task: Task,
    digest_pixels: DigestPixels,
    checksums: ChecksumList | None = None,
) -> Cleaned:
    """Compare the samples with each other and with the user's checksums, and keep or refuse them.

    `digest_pixels` reads samples a second time; DataError if they changed meanwhile.
    """
    findings = RuleFindings(params.rules)
    with thumbnail_file() as thumbnails:
        facts = store_table(map(thumbnails.take_from, batches), thumbnails.schema)
        facts = checksums.check(facts) if checksums else facts
        is_refused = pc.is_valid(facts["rule"])
        findings.refuse_table(facts.select(["source", "rule", "detail"]).filter(is_refused))
        rows = np.flatnonzero(~is_refused.to_numpy())
        rows = apply_exact_duplicate_rule(facts, rows, thumbnails, digest_pixels, findings)
        rows = _apply_outlier_rule(facts, rows, params, task, findings)
        kept = apply_near_duplicate_rule(
            facts, rows, thumbnails, params.near_duplicate_bits, findings
        )
    findings.flag_tables(_flagged_batches(facts, kept.rows))
    if len(kept.rows) + findings.num_refused != facts.num_rows:
        raise AssertionError(
            f"{len(kept.rows)} kept + {findings.num_refused} refused is not {facts.num_rows} read"
        )
    table = store_table(_row_batches(facts, kept, findings), ROWS)
    return Cleaned(table, findings.quarantine(), facts.num_rows, findings.flagged())


def check_usable(cleaned: Cleaned, params: CleanParams, task: Task) -> None:
    """DataError if too much was refused, or if the rest cannot train a model."""
    if not cleaned.num_read:
        raise DataError("data.path holds no samples, expected images.")
    fraction = cleaned.num_bad / cleaned.num_read
    if fraction > params.max_bad_fraction:
        raise DataError(
            f"{cleaned.num_bad} of {cleaned.num_read} samples are bad, a fraction of "
            f"{fraction:.4f}, above clean.max_bad_fraction {params.max_bad_fraction}:\n"
            f"{_list_refused(cleaned.quarantine)}\n"
            "Fix or remove them, or raise clean.max_bad_fraction."
        )
    if not cleaned.rows.num_rows:
        raise DataError(
            f"none of {cleaned.num_read} samples is left:\n{_list_refused(cleaned.quarantine)}\n"
            "Fix them."
        )
    column, kind = ("label", "class") if is_classification(task) else ("target", "target")
    distinct = pc.unique(cleaned.rows[column])
    if len(distinct) < 2:
        raise DataError(
            f"all {cleaned.rows.num_rows} kept samples have the {kind} {distinct[0].as_py()!r}, "
            "expected at least two. Check data.path and data.target_column."
        )


def _list_refused(quarantine: pa.Table) -> str:
    lines = []
    for rule in sorted(pc.unique(quarantine["rule"]).to_pylist()):
        rows = quarantine.filter(pc.equal(quarantine["rule"], rule))
        note = " (duplicates do not count as bad)" if rule in rules.DUPLICATES else ""
        lines.append(f"  {rule}: {rows.num_rows}{note}")
        shown = rows.slice(0, _MAX_SHOWN).to_pylist()
        lines += [f"    {row['source']}: {row['detail']}" for row in shown]
    return "\n".join(lines)


def _apply_outlier_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    params: CleanParams,
    task: Task,
    findings: RuleFindings,
) -> NDArray[np.int64]:
    """Refuse or flag targets far from the others; return the rows that are kept."""
    if is_classification(task) or findings.action("outlier") is None:
        return rows
    targets = facts["target"].to_numpy()[rows]
    median, deviations = robust_deviations(targets)
    is_far = deviations > params.outlier_mad_threshold
    details = [
        f"the target is {value:g}, {deviation:.1f} robust standard deviations "
        f"from the median {median:g}"
        for value, deviation in zip(targets[is_far], deviations[is_far], strict=True)
    ]
    found = take_rows(facts.select(["source"]), rows[is_far])
    every = pa.array(np.ones(found.num_rows, bool))
    findings.apply(found, every, "outlier", pa.array(details, pa.string()))
    return rows[~is_far] if findings.action("outlier") == "refuse" else rows


def _flagged_batches(facts: pa.Table, rows: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Yield those of `rows` that inspection flagged."""
    is_kept = np.zeros(facts.num_rows, np.bool_)
    is_kept[rows] = True
    begin = 0
    for batch in facts.select(["source", "flags", "flag_details"]).to_batches():
        kept = pa.array(is_kept[begin : begin + batch.num_rows])
        yield batch.filter(pc.and_(kept, pc.greater(pc.list_value_length(batch["flags"]), 0)))
        begin += batch.num_rows


def _row_batches(
    facts: pa.Table, kept: ClusteredRows, findings: RuleFindings
) -> Iterator[pa.RecordBatch]:
    """Yield batches of ROWS, by id."""
    for begin in range(0, len(kept.rows), _WRITTEN_ROWS):
        part = slice(begin, begin + _WRITTEN_ROWS)
        table, clusters = take_rows(facts, kept.rows[part]), kept.clusters[part]
        columns = {name: table[name] for name in ROWS.names if name in table.column_names}
        columns |= {
            "id": ids(table["sha256"]),
            "sha256": hexadecimal(table["sha256"]),
            "flags": findings.flags_of(table["source"]),
            "cluster": kept.names.take(pa.array(clusters, mask=clusters == NO_CLUSTER)),
        }
        yield from pa.table([columns[name] for name in ROWS.names], schema=ROWS).to_batches()
