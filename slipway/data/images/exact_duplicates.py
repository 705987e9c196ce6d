"""Refuses all but one of the images with equal pixels; all of them if their labels differ.

Inspection decodes only the luma of most JPEGs. A JPEG that may have the same pixels as a file with
different bytes is read a second time, to digest all its pixels. All other files are compared by
their bytes.

Two JPEGs with equal pixels hold the same coefficients with different metadata, so their thumbnails
are equal. An image decoded in colour, such as a PNG copy, has the luma of the JPEG except where
colours were clipped at 0 or 255, so its thumbnail is nearly equal. False candidates do no harm,
because all pixels of a candidate are compared.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.scratch import (
    first_bytes,
    key_slices,
    order_by,
    scratch_array,
    slices,
    take,
    take_rows,
)
from slipway.data.images.inspection import PIXELS
from slipway.data.images.near_duplicates import find_pairs_by_hash
from slipway.data.images.thumbnails import ThumbnailFile, Thumbnails
from slipway.data.rules.findings import RuleFindings
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.data.sources.shards import listed
from slipway.system.errors import DataError

KEPT_FIRST = ("test", "val", "train")  # order in which a split keeps its copy: test stays whole
_MAX_SHOWN = 3
_PIXEL_BYTES = 16
_MAX_BITS = 8  # bits of 64 by which the hashes of a copy may differ
_MAX_LEVELS = 32  # levels by which a cell of a copy's thumbnail may differ if most colours clip
_FLAT_LEVELS = 8  # a thumbnail with fewer grey levels does not distinguish images
_CHUNK_ROWS = 1 << 12
_MULTIPLIERS = np.random.default_rng(0).integers(
    1 << 63, (1 << 64) - 1, 34, np.uint64, endpoint=True
) | np.uint64(1)

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]

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
            _luma_candidates(thumbnails.at(rows), sizes, contents, is_digested)
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


# Candidates by luma ------------------------------------------------------------------------------


def _luma_candidates(
    thumbnails: Thumbnails, sizes: NDArray[np.int32], contents: Keys, is_digested: Mask
) -> Mask:
    """Return a mask (N,) of rows without a pixel digest that may equal another file's pixels.

    Args:
        thumbnails: (N, 256).
        sizes: (N, 2) width and height in pixels.
        contents: (N,) keys that are equal for equal bytes.
        is_digested: (N,) mask of the rows whose pixels were digested in colour.
    """
    size_keys = scratch_array((len(sizes),), np.uint64)
    for part in slices(len(sizes)):
        width, height = sizes[part].T.astype(np.uint64)
        size_keys[part] = (width << np.uint64(32)) | height
    keys, is_flat = _thumbnail_keys(thumbnails, size_keys)
    is_candidate = _has_equal_key(keys, contents)

    mixed = _rows_of_mixed_sizes(size_keys, is_digested)
    is_candidate[mixed[is_flat[mixed]]] = True
    if len(mixed):
        first, second = mixed[find_pairs_by_hash(thumbnails.of(mixed), _MAX_BITS)].T
        is_mixed = is_digested[first] != is_digested[second]
        is_mixed &= size_keys[first] == size_keys[second]
        is_candidate[_close_rows(thumbnails, first[is_mixed], second[is_mixed])] = True
    return is_candidate & ~is_digested


def _rows_of_mixed_sizes(size_keys: Keys, is_digested: Mask) -> NDArray[np.int64]:
    """Return the rows whose image size occurs both with and without a pixel digest."""
    digested, others = np.unique(size_keys[is_digested]), np.unique(size_keys[~is_digested])
    shared = np.intersect1d(digested, others, assume_unique=True)
    return np.flatnonzero(np.isin(size_keys, shared)) if len(shared) else np.zeros(0, np.int64)


def _thumbnail_keys(thumbnails: Thumbnails, size_keys: Keys) -> tuple[Keys, Mask]:
    """Return keys (N,), equal for equal thumbnails and sizes, and a mask (N,) of low contrast."""
    keys = scratch_array((len(thumbnails),), np.uint64)
    is_flat = np.zeros(len(thumbnails), np.bool_)
    for part in slices(len(thumbnails), _CHUNK_ROWS):
        pixels = np.ascontiguousarray(thumbnails[part])
        # Each bit of a product depends only on those below it: bring the upper ones down first.
        words = pixels.view(np.uint64) * _MULTIPLIERS[33]
        words ^= words >> np.uint64(32)
        keys[part] = words @ _MULTIPLIERS[:32] + size_keys[part] * _MULTIPLIERS[32]
        is_flat[part] = np.ptp(pixels, axis=1) < _FLAT_LEVELS
    return keys, is_flat


def _has_equal_key(keys: Keys, contents: Keys) -> Mask:
    """Return a mask (N,) of the rows that share a key with a row of other file content."""
    found = np.zeros(len(keys), np.bool_)
    order = order_by(keys)
    for part in key_slices(len(keys), lambda part: keys[order[part]]):
        rows = order[part]
        begins = np.flatnonzero(np.append(True, np.diff(keys[rows]) != 0))
        lowest = np.minimum.reduceat(contents[rows], begins)
        highest = np.maximum.reduceat(contents[rows], begins)
        found[rows] = np.repeat(lowest != highest, np.diff(np.append(begins, len(rows))))
    return found


def _close_rows(
    thumbnails: Thumbnails, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    is_close = np.zeros(len(first), np.bool_)
    for part in slices(len(first), _CHUNK_ROWS):
        difference = thumbnails[first[part]].astype(np.int16) - thumbnails[second[part]]
        is_close[part] = np.abs(difference).max(axis=1) <= _MAX_LEVELS
    return np.union1d(first[is_close], second[is_close])


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
