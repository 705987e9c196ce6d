"""Finds near-duplicate images: re-encoded, rescaled, slightly cropped, lighter or darker copies.

Each image is represented by its 16x16 grey thumbnail. A 64-bit hash (signs of its low DCT
frequencies) finds candidate pairs, and the correlation of the thumbnails decides. Because a crop
shifts the content, each image also searches with the hashes of its own crops by a twentieth. All
sums are of integers and exact in float64: the result depends only on the set of images.

Candidates share one of four bands of the hash, 16 bits each; the search also flips the least
certain bits of a band. In larger sets they must share more bits, so that buckets do not grow.
Mirrored or rotated images, larger crops, borders and captions are not found.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch import (
    ScratchSet,
    order_by,
    pairs_of,
    scratch_array,
    scratch_file,
    slices,
    take,
)
from slipway.data.images.quality import THUMBNAIL_PX
from slipway.data.images.thumbnails import Thumbnails
from slipway.system.cores import num_cores

MIN_CORRELATION = 0.92  # least correlation of an image's thumbnails (bench/results/cleaning.md)
_MIN_UNALIGNED = 0.6  # below it hardly any crop aligns two thumbnails (bench/LOG.md)
MAX_CLUSTER_FRACTION = 0.02  # fraction of all images; a larger cluster is divided
MIN_CLUSTER_LIMIT = 8  # a smaller cluster is never divided
_STRICTER_CORRELATIONS = (0.96, 0.98, 0.99, 0.995)

_CROP = 0.05
_FINE_CROPS = (0.025, 0.05)
_BANDS = 4
_BAND_BITS = 16
# Ranks of the least certain bits of a band that are flipped together.
_FLIPPED = ((), (0,), (1,), (2,), (3,), (0, 1), (0, 2), (1, 2))
_MAX_BITS = 22  # bits of the hash that candidates may have to share, in the largest sets
_MAX_CROWDING = 8.0  # images in a bucket, averaged over images
_MAX_BUCKET = 24  # candidates of one query; in a larger bucket only the nearest ones by other bits
_CHUNK_ROWS = 1 << 12
_FLOAT32_ERROR = 1e-3  # upper bound of the error of a float32 correlation
_CHUNK_PAIRS = 256  # more leave the processor's cache, fewer leave threads waiting for the GIL
# Images in one product: OpenBLAS starts threads of its own above 2^18 multiplications
# (64 * 16 * 16 * 16), which compete with ours (bench/LOG.md).
_PRODUCT_IMAGES = 64
_LARGEST_WEIGHT = 126  # its product with 255 grey levels and 256 cells is below 2^24

Codes = NDArray[np.uint64]
Pairs = NDArray[np.int64]  # (P, 2) row numbers, the smaller first, each pair once
Images = NDArray[Any]  # (P, 16, 16) float64 or float32, mean 0
_NONE: Pairs = np.zeros((0, 2), np.int64)
_32 = np.uint64(32)


@dataclass(frozen=True)
class DuplicatePairs:
    """Pairs of near duplicates and the correlation of their thumbnails at the best alignment."""

    pairs: Pairs
    correlations: NDArray[np.float64]  # (P,)


def find_pairs(thumbnails: NDArray[np.uint8] | Thumbnails, max_bits: int) -> DuplicatePairs:
    """Return pairs of near duplicates among thumbnails (N, 256), verified by correlation.

    The hashes of a pair differ in at most `max_bits` of 64 bits.
    """
    if not len(thumbnails):
        return DuplicatePairs(_NONE, np.zeros(0))
    candidates = _candidates(hashes(thumbnails), max_bits)
    correlations = _correlations(thumbnails, candidates)
    same = np.flatnonzero(correlations >= MIN_CORRELATION)
    return DuplicatePairs(candidates[same], correlations[same])


def find_pairs_by_hash(thumbnails: NDArray[np.uint8] | Thumbnails, max_bits: int) -> Pairs:
    """Return pairs of near duplicates among thumbnails (N, 256), found by hashes without crops."""
    return _candidates(hashes(thumbnails, with_crops=False), max_bits) if len(thumbnails) else _NONE


def cluster_roots(
    found: DuplicatePairs,
    num_rows: int,
    num_images: int | None = None,
    stricter: Sequence[float] = _STRICTER_CORRELATIONS,
) -> NDArray[np.int64]:
    """Return the smallest row in the cluster of each row, (num_rows,); -1 for rows without a pair.

    Chains of similar pairs could merge a whole data set. A cluster of more than
    MAX_CLUSTER_FRACTION of all images (`num_images`, by default `num_rows`) is therefore divided:
    it keeps only pairs above a correlation, and the bounds in `stricter` are applied one after the
    other until the cluster is small enough or consists of copies only.
    """
    limit = max(MIN_CLUSTER_LIMIT, int((num_images or num_rows) * MAX_CLUSTER_FRACTION))
    pairs, correlations = found.pairs, found.correlations
    roots = _components(pairs, num_rows)
    for min_correlation in stricter:
        is_too_large = np.bincount(roots, minlength=num_rows) > limit
        if not is_too_large.any():
            break
        stays = ~is_too_large[roots[pairs[:, 0]]] | (correlations >= min_correlation)
        pairs, correlations = pairs[stays], correlations[stays]
        roots = _components(pairs, num_rows)
    is_single = np.bincount(roots, minlength=num_rows)[roots] == 1
    return np.where(is_single, -1, roots)


def _components(pairs: Pairs, num_rows: int) -> NDArray[np.int64]:
    """Return the smallest row of each row's connected component, (num_rows,)."""
    roots = np.arange(num_rows)
    while True:
        before = roots.copy()
        smaller = np.minimum(roots[pairs[:, 0]], roots[pairs[:, 1]])
        for side in (0, 1):
            np.minimum.at(roots, roots[pairs[:, side]], smaller)
            np.minimum.at(roots, pairs[:, side], smaller)
        roots = roots[roots]
        if np.array_equal(roots, before):
            return roots


# Hashes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hashes:
    """The hashes of N images and of their crops, with the least certain bits of each band."""

    codes: Codes  # (N, W) the image first, then its crops
    # (N, 4, 4) the four least certain bits of each band, counted from its highest
    weakest: NDArray[np.uint8]


def hashes(thumbnails: NDArray[np.uint8] | Thumbnails, with_crops: bool = True) -> Hashes:
    """Return the hashes of thumbnails (N, 256), and also of their crops if `with_crops`."""
    weights = _weights() if with_crops else np.ascontiguousarray(_weights()[:, :64])
    codes = scratch_array((len(thumbnails), weights.shape[1] // 64), np.uint64)
    weakest = scratch_array((len(thumbnails), _BANDS, 4), np.uint8)
    for part in slices(len(thumbnails), _CHUNK_ROWS):
        codes[part], weakest[part] = _hash(thumbnails[part], weights)
    return Hashes(codes, weakest)


def _hash(
    thumbnails: NDArray[np.uint8], weights: NDArray[np.float32]
) -> tuple[Codes, NDArray[np.uint8]]:
    values = thumbnails.astype(np.float32)
    values -= np.rint(values.mean(axis=1, keepdims=True))
    # Integers below 2^24: exact in float32, in any order of summation.
    frequencies = (values @ weights).reshape(len(values), -1, 64)
    plain = np.abs(frequencies[:, 0]).reshape(-1, _BANDS, _BAND_BITS)
    weakest = np.argsort(plain, axis=2, kind="stable")[:, :, :4].astype(np.uint8)
    codes = np.packbits(frequencies > 0, axis=2).view(">u8")[:, :, 0].astype(np.uint64)
    return codes, weakest


@lru_cache(maxsize=1)
def _weights() -> NDArray[np.float32]:
    """Return a matrix (256, 64 * W) that maps a thumbnail to the DCT values of its hashes.

    There are W crops. For each of them, the matrix crops the thumbnail, resizes it back and takes
    64 low frequencies. Its values are integers. Each band of a hash gets high and low frequencies.
    """
    cosines = np.cos(np.pi * np.outer(np.arange(9), np.arange(THUMBNAIL_PX) + 0.5) / THUMBNAIL_PX)
    order = [
        (8, 0),
        *((down, across) for down in range(8) for across in range(8) if (down, across) != (0, 0)),
    ]
    order = [order[index] for band in range(_BANDS) for index in range(band, 64, _BANDS)]
    columns = []
    for down, across in [((0.0, 1.0), (0.0, 1.0)), *product(_places_of(_CROP), repeat=2)]:
        rows_of, columns_of = cosines @ _resampling(*down), cosines @ _resampling(*across)
        columns += [np.outer(rows_of[i], columns_of[j]).ravel() for i, j in order]
    basis = np.stack(columns, axis=1)
    whole: NDArray[np.float32] = np.rint(
        (basis - basis.mean(axis=0)) * _LARGEST_WEIGHT / np.abs(basis).max()
    ).astype(np.float32)
    return whole


def _places_of(crop: float) -> list[tuple[float, float]]:
    """Return three crops of a side, at its start, middle and end, as (begin, end) in [0, 1]."""
    return [(crop * shift, 1 - crop * (1 - shift)) for shift in (0.0, 0.5, 1.0)]


def _resampling(begin: float, end: float) -> NDArray[np.float64]:
    """Return weights (16, 16) that crop one side of a thumbnail and resize it back to 16 pixels.

    The crop runs from `begin` to `end`, fractions of the side. Row i holds the fraction of the new
    pixel i that each of the 16 old pixels covers; each row sums to 1.
    """
    edges = np.linspace(begin, end, THUMBNAIL_PX + 1) * THUMBNAIL_PX
    cells = np.arange(THUMBNAIL_PX)
    overlap = np.clip(
        np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells), 0, None
    )
    return np.asarray(overlap / overlap.sum(axis=1, keepdims=True))


# Candidates ---------------------------------------------------------------------------------------


def _candidates(known: Hashes, max_bits: int) -> Pairs:
    """Return pairs of rows whose hashes differ in at most `max_bits` bits.

    One of the two hashes may be that of a crop.
    """
    with scratch_file() as file:
        found = ScratchSet(file)

        def search(number: int) -> None:
            for codes in _Band(known.codes[:, 0], number).candidates(known, max_bits):
                found.add(codes)

        with ThreadPoolExecutor(min(num_cores(), _BANDS)) as threads:
            list(threads.map(search, range(_BANDS)))
        codes = found.ascending()
    return pairs_of(codes)


class _Band:
    """The rows sorted by their hash, rotated so that one of the four bands comes first.

    Rows whose first bits agree form a bucket. The buckets use the fewest bits that avoid crowding.
    """

    def __init__(self, plain: Codes, number: int) -> None:
        self.number = number
        rotated = scratch_array((len(plain),), np.uint64)
        for part in slices(len(plain)):
            rotated[part] = self._rotate(plain[part])
        self.order = order_by(rotated)
        self.sorted = take(rotated, self.order)
        for num_bits in range(_BAND_BITS, _MAX_BITS + 1):
            self._shift = np.uint64(64 - num_bits)
            self.starts = scratch_array(((1 << num_bits) + 1,), np.int64)
            self.starts[:] = 0
            sizes = self.starts[1:]
            for part in slices(len(plain)):
                keys = (self.sorted[part] >> self._shift).astype(np.int64)
                sizes[keys[0] : keys[-1] + 1] += np.bincount(keys - keys[0])
            if float(np.dot(sizes, sizes)) <= _MAX_CROWDING * len(plain):
                break
        np.cumsum(sizes, out=sizes)

    def candidates(self, known: Hashes, max_bits: int) -> Iterator[Codes]:
        """Yield candidate pairs as codes of `_pair_codes`; some pairs occur several times."""
        if not self.number:
            yield from self._neighbours(max_bits)
        for part in slices(len(self.order), _CHUNK_ROWS):
            rows = self.order[part]  # in sorted order, so that the buckets they open are close
            plain, *crops = self._rotate(known.codes[rows].T.copy())
            weakest = known.weakest[rows, self.number].T
            queries = [(plain, plain ^ _flips(weakest[list(ranks)])) for ranks in _FLIPPED]
            queries += [(crop, crop) for crop in crops]
            found = [self._search(rows, asked, opened, max_bits) for asked, opened in queries]
            yield np.unique(np.concatenate(found))

    def _rotate(self, values: Codes) -> Codes:
        by = np.uint64(self.number * _BAND_BITS)
        return values if by == 0 else (values << by) | (values >> (np.uint64(64) - by))

    def _search(self, rows: NDArray[np.int64], asked: Codes, opened: Codes, max_bits: int) -> Codes:
        """Compare the hashes `asked` of `rows` with the rows in the buckets of the hashes `opened`.

        Returns the codes of the pairs that differ in at most `max_bits` bits.
        """
        keys = (opened >> self._shift).astype(np.int64)
        begins, ends = self.starts[keys], self.starts[keys + 1]
        crowded = np.flatnonzero(ends - begins > _MAX_BUCKET)
        if len(crowded):
            places = np.searchsorted(self.sorted, opened[crowded])
            begins[crowded] = np.maximum(begins[crowded], places - _MAX_BUCKET // 2)
            ends[crowded] = np.minimum(ends[crowded], places + _MAX_BUCKET // 2)
        sizes = ends - begins
        askers = np.repeat(np.arange(len(asked)), sizes)
        places = np.arange(len(askers)) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        near = np.flatnonzero(np.bitwise_count(asked[askers] ^ self.sorted[places]) <= max_bits)
        return _pair_codes(rows[askers[near]], self.order[places[near]])

    def _neighbours(self, max_bits: int) -> Iterator[Codes]:
        """Yield pairs of rows that follow each other in the order of their hashes.

        Only pairs whose hashes differ in at most `max_bits` bits are yielded. Rows with equal
        hashes follow each other, so these pairs form a chain through all of them.
        """
        for part in slices(len(self.order) - 1):
            after = slice(part.start + 1, part.stop + 1)
            distance = np.bitwise_count(self.sorted[after] ^ self.sorted[part])
            near = np.flatnonzero(distance <= max_bits)
            yield _pair_codes(self.order[part][near], self.order[after][near])


def _flips(places: NDArray[np.uint8]) -> Codes:
    """Return masks (R,) with the bits at `places` (K, R) set; place 0 is the highest bit."""
    bits = np.uint64(1) << (np.uint64(63) - places.astype(np.uint64))
    return np.asarray(np.bitwise_or.reduce(bits, axis=0))


def _pair_codes(rows: NDArray[np.int64], others: NDArray[np.int64]) -> Codes:
    """Return a uint64 code for each pair of rows: the smaller row is in the upper 32 bits."""
    different = rows != others
    low, high = np.minimum(rows, others)[different], np.maximum(rows, others)[different]
    return np.unique((low.astype(np.uint64) << _32) | high.astype(np.uint64))


# Verification -------------------------------------------------------------------------------------


def _correlations(thumbnails: NDArray[np.uint8] | Thumbnails, pairs: Pairs) -> NDArray[np.float64]:
    """Return the best correlation of each pair, (P,), over crops of either image.

    The search stops for a pair that reaches MIN_CORRELATION.
    """

    def images(chosen: Pairs) -> tuple[Images, Images]:
        return _centred(thumbnails[chosen[:, 0]]), _centred(thumbnails[chosen[:, 1]])

    def unaligned(chosen: Pairs) -> NDArray[np.float64]:
        return _correlation(*images(chosen))

    def aligned(chosen: Pairs) -> NDArray[np.float64]:
        one, other = images(chosen)
        return _aligned(one, other, _correlation(one, other))

    best = _over_chunks(unaligned, pairs)
    undecided = np.flatnonzero((best < MIN_CORRELATION) & (best >= _MIN_UNALIGNED))
    raised = _over_chunks(aligned, take(pairs, undecided))
    best[undecided] = raised
    return best


def _over_chunks(
    function: Callable[[Pairs], NDArray[np.float64]], pairs: Pairs
) -> NDArray[np.float64]:
    """Apply `function` to the pairs in chunks, on several threads; return the results (P,)."""
    found = scratch_array((len(pairs),), np.float64)
    num_threads = num_cores()

    def work(first: int) -> None:
        for begin in range(first * _CHUNK_PAIRS, len(pairs), num_threads * _CHUNK_PAIRS):
            part = slice(begin, begin + _CHUNK_PAIRS)
            found[part] = function(pairs[part])

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))
    return found


def _aligned(one: Images, other: Images, unaligned: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlations (P,), tried with crops where those may reach MIN_CORRELATION."""
    best = unaligned.copy()
    # Most pairs that share a hash by chance are rejected here.
    rough = _over_crops(
        one.astype(np.float32), other.astype(np.float32), best, MIN_CORRELATION - _FLOAT32_ERROR
    )
    undecided = np.flatnonzero(rough >= MIN_CORRELATION - _FLOAT32_ERROR)
    best[undecided] = _over_crops(
        one[undecided], other[undecided], best[undecided], MIN_CORRELATION
    )
    return best


def _over_crops(
    one: Images, other: Images, best: NDArray[np.float64], enough: float
) -> NDArray[np.float64]:
    """Return the maximum (P,) of `best` and of the correlations with crops of either image."""
    best = best.copy()
    rows = np.arange(len(best))
    for down, acrosses in _crop_weights(one.dtype):
        lowered = down @ one, down @ other
        for across in acrosses:
            still = best[rows] < enough
            if not still.all():
                rows, one, other = rows[still], one[still], other[still]
                lowered = lowered[0][still], lowered[1][still]
            for cropped, whole in zip(lowered, (other, one), strict=True):
                best[rows] = np.maximum(best[rows], _correlation(_times(cropped, across), whole))
    return best


def _times(images: Images, weights: NDArray[Any]) -> Images:
    """Multiply images (P, 16, 16) by weights (16, 16), a limited number at a time."""
    made = np.empty(images.shape, np.result_type(images, weights))
    whole = len(images) // _PRODUCT_IMAGES * _PRODUCT_IMAGES
    for part, num_products in (
        (slice(0, whole), whole // _PRODUCT_IMAGES),
        (slice(whole, None), 1),
    ):
        lines = (num_products, -1, THUMBNAIL_PX)
        if len(images[part]):
            np.matmul(images[part].reshape(lines), weights, out=made[part].reshape(lines))
    return made


def _centred(thumbnails: NDArray[np.uint8]) -> Images:
    """Return the thumbnails as (P, 16, 16) float64 with a mean of almost 0."""
    values = thumbnails.astype(np.float64)
    values -= values.mean(axis=1, keepdims=True)
    return values.reshape(-1, THUMBNAIL_PX, THUMBNAIL_PX)


def _correlation(first: Images, centred: Images) -> NDArray[np.float64]:
    """Return the correlation of each pair of images (P, 16, 16): (P,); 0 if either is constant."""
    first, centred = first.reshape(-1, THUMBNAIL_PX**2), centred.reshape(-1, THUMBNAIL_PX**2)
    sums = first.sum(axis=1)
    squares = np.vecdot(first, first) - sums * sums / THUMBNAIL_PX**2
    spread = np.sqrt(np.maximum(squares, 0) * np.vecdot(centred, centred))
    return np.asarray(np.vecdot(first, centred) / np.where(spread == 0, 1, spread))


@lru_cache(maxsize=2)
def _crop_weights(dtype: np.dtype[Any]) -> list[tuple[NDArray[Any], list[NDArray[Any]]]]:
    """Return the weights for each crop: first @ image @ second crops an image and resizes it back.

    Both weights of a crop are (16, 16).
    """
    found = []
    for crop in _FINE_CROPS:
        places = [_resampling(*place).astype(dtype) for place in _places_of(crop)]
        found += [(down, [np.ascontiguousarray(across.T) for across in places]) for down in places]
    return found
