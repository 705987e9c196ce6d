"""Which JPEGs that are known by their luma alone may have the same pixels as a picture of other bytes: only these are decoded again.

Two such JPEGs hold the same coefficients in other wrappings, so their thumbnails are equal. A picture whose colours were decoded,
such as a PNG copy, has the JPEG's luma wherever no colour was cut off at 0 or 255, so the thumbnails are next to equal.
Unlike pictures are named, too: whoever is named is compared by all its pixels.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch_arrays import full, order_of, parts_of, rows_where, uncut
from slipway.data.engine.scratch_tables import scratch_array
from slipway.data.images.near_duplicates import find_pairs_by_hash
from slipway.data.images.thumbnails import Thumbnails

_MOST_BITS = 8  # of 64, by which the hashes of a copy may differ
_MOST_LEVELS = (
    32  # by which a cell of a copy's thumbnail may differ, where most of its colours are cut off
)
_FLAT_LEVELS = 8  # a thumbnail of fewer grey levels says too little
_CHUNK_ROWS = 1 << 12
_MULTIPLIERS = np.random.default_rng(0).integers(
    1 << 63, (1 << 64) - 1, 34, np.uint64, endpoint=True
) | np.uint64(1)

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]


def luma_candidates(
    thumbnails: Thumbnails, sizes: NDArray[np.int32], contents: Keys, is_digested: Mask
) -> Mask:
    """(N,) the rows that are not digested and that may have a copy with another content.

    `thumbnails` (N, 256), `sizes` (N, 2) in pixels, `contents` (N,) equal for equal bytes, `is_digested` (N,) for rows whose pixels
    were digested in colour.
    """
    size_keys = scratch_array((len(sizes),), np.uint64)
    for part in parts_of(len(sizes)):
        size_keys[part] = (sizes[part, 0].astype(np.uint64) << np.uint64(32)) | sizes[
            part, 1
        ].astype(np.uint64)
    keys, is_flat = _keys(thumbnails, size_keys)
    found = _has_equal(keys, contents)
    mixed = _of_both(size_keys, is_digested)
    for part in parts_of(len(mixed)):
        found[mixed[part][is_flat[mixed[part]]]] = True
    if len(mixed):
        pairs = mixed[find_pairs_by_hash(thumbnails.of(mixed), _MOST_BITS)]
        of_both = (is_digested[pairs].sum(axis=1) == 1) & (
            size_keys[pairs[:, 0]] == size_keys[pairs[:, 1]]
        )
        found[_close(thumbnails, pairs[of_both])] = True
    for part in parts_of(len(found)):
        found[part] &= ~is_digested[part]
    return found


def _of_both(size_keys: Keys, is_digested: Mask) -> NDArray[np.int64]:
    """The rows of sizes that rows of both kinds have."""
    with_digest, without = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    for part in parts_of(len(size_keys)):
        with_digest = np.union1d(with_digest, size_keys[part][is_digested[part]])
        without = np.union1d(without, size_keys[part][~is_digested[part]])
    shared, found = np.intersect1d(with_digest, without), full(len(size_keys), False, np.bool_)
    for part in parts_of(len(found) if len(shared) else 0):
        found[part] = np.isin(size_keys[part], shared)
    return rows_where(found)


def _keys(thumbnails: Thumbnails, size_keys: Keys) -> tuple[Keys, Mask]:
    """(N,) equal for equal thumbnails and sizes, and (N,) whether there is next to nothing to be seen."""
    keys, is_flat = (
        scratch_array((len(thumbnails),), np.uint64),
        scratch_array((len(thumbnails),), np.bool_),
    )
    for part in parts_of(len(thumbnails), _CHUNK_ROWS):
        pixels = np.ascontiguousarray(thumbnails[part])
        # Every bit of a product depends on those below it alone: bring the upper ones down first.
        words = pixels.view(np.uint64) * _MULTIPLIERS[33]
        words ^= words >> np.uint64(32)
        keys[part] = words @ _MULTIPLIERS[:32] + size_keys[part] * _MULTIPLIERS[32]
        is_flat[part] = np.ptp(pixels, axis=1) < _FLAT_LEVELS
    return keys, is_flat


def _has_equal(keys: Keys, contents: Keys) -> Mask:
    """(N,) rows with a key that a row of another content has, too."""
    found, order = full(len(keys), False, np.bool_), order_of(keys)
    for part in uncut(len(keys), lambda part: keys[order[part]]):
        rows = order[part]
        begins = np.flatnonzero(np.append(True, keys[rows][1:] != keys[rows][:-1]))
        differ = np.minimum.reduceat(contents[rows], begins) != np.maximum.reduceat(
            contents[rows], begins
        )
        found[rows] = np.repeat(differ, np.diff(np.append(begins, len(rows))))
    return found


def _close(thumbnails: Thumbnails, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows in pairs whose thumbnails are close in every cell."""
    found = [np.zeros(0, np.int64)]
    for begin in range(0, len(pairs), _CHUNK_ROWS):
        part = pairs[begin : begin + _CHUNK_ROWS]
        one, other = thumbnails[part[:, 0]].astype(np.int16), thumbnails[part[:, 1]]
        found.append(part[np.abs(one - other).max(axis=1) <= _MOST_LEVELS].ravel())
    return np.unique(np.concatenate(found))
