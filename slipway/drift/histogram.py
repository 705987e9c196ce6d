"""Bins of equal probability, with a bin of its own for each number that is common, and the bin of each number.

Bins begin at the reference's own quantiles. A number that takes up a bin or more by itself (a constant, the zeros of a share) has a bin of
its own, so that what leaves it is seen, on either side, even where the reference has nothing there. The last bin is for missing numbers.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float32]
Counts = NDArray[np.int64]

NUM_BINS = 10
_LEAST_ROWS = 20  # of the reference in a bin; fewer rows make fewer bins


def equal_edges(numbers: Float, num_bins: int = NUM_BINS) -> Float:
    """(E,) increasing float32 edges: bin i holds edge[i-1] <= number < edge[i]. NaN is left out; without numbers there are no edges."""
    ordered = np.sort(numbers[~np.isnan(numbers)])
    most = max(1, min(num_bins, len(ordered) // _LEAST_ROWS))
    if not len(ordered):
        return np.empty(0, np.float32)
    taken = ordered[
        [len(ordered) * part // most for part in range(most)]
    ]  # the first value of each part
    starts, times = np.unique(taken, return_counts=True)
    is_constant = ordered[0] == ordered[-1]
    common = starts if is_constant else starts[times > 1]
    starts = starts if is_constant else starts[starts > ordered[0]]
    return np.unique(
        np.concatenate([starts, common, np.nextafter(common, np.float32(np.inf))])
    ).astype(np.float32)


def bins_of(numbers: Float, edges: Float) -> NDArray[np.intp]:
    """(rows,) from 0 to len(edges), and len(edges) + 1 for NaN."""
    return np.where(
        np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers, side="right")
    )


def category_bins(codes: Float, num_categories: int) -> NDArray[np.intp]:
    """(rows,) the code itself, and `num_categories` for NaN and for codes that there are not."""
    known = (codes >= 0) & (codes < num_categories)  # False for NaN
    return np.where(known, np.where(known, codes, 0).astype(np.intp), num_categories)


def merge_rare(
    window: ArrayLike, reference: ArrayLike, least: float, *, ordered: bool
) -> tuple[Counts, Counts]:
    """Both counts (bins,) with rare bins put together, until the smaller sample is expected to have `least` rows in each.

    Neighbours go together where the bins are `ordered`, else the rarest. What is rare is decided on both samples together, so that
    it says nothing on where they differ.
    """
    both = np.stack([np.asarray(window, np.int64), np.asarray(reference, np.int64)])
    share = float(both.sum(axis=1).min()) / max(1, int(both.sum()))
    if not ordered:
        both = both[:, np.argsort(both.sum(axis=0), kind="stable")]
    groups: list[Counts] = []
    open_group = np.zeros(2, np.int64)
    for bin_counts in both.T:
        open_group = open_group + bin_counts
        if open_group.sum() * share >= least:
            groups.append(open_group)
            open_group = np.zeros(2, np.int64)
    if open_group.any():
        groups = [*groups[:-1], groups[-1] + open_group] if groups else [open_group]
    merged = np.array(groups, np.int64).reshape(-1, 2)
    return merged[:, 0], merged[:, 1]
