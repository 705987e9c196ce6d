"""Pictures with the same pixels: one is kept, the others are refused, and their classes must agree.

Of most JPEGs only the luma was decoded. Those that may have a copy with other bytes are read a second time, for a digest of all
pixels; of all others only equal bytes are equal pictures.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.scratch_arrays import full, order_of, parts_of, rows_where, taken
from slipway.data.engine.scratch_tables import (
    first_bytes,
    gathered,
    is_present,
    numbers,
    scratch_array,
)
from slipway.data.images.inspection import PIXELS
from slipway.data.images.luma_candidates import luma_candidates
from slipway.data.images.thumbnails import ThumbnailFile
from slipway.data.rules.findings import RuleFindings
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.system.errors import DataError

KEPT_FIRST = (
    "test",
    "val",
    "train",
)  # of copies in several given splits: what is measured stays whole
_MAX_SHOWN = 3
_PIXEL_BYTES = 16

DigestPixels = Callable[
    [frozenset[str]], Iterable[pa.RecordBatch]
]  # batches of PIXELS of the samples with these sources


def apply_exact_duplicate_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    thumbnails: ThumbnailFile,
    again: DigestPixels,
    findings: RuleFindings,
) -> NDArray[np.int64]:
    """Of `rows` of the facts, rising, those that are kept."""
    pixels = _pixel_digests(facts, rows, thumbnails, again)
    is_kept = _is_alone(pixels.view(np.uint64)[:, 0])
    places = rows_where(~is_kept)
    if not len(places):
        return rows
    shared = rows[places]
    digests = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_PIXEL_BYTES), len(shared), [None, pa.py_buffer(pixels[places])]
    )
    table = gathered(
        facts.select(["sha256", "group", "source", "label", "target", "given_split"]), shared
    )
    table = table.append_column("pixels", digests).append_column("row", pa.array(shared))
    order = pc.fill_null(pc.index_in(table["given_split"], pa.array(KEPT_FIRST)), len(KEPT_FIRST))
    table = table.append_column("order", order)
    table = table.sort_by(
        [(column, "ascending") for column in ("pixels", "order", "sha256", "group", "source")]
    )
    is_kept[places[np.searchsorted(shared, _compare(table, findings)["row"].to_numpy())]] = True
    return taken(rows, rows_where(is_kept))


def _is_alone(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(N,) whether no other row has the same key."""
    order, found = order_of(keys), full(len(keys), True, np.bool_)
    for part in parts_of(len(keys) - 1):
        rows = order[part.start : part.stop + 1]
        same = keys[rows[1:]] == keys[rows[:-1]]
        found[rows[1:][same]] = False
        found[rows[:-1][same]] = False
    return found


# The digests of those that may have copies ----------------------------------------------------------------------------------------


def _pixel_digests(
    facts: pa.Table, rows: NDArray[np.int64], thumbnails: ThumbnailFile, again: DigestPixels
) -> NDArray[np.uint8]:
    """(N, 16) equal for rows of equal pixels: digests of the pixels, and of the bytes where no other bytes can be a copy."""
    pixels = taken(first_bytes(facts["sha256"], _PIXEL_BYTES), rows)
    is_digested = taken(is_present(facts["pixels"]), rows)
    if not is_digested.all():
        sizes = scratch_array((len(rows), 2), np.int32)
        for side, name in enumerate(("width", "height")):
            sizes[:, side] = taken(numbers(facts[name]), rows)
        doubtful = rows_where(
            luma_candidates(thumbnails.at(rows), sizes, pixels.view(np.uint64)[:, 0], is_digested)
        )
        if len(doubtful):
            pixels[doubtful] = _read_again(
                gathered(facts.select(["source", "sha256"]), rows[doubtful]), again
            )
    digests = first_bytes(facts["pixels"], _PIXEL_BYTES)
    for part in parts_of(len(rows)):
        chosen = is_digested[part]
        pixels[part][chosen] = digests[rows[part][chosen]]
    return pixels


def _read_again(doubtful: pa.Table, again: DigestPixels) -> NDArray[np.uint8]:
    """(N, 16) digests of all pixels; one row of each content is read."""
    chosen = doubtful.group_by("sha256").aggregate([("source", "min")]).combine_chunks()
    found = pa.Table.from_batches(
        again(frozenset(chosen["source_min"].to_pylist())), PIXELS
    ).combine_chunks()
    found = found.take(pc.index_in(chosen["source_min"], found["source"]))
    sound = pc.fill_null(
        pc.and_(pc.equal(found["sha256"], chosen["sha256"]), pc.is_valid(found["pixels"])), False
    )
    if not pc.all(sound, min_count=0).as_py():
        altered = sorted(chosen["source_min"].filter(pc.invert(sound)).to_pylist())
        names = ", ".join(altered[:_MAX_SHOWN]) + ", ..." * (len(altered) > _MAX_SHOWN)
        raise DataError(
            f"{len(altered)} images were altered while `clean` read them: {names}. Let the data rest, and run it again."
        )
    places = pc.index_in(doubtful["sha256"], chosen["sha256"].combine_chunks())
    return first_bytes(found["pixels"].take(places), _PIXEL_BYTES)


def _compare(rows: pa.Table, findings: RuleFindings) -> pa.Table:
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
    given = rows["given_split"].combine_chunks()
    first_splits = given.take(pa.array(starts[group_of]))
    across = pc.fill_null(pc.not_equal(given, first_splits), False).filter(pa.array(copies))
    where = pc.if_else(
        across,
        pc.binary_join_element_wise(IN_ANOTHER_SPLIT, first_splits.filter(pa.array(copies)), ""),
        "",
    )
    details = pc.binary_join_element_wise("the same picture as ", first_sources, where, "")
    findings.refuse(rows["source"].filter(pa.array(copies)), "exact_duplicate", details)
    return rows.filter(pa.array(begins & ~in_conflict[group_of]))


def _conflicting(column: pa.ChunkedArray, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The groups of rows that do not all have the same value; rows without one play no part."""
    if column.null_count == len(column):
        return np.zeros(0, np.intp)
    codes = np.asarray(pc.rank(column, tiebreaker="dense"))
    return np.flatnonzero(np.minimum.reduceat(codes, starts) != np.maximum.reduceat(codes, starts))


def _note_conflicts(
    rows: pa.Table,
    column: str,
    rule: str,
    starts: NDArray[np.intp],
    groups: NDArray[np.intp],
    findings: RuleFindings,
) -> None:
    ends = np.append(starts[1:], rows.num_rows)
    for group in groups:
        same = rows.slice(int(starts[group]), int(ends[group] - starts[group]))
        values = sorted(set(same[column].to_pylist()))
        named = ", ".join(
            repr(value) if isinstance(value, str) else f"{value:g}" for value in values
        )
        detail = f"the same picture with {named}: {', '.join(same['source'].slice(0, _MAX_SHOWN).to_pylist())}"
        if findings.action(rule) == "refuse":
            findings.refuse(same["source"], rule, detail)
        else:
            findings.flag(same["source"].slice(0, 1), rule, detail)
