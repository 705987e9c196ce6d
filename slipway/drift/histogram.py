"""Quantile bins: edges from reference values, bin indices, and merging of rare bins.

A value that fills a bin by itself (a constant, the zeros of a sparse column) gets its own bin, so
that smaller and larger values are noticed even if the reference has none. The last bin holds
missing values.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float32]
Counts = NDArray[np.int64]

NUM_BINS = 10
MIN_EXPECTED_ROWS = 20.0  # expected rows of the smaller sample in a bin; rarer bins are merged
_MIN_REFERENCE_ROWS = 20  # rows per bin; a small reference has fewer bins


def equal_edges(numbers: Float, num_bins: int = NUM_BINS) -> Float:
    """Return increasing (E,) float32 edges of bins with about equal numbers of rows.

    Bin i holds edge[i-1] <= number < edge[i]. NaN is ignored; without numbers there are no edges.
    """
    ordered = np.sort(numbers[~np.isnan(numbers)])
    if not len(ordered):
        return np.empty(0, np.float32)
    num_bins = max(1, min(num_bins, len(ordered) // _MIN_REFERENCE_ROWS))
    quantiles = ordered[[len(ordered) * part // num_bins for part in range(num_bins)]]
    starts, repeats = np.unique(quantiles, return_counts=True)
    if ordered[0] == ordered[-1]:
        common = starts
    else:
        common = starts[repeats > 1]
        starts = starts[starts > ordered[0]]
    ends = np.nextafter(common, np.float32(np.inf))
    return np.unique(np.concatenate([starts, common, ends])).astype(np.float32)


def bins_of(numbers: Float, edges: Float) -> NDArray[np.intp]:
    """Return (rows,) bin indices from 0 to len(edges), and len(edges) + 1 for NaN."""
    bins = np.searchsorted(edges, numbers, side="right")
    return np.where(np.isnan(numbers), len(edges) + 1, bins)


def category_bins(codes: Float, num_categories: int) -> NDArray[np.intp]:
    """Return (rows,) the codes as bin indices, and `num_categories` for NaN and unknown codes."""
    is_known = (codes >= 0) & (codes < num_categories)  # False for NaN
    return np.where(is_known, codes, num_categories).astype(np.intp)


def merge_rare(window: ArrayLike, reference: ArrayLike, *, ordered: bool) -> tuple[Counts, Counts]:
    """Merge bins until the smaller sample expects at least MIN_EXPECTED_ROWS rows in each.

    `ordered` bins are merged with a neighbour, others with the rarest bin. Rare bins are chosen by
    the pooled counts of both samples, so the choice does not depend on how the samples differ.
    """
    both = np.stack([np.asarray(window, np.int64), np.asarray(reference, np.int64)])
    smaller_fraction = float(both.sum(axis=1).min()) / max(1, int(both.sum()))
    if not ordered:
        both = both[:, np.argsort(both.sum(axis=0), kind="stable")]
    groups: list[Counts] = []
    group = np.zeros(2, np.int64)
    for bin_counts in both.T:
        group = group + bin_counts
        if group.sum() * smaller_fraction >= MIN_EXPECTED_ROWS:
            groups.append(group)
            group = np.zeros(2, np.int64)
    if group.any():
        last = groups.pop() if groups else np.zeros(2, np.int64)
        groups.append(last + group)
    merged = np.array(groups, np.int64).reshape(-1, 2)
    return merged[:, 0], merged[:, 1]
