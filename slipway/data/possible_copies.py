"""Which JPEGs that are known by their luma alone may have the same pixels as a picture of other bytes: only these are decoded again.

Two such JPEGs hold the same coefficients in other wrappings, so their thumbnails are equal. A picture whose colours were decoded,
such as a PNG copy, has the JPEG's luma wherever no colour was cut off at 0 or 255, so the thumbnails are next to equal.
Unlike pictures are named, too: whoever is named is compared by all its pixels.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.data.near_duplicates import alike_as_they_are
from slipway.data.thumbnails import Thumbnails

_MOST_BITS = 8  # of 64, by which the hashes of a copy may differ
_MOST_LEVELS = 32  # by which a cell of a copy's thumbnail may differ, where most of its colours are cut off
_FLAT_LEVELS = 8  # a thumbnail of fewer grey levels says too little
_CHUNK_ROWS = 1 << 12
_MULTIPLIERS = np.random.default_rng(0).integers(1 << 63, (1 << 64) - 1, 34, np.uint64, endpoint=True) | np.uint64(1)

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]


def possible_copies(thumbnails: Thumbnails, sizes: NDArray[np.int32], contents: Keys, is_digested: Mask) -> Mask:
    """(N,) the rows that are not digested and that may have a copy with another content.

    `thumbnails` (N, 256), `sizes` (N, 2) in pixels, `contents` (N,) equal for equal bytes, `is_digested` (N,) for rows whose pixels
    were digested in colour.
    """
    size_keys = (sizes[:, 0].astype(np.uint64) << np.uint64(32)) | sizes[:, 1].astype(np.uint64)
    keys, is_flat = _keys(thumbnails, size_keys)
    found = _has_equal(keys, contents)
    mixed = np.flatnonzero(np.isin(size_keys, np.intersect1d(size_keys[is_digested], size_keys[~is_digested])))
    if len(mixed):
        found[mixed[is_flat[mixed]]] = True
        pairs = mixed[alike_as_they_are(thumbnails.of(mixed), _MOST_BITS)]
        of_both = (is_digested[pairs].sum(axis=1) == 1) & (size_keys[pairs[:, 0]] == size_keys[pairs[:, 1]])
        found[_close(thumbnails, pairs[of_both])] = True
    return found & ~is_digested


def _keys(thumbnails: Thumbnails, size_keys: Keys) -> tuple[Keys, Mask]:
    """(N,) equal for equal thumbnails and sizes, and (N,) whether there is next to nothing to be seen."""
    keys, is_flat = np.empty(len(thumbnails), np.uint64), np.empty(len(thumbnails), bool)
    for begin in range(0, len(thumbnails), _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        pixels = np.ascontiguousarray(thumbnails[part])
        # Every bit of a product depends on those below it alone: bring the upper ones down first.
        words = pixels.view(np.uint64) * _MULTIPLIERS[33]
        words ^= words >> np.uint64(32)
        keys[part] = words @ _MULTIPLIERS[:32] + size_keys[part] * _MULTIPLIERS[32]
        is_flat[part] = np.ptp(pixels, axis=1) < _FLAT_LEVELS
    return keys, is_flat


def _has_equal(keys: Keys, contents: Keys) -> Mask:
    """(N,) rows with a key that a row of another content has, too."""
    found = np.zeros(len(keys), bool)
    if len(keys):
        order = np.argsort(keys, kind="stable")
        begins = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1]]))
        contents = contents[order]
        differ = np.minimum.reduceat(contents, begins) != np.maximum.reduceat(contents, begins)
        found[order] = np.repeat(differ, np.diff(np.append(begins, len(order))))
    return found


def _close(thumbnails: Thumbnails, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows in pairs whose thumbnails are close in every cell."""
    found = [np.zeros(0, np.int64)]
    for begin in range(0, len(pairs), _CHUNK_ROWS):
        part = pairs[begin : begin + _CHUNK_ROWS]
        one, other = thumbnails[part[:, 0]].astype(np.int16), thumbnails[part[:, 1]]
        found.append(part[np.abs(one - other).max(axis=1) <= _MOST_LEVELS].ravel())
    return np.unique(np.concatenate(found))
