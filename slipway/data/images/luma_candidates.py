"""Finds JPEGs that may have the same pixels as a file with different bytes.

Inspection decodes only the luma of most JPEGs; only these candidates are decoded again, in colour.
Two JPEGs with equal pixels hold the same coefficients with different metadata, so their thumbnails
are equal. An image decoded in colour, such as a PNG copy, has the luma of the JPEG except where
colours were clipped at 0 or 255, so its thumbnail is nearly equal. False candidates do no harm,
because all pixels of a candidate are compared.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch import key_slices, order_by, scratch_array, slices
from slipway.data.images.near_duplicates import find_pairs_by_hash
from slipway.data.images.thumbnails import Thumbnails

_MAX_BITS = 8  # bits of 64 by which the hashes of a copy may differ
_MAX_LEVELS = 32  # levels by which a cell of a copy's thumbnail may differ if most colours clip
_FLAT_LEVELS = 8  # a thumbnail with fewer grey levels does not distinguish images
_CHUNK_ROWS = 1 << 12
_MULTIPLIERS = np.random.default_rng(0).integers(
    1 << 63, (1 << 64) - 1, 34, np.uint64, endpoint=True
) | np.uint64(1)

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]


def luma_candidates(
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
