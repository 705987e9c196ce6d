"""Cleaning of images: decodes every image in full and refuses unusable ones by named rules.

Nothing is repaired, relabelled or dropped silently: kept + quarantined == read. The result depends
on the content of the data, not on the order of files or the number of workers. Facts (measures of
each image) and thumbnails are in scratch files; memory holds only a few numbers per image.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.parallel import Engine, chunked, ordered_map
from slipway.data.engine.progress import progress
from slipway.data.engine.rows import ID_DIGITS, ROWS, hex_strings
from slipway.data.engine.scratch import first_bytes, store_table, take_rows
from slipway.data.images.duplicate_clusters import (
    NO_CLUSTER,
    ClusteredRows,
    apply_near_duplicate_rule,
)
from slipway.data.images.exact_duplicates import DigestPixels, apply_exact_duplicate_rule
from slipway.data.images.inspection import OF_16_BITS, Inspector, PixelDigester
from slipway.data.images.thumbnails import thumbnail_file
from slipway.data.rules.findings import RuleFindings
from slipway.data.rules.outliers import robust_deviations
from slipway.data.rules.report import (
    CleanReport,
    CleanResult,
    clean_report,
    summarise_clusters,
)
from slipway.data.rules.result import Cleaned
from slipway.data.rules.rules import IMAGE_RULES
from slipway.data.sources import sources
from slipway.data.sources.checksums import ChecksumList, read_checksums
from slipway.data.sources.samples import RawSample
from slipway.data.splits.split_file import SplitFile, read_split_file
from slipway.kinds.registry import Task, kind_of
from slipway.system.errors import linked

_BLOCK_ROWS = 128
_BLOCK_BYTES = 4 << 20
_WRITTEN_ROWS = 1 << 14  # rows that one batch writes


def check_images(data: DataParams) -> None:
    """Raise DataError if `data.path` is missing or its table lacks a column."""
    next(iter(sources.read_samples(data, read_files=False)), None)  # only one, to be quick


def clean_images(data: DataParams, clean: CleanParams) -> CleanResult:
    """Decode and compare every raw image; return the rows to keep and to refuse."""
    checksums = read_checksums(Path(data.checksums), data) if data.checksums else None
    num_workers, engine = clean.num_workers, data.engine
    # The workers of a cluster do not share our files.
    read = partial(sources.read_samples, data, read_files=engine == "ray")
    several = kind_of(data.task).target.several
    batches = clean_samples(read(), clean, num_workers, data.classes, engine, several=several)
    num_images = sources.count_samples(data)
    cleaned = compare_samples(
        progress(batches, "clean", num_images, lambda batch: batch.num_rows),
        clean,
        data.task,
        lambda wanted: digest_pixels(read(wanted), clean, num_workers, engine),
        checksums,
        read_split_file(data),
    )
    report = partial(image_report, cleaned, clean, data)
    hints, skipped = _hints(cleaned), sources.skipped_text(data)
    return CleanResult(
        cleaned,
        report,
        "{} # images have no columns\n",
        notes=lambda columns: skipped,
        hints=hints,
    )


def _hints(cleaned: Cleaned) -> list[str]:
    found = ["source", "rule", "detail"]
    narrow = cleaned.flagged.filter(pc.equal(cleaned.flagged["rule"], "narrow_range"))
    refused = cleaned.quarantine.filter(
        pc.match_substring(cleaned.quarantine["detail"], OF_16_BITS)
    )
    narrow = pa.concat_tables([narrow.select(found), refused.select(found)])
    if not narrow.num_rows:
        return []
    first = narrow.slice(0, 1).to_pylist()[0]
    return [
        f"{narrow.num_rows} images of 16 bits are nearly black to the network ({first['source']}: "
        f"{first['detail']}). Stretch them with a function in precompute.transform, by a factor "
        + linked("of 16 for 12 bits, 64 for 10; docs/explanation/precompute.md shows one")
    ]


def clean_samples(
    samples: Iterable[RawSample],
    params: CleanParams,
    num_workers: int,
    classes: Iterable[str] | None = None,
    engine: Engine = "local",
    *,
    several: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Decode and check each sample by itself; yield batches of FACTS in the order of the samples.

    `num_workers` is the number of processes; 0 means one per core. `several` is True if the label
    of a sample is a set of labels.
    """
    inspect = Inspector(params, None if classes is None else frozenset(classes), several)
    return ordered_map(inspect, _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


def digest_pixels(
    samples: Iterable[RawSample], params: CleanParams, num_workers: int, engine: Engine = "local"
) -> Iterator[pa.RecordBatch]:
    """Digest all pixels of samples that passed inspection; yield batches of PIXELS in order."""
    digest = PixelDigester(params.max_pixels)
    return ordered_map(digest, _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


def _blocks(samples: Iterable[RawSample]) -> Iterator[list[RawSample]]:
    return chunked(samples, lambda sample: len(sample.payload), _BLOCK_ROWS, _BLOCK_BYTES)


def compare_samples(
    batches: Iterable[pa.RecordBatch],
    params: CleanParams,
    task: Task,
    digest_pixels: DigestPixels,
    checksums: ChecksumList | None = None,
    split_file: SplitFile | None = None,
) -> Cleaned:
    """Refuse samples by comparing them with each other and with the user's checksums.

    `digest_pixels` reads some samples again. Raises DataError if they have changed meanwhile.
    """
    findings = RuleFindings(params.rules)
    with thumbnail_file() as thumbnails:
        facts = store_table(map(thumbnails.take_from, batches), thumbnails.schema)
        facts = checksums.check(facts) if checksums else facts
        facts = split_file.assign(facts) if split_file else facts
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


def _apply_outlier_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    params: CleanParams,
    task: Task,
    findings: RuleFindings,
) -> NDArray[np.int64]:
    if kind_of(task).target.has_classes or findings.action("outlier") is None:
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
    for begin in range(0, len(kept.rows), _WRITTEN_ROWS):
        part = slice(begin, begin + _WRITTEN_ROWS)
        table = take_rows(facts, kept.rows[part])
        clusters = kept.clusters[part]
        digests = first_bytes(table["sha256"], 32)
        columns = {name: table[name] for name in ROWS.names if name in table.column_names}
        columns |= {
            "id": hex_strings(digests[:, : ID_DIGITS // 2]),
            "sha256": hex_strings(digests),
            "flags": findings.flags_of(table["source"]),
            "cluster": kept.names.take(pa.array(clusters, mask=clusters == NO_CLUSTER)),
        }
        yield from pa.table([columns[name] for name in ROWS.names], schema=ROWS).to_batches()


def image_report(cleaned: Cleaned, clean: CleanParams, data: DataParams) -> CleanReport:
    """Return the numbers of kept and refused images by rule, with examples."""
    # Refused near duplicates leave no cluster.
    clusters = summarise_clusters(cleaned.rows) if clean.rules.near_duplicate == "flag" else None
    hints = _hints(cleaned)
    return clean_report(cleaned, IMAGE_RULES, data, clean, clusters=clusters, hints=hints)
