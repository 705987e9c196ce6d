"""Cleaning: every image is decoded in full, and what cannot be used is refused under the name of a rule.

Nothing is repaired, relabelled or dropped in silence: kept + quarantined == read. The result depends on the content of the
data, not on the order of files or the number of workers. Facts and thumbnails lie in files without names; what is held in memory
for each image are its place and a few numbers.
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
from slipway.data.engine.scratch_arrays import full, rows_where, taken
from slipway.data.engine.scratch_tables import gathered, is_present, numbers, stored
from slipway.data.images.duplicate_clusters import ClusteredRows, apply_near_duplicate_rule
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
_WRITTEN_ROWS = 1 << 14  # at a time


@dataclass(frozen=True)
class Cleaned:
    """What is kept (`rows.ROWS`, by id), refused (`rows.QUARANTINE`, by rule and source), flagged, and how many were read."""

    rows: pa.Table
    quarantine: pa.Table
    num_read: int
    flagged: pa.Table = field(default_factory=FINDINGS.empty_table)  # FINDINGS, by rule and source

    @property
    def num_bad(self) -> int:
        """The refused samples without the duplicates."""
        return int(pc.sum(pc.equal(self.quarantine["severity"], "error")).as_py() or 0)

    def summary(self, *reports: Path) -> str:
        """A line with every count and where to look, and one of copies between given splits."""
        duplicates = self.num_read - self.rows.num_rows - self.num_bad
        counts = f"read {self.num_read}, kept {self.rows.num_rows}, bad {self.num_bad}, duplicates {duplicates}"
        leaking = int(
            pc.sum(pc.match_substring(self.quarantine["detail"], rules.IN_ANOTHER_SPLIT)).as_py()
            or 0
        )
        copies = f"\ncopies of rows in another given split: {leaking}; the copy in test, else in val, is kept"
        return f"{counts}, see {' and '.join(map(str, reports))}{copies * bool(leaking)}"


def clean_samples(
    samples: Iterable[RawSample],
    params: CleanParams,
    num_workers: int,
    classes: Iterable[str] | None = None,
    engine: Engine = "local",
) -> Iterator[pa.RecordBatch]:
    """Decode and check each sample by itself, over `num_workers` processes (0: one per core): batches of `FACTS`, in order."""
    inspect = Inspector(params, None if classes is None else frozenset(classes))
    return ordered_map(inspect, _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


def digest_pixels(
    samples: Iterable[RawSample], params: CleanParams, num_workers: int, engine: Engine = "local"
) -> Iterator[pa.RecordBatch]:
    """Batches of `PIXELS`, in the order of the samples, which were inspected before."""
    return ordered_map(
        PixelDigester(params.max_pixels),
        _blocks(samples),
        num_workers,
        lambda block: _BLOCK_BYTES,
        engine,
    )


def _blocks(samples: Iterable[RawSample]) -> Iterator[list[RawSample]]:
    """Samples by the hundred, fewer where their payloads are large."""
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


def collect(
    batches: Iterable[pa.RecordBatch],
    params: CleanParams,
    task: Task,
    again: DigestPixels,
    digests: ChecksumList | None = None,
) -> Cleaned:
    """Compare the samples with each other and with the user's digests, and sort them into kept, flagged and refused.

    `again` reads samples a second time; DataError if they are not what they were.
    """
    findings = RuleFindings(params.rules)
    with thumbnail_file() as thumbnails:
        facts = stored(map(thumbnails.take_from, batches), thumbnails.schema)
        facts = digests.check(facts) if digests else facts
        alone = pc.is_valid(facts["rule"])
        findings.refuse_table(facts.select(["source", "rule", "detail"]).filter(alone))
        rows = rows_where(~is_present(facts["rule"]))
        rows = apply_exact_duplicate_rule(facts, rows, thumbnails, again, findings)
        rows = _without_outliers(facts, rows, params, task, findings)
        named = apply_near_duplicate_rule(
            facts, rows, thumbnails, params.near_duplicate_bits, findings
        )
    findings.flag_tables(_with_flags(facts, named.rows))
    if len(named.rows) + findings.num_refused != facts.num_rows:
        raise AssertionError(
            f"{len(named.rows)} kept + {findings.num_refused} refused is not {facts.num_rows} read"
        )
    kept = stored(_row_batches(facts, named, findings), ROWS)
    return Cleaned(kept, findings.quarantine(), facts.num_rows, findings.flagged())


def check_usable(cleaned: Cleaned, params: CleanParams, task: Task) -> None:
    """DataError when too much was refused, or when what is left cannot teach anything."""
    if not cleaned.num_read:
        raise DataError("data.path holds no sample at all, expected images.")
    share = cleaned.num_bad / cleaned.num_read
    if share > params.max_bad_fraction:
        raise DataError(
            f"{cleaned.num_bad} of {cleaned.num_read} samples are bad, a share of {share:.4f}, "
            f"above clean.max_bad_fraction {params.max_bad_fraction}:\n{_listing(cleaned.quarantine)}\n"
            "Mend or remove them, or raise clean.max_bad_fraction."
        )
    if not cleaned.rows.num_rows:
        raise DataError(
            f"none of {cleaned.num_read} samples is left:\n{_listing(cleaned.quarantine)}\nMend them."
        )
    distinct = pc.unique(cleaned.rows["label" if is_classification(task) else "target"])
    if len(distinct) < 2:
        kind = "class" if is_classification(task) else "target"
        raise DataError(
            f"all {cleaned.rows.num_rows} kept samples have the {kind} {distinct[0].as_py()!r}, expected at least two. "
            "Check data.path and data.target_column."
        )


def _listing(quarantine: pa.Table) -> str:
    lines = []
    for rule in sorted(pc.unique(quarantine["rule"]).to_pylist()):
        rows = quarantine.filter(pc.equal(quarantine["rule"], rule))
        lines.append(
            f"  {rule}: {rows.num_rows}"
            + " (duplicates do not count as bad)" * (rule in rules.DUPLICATES)
        )
        lines += [
            f"    {row['source']}: {row['detail']}" for row in rows.slice(0, _MAX_SHOWN).to_pylist()
        ]
    return "\n".join(lines)


def _without_outliers(
    facts: pa.Table,
    rows: NDArray[np.int64],
    params: CleanParams,
    task: Task,
    findings: RuleFindings,
) -> NDArray[np.int64]:
    """Targets far from the others."""
    if is_classification(task) or findings.action("outlier") is None:
        return rows
    targets = taken(numbers(facts["target"]), rows)
    median, deviations = robust_deviations(targets)
    far = rows_where(deviations > params.outlier_mad_threshold)
    details = [
        f"the target is {value:g}, {deviation:.1f} robust standard deviations from the median {median:g}"
        for value, deviation in zip(targets[far], deviations[far], strict=True)
    ]
    found = gathered(facts.select(["source"]), rows[far])
    findings.apply(
        found, pa.array(np.ones(found.num_rows, bool)), "outlier", pa.array(details, pa.string())
    )
    if findings.action("outlier") != "refuse":
        return rows
    is_left = full(len(rows), True, np.bool_)
    is_left[far] = False
    return taken(rows, rows_where(is_left))


def _with_flags(facts: pa.Table, rows: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Batches of those of the rows that have flags already."""
    is_kept, begin = full(facts.num_rows, False, np.bool_), 0
    is_kept[rows] = True
    for batch in facts.select(["source", "flags", "flag_details"]).to_batches():
        kept = pa.array(is_kept[begin : begin + batch.num_rows])
        yield batch.filter(pc.and_(kept, pc.greater(pc.list_value_length(batch["flags"]), 0)))
        begin += batch.num_rows


def _row_batches(
    facts: pa.Table, named: ClusteredRows, findings: RuleFindings
) -> Iterator[pa.RecordBatch]:
    """Batches of ROWS, by id."""
    for begin in range(0, len(named.rows), _WRITTEN_ROWS):
        clusters = named.clusters[begin : begin + _WRITTEN_ROWS]
        kept = gathered(facts, named.rows[begin : begin + _WRITTEN_ROWS])
        columns = {name: kept[name] for name in ROWS.names if name in kept.column_names}
        columns |= {
            "id": ids(kept["sha256"]),
            "sha256": hexadecimal(kept["sha256"]),
            "flags": findings.flags_of(kept["source"]),
        }
        columns |= {"cluster": named.names.take(pa.array(clusters, mask=clusters < 0))}
        yield from pa.table([columns[name] for name in ROWS.names], schema=ROWS).to_batches()
