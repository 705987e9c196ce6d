"""Cleaning: every image is decoded in full, and what cannot be used is refused under the name of a rule.

Nothing is repaired, relabelled or dropped in silence: kept + quarantined == read. The result depends on the content of the
data, not on the order of files or the number of workers. Facts are held in Arrow columns, and the thumbnails in a file.

Of most JPEGs only the luma is decoded. Those that may have a copy with other bytes are read a second time, for a digest of all pixels.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.contract import Task, is_classification
from slipway.data import near_duplicates, rules
from slipway.data.digests import DigestList
from slipway.data.findings import FINDINGS, Findings
from slipway.data.image_quality import THUMBNAIL_PX
from slipway.data.inspection import PIXELS, Inspector, PixelDigester
from slipway.data.outliers import robust_deviations
from slipway.data.parallel import Engine, ordered_map
from slipway.data.possible_copies import possible_copies
from slipway.data.rows import ROWS
from slipway.data.samples import RawSample
from slipway.data.thumbnails import ThumbnailFile, thumbnail_file
from slipway.errors import DataError
from slipway.params import CleanParams

_BLOCK_ROWS = 128
_BLOCK_BYTES = 4 << 20
_MAX_SHOWN = 3
DigestPixels = Callable[[frozenset[str]], Iterable[pa.RecordBatch]]  # `digest_pixels` of the samples with these sources
_HEXADECIMAL = np.frombuffer(bytes(range(256)).hex().encode(), np.uint8).reshape(256, 2)  # the two digits of each byte


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
    return ordered_map(PixelDigester(params.max_pixels), _blocks(samples), num_workers, lambda block: _BLOCK_BYTES, engine)


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
    digests: DigestList | None = None,
) -> Cleaned:
    """Compare the samples with each other and with the user's digests, and sort them into kept, flagged and refused.

    `again` reads samples a second time; DataError if they are not what they were.
    """
    findings = Findings(params.rules)
    with thumbnail_file() as thumbnails:
        facts = pa.Table.from_batches(map(thumbnails.take_from, batches), thumbnails.schema)
        facts = digests.check(facts) if digests else facts
        num_read = facts.num_rows
        alone = pc.is_valid(facts["rule"])
        findings.refuse_table(facts.filter(alone))
        facts = facts.filter(pc.invert(alone))  # each step lets go of the table before it
        facts = _compare(_sorted(_with_pixels(facts, thumbnails, again)), findings)
        facts = _without_outliers(facts, params, task, findings)
        facts, clusters = _without_twins(facts, thumbnails, params, findings)
    findings.flag_table(facts)
    if facts.num_rows + findings.num_refused != num_read:
        raise AssertionError(f"{facts.num_rows} kept + {findings.num_refused} refused is not {num_read} read")
    return Cleaned(_rows(facts, clusters, findings), findings.quarantine(), num_read, findings.flagged())


def check_usable(cleaned: Cleaned, params: CleanParams, task: Task) -> None:
    """DataError when too much was refused, or when what is left cannot teach anything."""
    if not cleaned.num_read:
        raise DataError("data.path holds no sample at all, expected images.")
    share = cleaned.num_bad / cleaned.num_read
    if share > params.max_bad_share:
        raise DataError(
            f"{cleaned.num_bad} of {cleaned.num_read} samples are bad, a share of {share:.4f}, "
            f"above clean.max_bad_share {params.max_bad_share}:\n{_listing(cleaned.quarantine)}\n"
            "Mend or remove them, or raise clean.max_bad_share."
        )
    if not cleaned.rows.num_rows:
        raise DataError(f"none of {cleaned.num_read} samples is left:\n{_listing(cleaned.quarantine)}\nMend them.")
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
        lines.append(f"  {rule}: {rows.num_rows}" + " (duplicates do not count as bad)" * (rule in rules.DUPLICATES))
        lines += [f"    {row['source']}: {row['detail']}" for row in rows.slice(0, _MAX_SHOWN).to_pylist()]
    return "\n".join(lines)


def _sorted(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(column, "ascending") for column in ("pixels", "sha256", "group", "source")])


# The same pixels ------------------------------------------------------------------------------------------------------------------


def _with_pixels(rows: pa.Table, thumbnails: ThumbnailFile, again: DigestPixels) -> pa.Table:
    """The rows with `pixels` in each: what may have a copy is read again, and of the others equal bytes alone are equal."""
    is_digested = np.asarray(pc.is_valid(rows["pixels"]))
    if is_digested.all():
        return rows
    sizes = np.stack([rows["width"].to_numpy(), rows["height"].to_numpy()], axis=1)
    sha256 = _fixed_bytes(rows["sha256"])
    contents = np.ascontiguousarray(sha256[:, :8]).view(np.uint64)[:, 0]
    doubtful = possible_copies(thumbnails.at(rows["place"].to_numpy()), sizes, contents, is_digested)
    found = _read_again(rows.filter(pa.array(doubtful)), again)
    of_bytes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(sha256), [None, pa.py_buffer(np.ascontiguousarray(sha256[:, :16]))])
    of_pixels = found["pixels"].combine_chunks().take(pc.index_in(rows["sha256"].combine_chunks(), found["sha256"].combine_chunks()))
    pixels = pc.coalesce(rows["pixels"].combine_chunks(), of_pixels, of_bytes)
    return rows.set_column(rows.schema.get_field_index("pixels"), "pixels", pixels)


def _read_again(rows: pa.Table, again: DigestPixels) -> pa.Table:
    """PIXELS of one row of each content."""
    if not rows.num_rows:
        return PIXELS.empty_table()
    chosen = rows.group_by("sha256").aggregate([("source", "min")])
    found = pa.Table.from_batches(again(frozenset(chosen["source_min"].to_pylist())), PIXELS)
    sources = found["source"].combine_chunks()
    places = pc.index_in(chosen["source_min"].combine_chunks(), sources)
    same = pc.equal(found["sha256"].combine_chunks().take(places), chosen["sha256"].combine_chunks())
    sound = pc.fill_null(pc.and_(same, pc.is_valid(found["pixels"].combine_chunks().take(places))), False)
    if not pc.all(sound).as_py():
        altered = chosen["source_min"].filter(pc.invert(sound)).to_pylist()
        names = ", ".join(sorted(altered)[:_MAX_SHOWN]) + ", ..." * (len(altered) > _MAX_SHOWN)
        raise DataError(f"{len(altered)} images were altered while they were read: {names}. Let the data rest, and run `clean` again.")
    return found


def _compare(rows: pa.Table, findings: Findings) -> pa.Table:
    """Of rows with equal pixels, which lie together, the first is kept; with different classes or numbers, the params decide."""
    if not rows.num_rows:
        return rows
    pixels = rows["pixels"].combine_chunks()
    begins = np.concatenate([[True], np.asarray(pc.not_equal(pixels[1:], pixels[:-1]))])
    starts = np.flatnonzero(begins)
    group_of = np.cumsum(begins) - 1
    in_conflict = np.zeros(len(starts), bool)
    for column, rule in (("label", "conflicting_label"), ("target", "conflicting_target")):
        groups = _conflicting(rows[column], starts)
        in_conflict[groups] |= findings.action(rule) == "refuse"
        _note_conflicts(rows, column, rule, starts, groups, findings)
    copies = ~begins & ~in_conflict[group_of]
    first_sources = rows["source"].take(pa.array(starts[group_of[copies]]))
    details = pc.binary_join_element_wise("the same picture as ", first_sources, "")
    findings.refuse(rows["source"].filter(pa.array(copies)), "exact_duplicate", details)
    return rows.filter(pa.array(begins & ~in_conflict[group_of]))


def _conflicting(column: pa.ChunkedArray, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The groups of rows that do not all have the same value; rows without one play no part."""
    if column.null_count == len(column):
        return np.zeros(0, np.intp)
    codes = np.asarray(pc.rank(column, tiebreaker="dense"))
    return np.flatnonzero(np.minimum.reduceat(codes, starts) != np.maximum.reduceat(codes, starts))


def _note_conflicts(rows: pa.Table, column: str, rule: str, starts: NDArray[np.intp], groups: NDArray[np.intp], findings: Findings) -> None:
    ends = np.append(starts[1:], rows.num_rows)
    for group in groups:
        same = rows.slice(int(starts[group]), int(ends[group] - starts[group]))
        values = sorted(set(same[column].to_pylist()))
        named = ", ".join(repr(value) if isinstance(value, str) else f"{value:g}" for value in values)
        detail = f"the same picture with {named}: {', '.join(same['source'].slice(0, _MAX_SHOWN).to_pylist())}"
        if findings.action(rule) == "refuse":
            findings.refuse(same["source"], rule, detail)
        else:
            findings.flag(same["source"].slice(0, 1), rule, detail)


# Pictures that look the same, and targets far from the others ---------------------------------------------------------------------


def _without_outliers(rows: pa.Table, params: CleanParams, task: Task, findings: Findings) -> pa.Table:
    if is_classification(task) or findings.action("outlier") == "off":
        return rows
    targets = rows["target"].to_numpy()
    median, deviations = robust_deviations(targets)
    far = deviations > params.outlier_deviations
    details = [
        f"the target is {value:g}, {deviation:.1f} robust standard deviations from the median {median:g}"
        for value, deviation in zip(targets[far], deviations[far], strict=True)
    ]
    return findings.apply(rows, pa.array(far), "outlier", pa.array(details, pa.string()))


def _without_twins(rows: pa.Table, thumbnails: ThumbnailFile, params: CleanParams, findings: Findings) -> tuple[pa.Table, pa.Array]:
    """The rows by id, and each one's cluster: the smallest id in it, null for a row without a twin."""
    rows = rows.sort_by("sha256")
    if findings.action("near_duplicate") == "off" or not rows.num_rows:
        return rows, pa.nulls(rows.num_rows, pa.string())
    twins = _twins(rows, thumbnails, params.near_duplicate_bits)
    roots = near_duplicates.clusters(twins, rows.num_rows)
    of_cluster = pa.array(np.maximum(roots, 0), mask=roots < 0)
    ids = _ids(rows)
    clusters = ids.take(of_cluster)
    _note_near_conflicts(rows, twins, roots, findings)
    later = (roots >= 0) & (roots != np.arange(rows.num_rows))
    marked = later if findings.action("near_duplicate") == "refuse" else roots >= 0
    looks = _like_whom(rows, twins, roots)
    details = pc.binary_join_element_wise("looks like ", looks.filter(pa.array(marked)), "")
    if findings.action("near_duplicate") == "refuse":
        return findings.apply(rows, pa.array(marked), "near_duplicate", details), clusters.filter(pa.array(~marked))
    return findings.apply(rows, pa.array(marked), "near_duplicate", details), clusters


def _twins(rows: pa.Table, thumbnails: ThumbnailFile, max_bits: int) -> near_duplicates.Twins:
    """Pairs of rows, without those whose pictures have fewer pixels than a thumbnail: these look alike too soon."""
    sides = np.minimum(rows["width"].to_numpy(), rows["height"].to_numpy())
    large = np.flatnonzero(sides >= THUMBNAIL_PX)
    twins = near_duplicates.find_twins(thumbnails.at(rows["place"].to_numpy()[large]), max_bits)
    return near_duplicates.Twins(large[twins.pairs], twins.correlations)


def _like_whom(rows: pa.Table, twins: near_duplicates.Twins, roots: NDArray[np.int64]) -> pa.Array:
    """(N,) the source of one row that each row looks like, the first by id; its cluster's first where no pair is left."""
    others = np.where(roots < 0, 0, roots)
    same = roots[twins.pairs[:, 0]] == roots[twins.pairs[:, 1]]
    for first, second in ((0, 1), (1, 0)):
        pairs = twins.pairs[same][::-1]  # the last one written stays: the smallest
        others[pairs[:, first]] = pairs[:, second]
    return rows["source"].combine_chunks().take(pa.array(others))


def _note_near_conflicts(rows: pa.Table, twins: near_duplicates.Twins, roots: NDArray[np.int64], findings: Findings) -> None:
    if rows["label"].null_count == rows.num_rows:
        return
    labels = rows["label"].combine_chunks().dictionary_encode()
    codes = np.asarray(labels.indices)
    pairs = twins.pairs[codes[twins.pairs[:, 0]] != codes[twins.pairs[:, 1]]]
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    _, first = np.unique(pairs[:, 0], return_index=True)
    mine, other = rows.take(pa.array(pairs[first, 0])), rows.take(pa.array(pairs[first, 1]))
    details = pc.binary_join_element_wise(mine["label"], " looks like ", other["label"], " of ", other["source"], "")
    findings.flag(mine["source"], "near_conflict", details)


def _ids(rows: pa.Table) -> pa.Array:
    """The first 32 hex digits of each row's SHA-256."""
    return pc.utf8_slice_codeunits(_hexadecimal(rows["sha256"]), 0, 32)


def _fixed_bytes(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """(N, B) of a column of B bytes in each row and no null."""
    joined, width = column.combine_chunks(), column.type.byte_width
    values = np.frombuffer(joined.buffers()[1] or b"", np.uint8)[joined.offset * width : (joined.offset + len(joined)) * width]
    return values.reshape(len(joined), width)


def _hexadecimal(digests: pa.ChunkedArray) -> pa.Array:
    """The digests of 32 bytes as text, without a Python object for each."""
    offsets = np.arange(len(digests) + 1, dtype=np.int32) * 64
    return pa.StringArray.from_buffers(len(digests), pa.py_buffer(offsets), pa.py_buffer(_HEXADECIMAL[_fixed_bytes(digests)]))


def _rows(kept: pa.Table, clusters: pa.Array, findings: Findings) -> pa.Table:
    hexadecimal = _hexadecimal(kept["sha256"])
    columns = {name: kept[name] for name in ROWS.names if name in kept.column_names}
    columns |= {"id": pc.utf8_slice_codeunits(hexadecimal, 0, 32), "sha256": hexadecimal, "cluster": clusters}
    columns |= {"flags": findings.flags_of(kept["source"])}
    return pa.table([columns[name] for name in ROWS.names], schema=ROWS)
