"""Assigns near-duplicate images to clusters, and applies the rule `near_duplicate`."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.rows import ID_DIGITS, hex_strings
from slipway.data.engine.scratch import first_bytes, order_by, take, take_rows
from slipway.data.images.near_duplicates import DuplicatePairs, cluster_roots, find_pairs
from slipway.data.images.quality import THUMBNAIL_PX
from slipway.data.images.thumbnails import ThumbnailFile
from slipway.data.rules.findings import RuleFindings

_ID_BYTES = ID_DIGITS // 2
NO_CLUSTER = -1


@dataclass(frozen=True)
class ClusteredRows:
    """The kept rows, ordered by id, and the near-duplicate cluster of each row."""

    rows: NDArray[np.int64]  # (N,) row numbers in the facts table
    clusters: NDArray[np.int32]  # (N,) index into `names`, or NO_CLUSTER
    names: pa.Array  # (C,) smallest id in each cluster


def apply_near_duplicate_rule(
    facts: pa.Table,
    rows: NDArray[np.int64],
    thumbnails: ThumbnailFile,
    max_bits: int,
    findings: RuleFindings,
) -> ClusteredRows:
    """Cluster the near duplicates among `rows`, and flag or refuse them, as the rule's action says.

    With `refuse`, the row with the smallest id of each cluster is kept. The result depends on the
    content of the images only, never on file order or the number of workers.
    """
    rows = _sort_by_id(facts, rows)
    action = findings.action("near_duplicate")
    if action is None:
        return ClusteredRows(
            rows, np.full(len(rows), NO_CLUSTER, np.int32), pa.array([], pa.string())
        )

    # Everything below handles only the rows that have a near duplicate: few, even in large sets.
    pairs, positions = _find_pairs(facts, rows, thumbnails, max_bits)
    table = take_rows(facts.select(["source", "label", "sha256"]), rows[positions])
    _flag_label_conflicts(table, pairs, findings)

    roots = cluster_roots(pairs, len(positions), len(rows))
    in_cluster = roots >= 0
    is_extra = in_cluster & (roots != np.arange(len(roots)))  # all but a cluster's first
    affected = pa.array(is_extra if action == "refuse" else in_cluster)
    lookalikes = _lookalike_sources(table, pairs, roots).filter(affected)
    details = pc.binary_join_element_wise("looks like ", lookalikes, "")
    findings.apply(table, affected, "near_duplicate", details)

    unique_roots = np.unique(roots[in_cluster])
    clusters = np.full(len(rows), NO_CLUSTER, np.int32)
    cluster_index = np.searchsorted(unique_roots, roots)
    clusters[positions] = np.where(in_cluster, cluster_index, NO_CLUSTER)
    names = hex_strings(first_bytes(table["sha256"], _ID_BYTES)[unique_roots])
    if action != "refuse":
        return ClusteredRows(rows, clusters, names)

    is_kept = np.full(len(rows), True, np.bool_)
    is_kept[positions[is_extra]] = False
    kept = np.flatnonzero(is_kept)
    return ClusteredRows(rows[kept], clusters[kept], names)


def _sort_by_id(facts: pa.Table, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    halves = take(first_bytes(facts["sha256"], _ID_BYTES), rows).view(">u8")  # (N, 2)
    return take(rows, order_by(*halves.T))


def _find_pairs(
    facts: pa.Table, rows: NDArray[np.int64], thumbnails: ThumbnailFile, max_bits: int
) -> tuple[DuplicatePairs, NDArray[np.int64]]:
    """Return pairs of near duplicates among the images that are at least as large as a thumbnail.

    Smaller images are skipped: they have so little detail that too many of them are similar.

    Returns the pairs, as indices into the second value, and the ascending positions in `rows` that
    occur in any pair.
    """
    shorter_sides = pc.min_element_wise(facts["width"], facts["height"]).to_numpy()
    candidates = np.flatnonzero(shorter_sides[rows] >= THUMBNAIL_PX)

    found = find_pairs(thumbnails.at(take(rows, candidates)), max_bits)
    pairs = candidates[found.pairs]
    positions = np.unique(pairs)
    indices = np.searchsorted(positions, pairs).reshape(-1, 2)
    return DuplicatePairs(indices, found.correlations), positions


def _lookalike_sources(
    table: pa.Table, pairs: DuplicatePairs, roots: NDArray[np.int64]
) -> pa.Array:
    """Return for each row the source of the near duplicate with the smallest id.

    If a row has no pair left after its large cluster was divided, the first row of its cluster is
    used.
    """
    lookalikes = np.where(roots < 0, 0, roots)
    first_cluster = roots[pairs.pairs[:, 0]]
    second_cluster = roots[pairs.pairs[:, 1]]
    within_cluster = pairs.pairs[first_cluster == second_cluster]
    for row, other in ((0, 1), (1, 0)):
        descending = within_cluster[::-1]  # the smallest id is written last and stays
        lookalikes[descending[:, row]] = descending[:, other]
    return table["source"].combine_chunks().take(pa.array(lookalikes))


def _flag_label_conflicts(table: pa.Table, pairs: DuplicatePairs, findings: RuleFindings) -> None:
    has_labels = table["label"].null_count < table.num_rows
    if not has_labels:
        return
    labels = np.asarray(table["label"].combine_chunks().dictionary_encode().indices)
    one_way = pairs.pairs[labels[pairs.pairs[:, 0]] != labels[pairs.pairs[:, 1]]]
    both_ways = np.concatenate([one_way, one_way[:, ::-1]])
    _, first_of_row = np.unique(both_ways[:, 0], return_index=True)
    rows = table.take(pa.array(both_ways[first_of_row, 0]))
    others = table.take(pa.array(both_ways[first_of_row, 1]))
    details = pc.binary_join_element_wise(
        rows["label"], " looks like ", others["label"], " of ", others["source"], ""
    )
    findings.flag(rows["source"], "near_conflict", details)
