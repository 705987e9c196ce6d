"""Refuses all but one of the images with equal pixels; all of them if their labels differ.

Inspection decodes only the luma of most JPEGs. A JPEG that may have the same pixels as a file with
different bytes is read a second time, to digest all its pixels. All other files are compared by
their bytes.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.scratch import (
    first_bytes,
    order_by,
    scratch_array,
    slices,
    take,
    take_rows,
)
from slipway.data.images.inspection import PIXELS
from slipway.data.images.luma_candidates import luma_candidates
from slipway.data.images.thumbnails import ThumbnailFile
from slipway.data.rules.findings import RuleFindings
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.data.sources.shards import listed
from slipway.system.errors import DataError

KEPT_FIRST = ("test", "val", "train")  # order in which a split keeps its copy: test stays whole
_MAX_SHOWN = 3
_PIXEL_BYTES = 16

# Returns batches of PIXELS of the samples with these sources.
DigestPixels = Callable[[frozenset[str]], Iterable[pa.RecordBatch]]


def apply_exact_duplicate_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    thumbnails: ThumbnailFile,
    digest_pixels: DigestPixels,
    findings: RuleFindings,
) -> NDArray[np.int64]:
    """Refuse exact copies among `rows`, the ascending rows of `facts`; return the kept rows."""
    pixels = _pixel_digests(facts, rows, thumbnails, digest_pixels)
    is_kept = _is_unique(pixels.view(np.uint64)[:, 0])
    positions = np.flatnonzero(~is_kept)
    if not len(positions):
        return rows

    # From here on only the rows that share their pixels: few, even in large sets.
    copies = rows[positions]
    digests = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_PIXEL_BYTES), len(copies), [None, pa.py_buffer(pixels[positions])]
    )
    columns = ["sha256", "group", "source", "label", "target", "given_split"]
    table = take_rows(facts.select(columns), copies)
    order = pc.fill_null(pc.index_in(table["given_split"], pa.array(KEPT_FIRST)), len(KEPT_FIRST))
    for name, values in (("pixels", digests), ("row", pa.array(copies)), ("order", order)):
        table = table.append_column(name, values)
    table = table.sort_by(
        [(name, "ascending") for name in ("pixels", "order", "sha256", "group", "source")]
    )
    kept = _compare(table, findings)["row"].to_numpy()
    is_kept[positions[np.searchsorted(copies, kept)]] = True
    return rows[is_kept]


def _is_unique(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the rows whose key occurs only once."""
    order = order_by(keys)
    found = np.ones(len(keys), np.bool_)
    for part in slices(len(keys) - 1):
        rows = order[part.start : part.stop + 1]
        is_same = keys[rows[1:]] == keys[rows[:-1]]
        found[rows[1:][is_same]] = False
        found[rows[:-1][is_same]] = False
    return found


# Digests of pixels --------------------------------------------------------------------------------


def _pixel_digests(
    facts: pa.Table, rows: NDArray[np.int64], thumbnails: ThumbnailFile, digest_pixels: DigestPixels
) -> NDArray[np.uint8]:
    """Return digests (N, 16) uint8 that are equal for rows with equal pixels.

    The digest of a row covers its file's bytes if no file with different bytes can have the same
    pixels, else it covers the pixels.
    """
    pixels = take(first_bytes(facts["sha256"], _PIXEL_BYTES), rows)
    is_digested = pc.is_valid(facts["pixels"]).to_numpy()[rows]
    if not is_digested.all():
        sizes = scratch_array((len(rows), 2), np.int32)
        for side, name in enumerate(("width", "height")):
            sizes[:, side] = facts[name].to_numpy()[rows]
        contents = pixels.view(np.uint64)[:, 0]
        candidates = np.flatnonzero(
            luma_candidates(thumbnails.at(rows), sizes, contents, is_digested)
        )
        if len(candidates):
            table = take_rows(facts.select(["source", "sha256"]), rows[candidates])
            pixels[candidates] = _read_again(table, digest_pixels)
    digests = first_bytes(facts["pixels"], _PIXEL_BYTES)
    for part in slices(len(rows)):
        chosen = is_digested[part]
        pixels[part][chosen] = digests[rows[part][chosen]]
    return pixels


def _read_again(candidates: pa.Table, digest_pixels: DigestPixels) -> NDArray[np.uint8]:
    """Read one row for each distinct file content again; return digests (N, 16) of all pixels."""
    chosen = candidates.group_by("sha256").aggregate([("source", "min")]).combine_chunks()
    batches = digest_pixels(frozenset(chosen["source_min"].to_pylist()))
    found = pa.Table.from_batches(batches, PIXELS).combine_chunks()
    found = found.take(pc.index_in(chosen["source_min"], found["source"]))
    is_same = pc.and_(pc.equal(found["sha256"], chosen["sha256"]), pc.is_valid(found["pixels"]))
    is_altered = pc.invert(pc.fill_null(is_same, False))
    altered = sorted(chosen["source_min"].filter(is_altered).to_pylist())
    if altered:
        raise DataError(
            f"{len(altered)} images changed while `clean` read them: {listed(altered)}. "
            "Make sure that nothing writes to the data, and run it again."
        )
    places = pc.index_in(candidates["sha256"], chosen["sha256"].combine_chunks())
    return first_bytes(found["pixels"].take(places), _PIXEL_BYTES)


# Comparison of copies -----------------------------------------------------------------------------


def _compare(rows: pa.Table, findings: RuleFindings) -> pa.Table:
    """Refuse all but the first of the rows with equal pixels; refuse all if their labels differ."""
    pixels = rows["pixels"].combine_chunks()
    is_first = np.append(True, np.asarray(pc.not_equal(pixels[1:], pixels[:-1])))
    starts = np.flatnonzero(is_first)
    group_of = np.cumsum(is_first) - 1
    is_refused = np.zeros(len(starts), bool)
    for column, rule in (("label", "conflicting_label"), ("target", "conflicting_target")):
        groups = _conflicting_groups(rows[column], starts)
        is_refused[groups] |= findings.action(rule) == "refuse"
        _report_conflicts(rows, column, rule, starts, groups, findings)

    is_copy = pa.array(~is_first & ~is_refused[group_of])
    copies = rows.filter(is_copy)
    originals = rows.take(pa.array(starts[group_of])).filter(is_copy)
    is_across = pc.fill_null(pc.not_equal(copies["given_split"], originals["given_split"]), False)
    split = pc.binary_join_element_wise(IN_ANOTHER_SPLIT, originals["given_split"], "")
    details = pc.binary_join_element_wise(
        "the same pixels as ", originals["source"], pc.if_else(is_across, split, ""), ""
    )
    findings.refuse(copies["source"], "exact_duplicate", details)
    return rows.filter(pa.array(is_first & ~is_refused[group_of]))


def _conflicting_groups(column: pa.ChunkedArray, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the indices of groups with several values in `column`; none for an empty column."""
    if column.null_count == len(column):
        return np.zeros(0, np.intp)
    codes = np.asarray(pc.rank(column, tiebreaker="dense"))
    return np.flatnonzero(np.minimum.reduceat(codes, starts) != np.maximum.reduceat(codes, starts))


def _report_conflicts(
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
        sources = ", ".join(same["source"].slice(0, _MAX_SHOWN).to_pylist())
        detail = f"the same pixels with {named}: {sources}"
        if findings.action(rule) == "refuse":
            findings.refuse(same["source"], rule, detail)
        else:
            findings.flag(same["source"].slice(0, 1), rule, detail)
