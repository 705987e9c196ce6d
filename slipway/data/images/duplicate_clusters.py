"""Pictures that look the same: each cluster has a name, and what the params say of near duplicates is done."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.rows import ids
from slipway.data.engine.scratch_arrays import full, order_of, parts_of, rows_where, taken
from slipway.data.engine.scratch_tables import first_bytes, gathered, numbers
from slipway.data.images import near_duplicates
from slipway.data.images.quality import THUMBNAIL_PX
from slipway.data.images.thumbnails import ThumbnailFile
from slipway.data.rules.findings import RuleFindings

_ID_BYTES = 16


@dataclass(frozen=True)
class ClusteredRows:
    """Rows of the facts by id, and each one's cluster."""

    rows: NDArray[np.int64]  # (N,)
    clusters: NDArray[np.int32]  # (N,) a place in `names`, -1 for a row without a twin
    names: pa.Array  # the smallest id in each cluster


def apply_near_duplicate_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    thumbnails: ThumbnailFile,
    max_bits: int,
    findings: RuleFindings,
) -> ClusteredRows:
    """The rows by id, without the near duplicates that are refused."""
    rows = _by_id(facts, rows)
    clusters = full(len(rows), -1, np.int32)
    if findings.action("near_duplicate") is None:
        return ClusteredRows(rows, clusters, pa.array([], pa.string()))
    twins = _twins(facts, rows, thumbnails, max_bits)
    places = np.unique(twins.pairs)  # from here on only of those that look like another
    twins = near_duplicates.DuplicatePairs(
        np.searchsorted(places, twins.pairs).reshape(-1, 2), twins.correlations
    )
    roots = near_duplicates.clusters(twins, len(places), len(rows))
    table = gathered(facts.select(["source", "label", "sha256"]), rows[places])
    _note_conflicts(table, twins, findings)
    later = (roots >= 0) & (roots != np.arange(len(roots)))
    is_refused = findings.action("near_duplicate") == "refuse"
    marked = pa.array(later if is_refused else roots >= 0)
    details = pc.binary_join_element_wise(
        "looks like ", _like_whom(table, twins, roots).filter(marked), ""
    )
    findings.apply(table, marked, "near_duplicate", details)
    firsts = np.unique(roots[roots >= 0])
    clusters[places] = np.where(roots < 0, -1, np.searchsorted(firsts, roots))
    names = ids(table["sha256"].take(pa.array(firsts)))
    if is_refused:
        is_kept = full(len(rows), True, np.bool_)
        is_kept[places[later]] = False
        kept = rows_where(is_kept)
        return ClusteredRows(taken(rows, kept), taken(clusters, kept), names)
    return ClusteredRows(rows, clusters, names)


def _by_id(facts: pa.Table, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    words = taken(first_bytes(facts["sha256"], _ID_BYTES), rows).view(">u8")
    return taken(rows, order_of(words[:, 0], words[:, 1]))


def _twins(
    facts: pa.Table, rows: NDArray[np.int64], thumbnails: ThumbnailFile, max_bits: int
) -> near_duplicates.DuplicatePairs:
    """Pairs of places in `rows`, without those whose pictures have fewer pixels than a thumbnail: these look alike too soon."""
    widths, heights, is_large = (
        numbers(facts["width"]),
        numbers(facts["height"]),
        full(len(rows), False, np.bool_),
    )
    for part in parts_of(len(rows)):
        is_large[part] = np.minimum(widths[rows[part]], heights[rows[part]]) >= THUMBNAIL_PX
    large = rows_where(is_large)
    twins = near_duplicates.find_pairs(thumbnails.at(taken(rows, large)), max_bits)
    return near_duplicates.DuplicatePairs(large[twins.pairs], twins.correlations)


def _like_whom(
    table: pa.Table, twins: near_duplicates.DuplicatePairs, roots: NDArray[np.int64]
) -> pa.Array:
    """(N,) the source of one row that each row looks like, the first by id; its cluster's first where no pair is left."""
    others = np.where(roots < 0, 0, roots)
    same = roots[twins.pairs[:, 0]] == roots[twins.pairs[:, 1]]
    for first, second in ((0, 1), (1, 0)):
        pairs = twins.pairs[same][::-1]  # the last one written stays: the smallest
        others[pairs[:, first]] = pairs[:, second]
    return table["source"].combine_chunks().take(pa.array(others))


def _note_conflicts(
    table: pa.Table, twins: near_duplicates.DuplicatePairs, findings: RuleFindings
) -> None:
    if table["label"].null_count == table.num_rows:
        return
    labels = table["label"].combine_chunks().dictionary_encode()
    codes = np.asarray(labels.indices)
    pairs = twins.pairs[codes[twins.pairs[:, 0]] != codes[twins.pairs[:, 1]]]
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    _, first = np.unique(pairs[:, 0], return_index=True)
    mine, other = table.take(pa.array(pairs[first, 0])), table.take(pa.array(pairs[first, 1]))
    details = pc.binary_join_element_wise(
        mine["label"], " looks like ", other["label"], " of ", other["source"], ""
    )
    findings.flag(mine["source"], "near_conflict", details)
