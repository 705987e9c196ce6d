"""Which pictures look the same: re-encoded, rescaled, a little cropped, brighter or darker.

A picture is known by its 16x16 grey thumbnail. A 64-bit hash (signs of its low DCT frequencies) finds candidates, and the
correlation of the thumbnails decides. A crop shifts what it shows, so each picture also asks with the hashes of its own crops by a
twentieth. All sums are of whole numbers, exact in float64: the result depends on the set of pictures and on nothing else.

Candidates share 16 bits of the hash (one of four bands, with the least certain bits tried either way), and more of them the more
pictures there are, so that the buckets they are looked for in do not grow. What is not found: mirrored or turned pictures, larger
crops, borders, captions.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch_arrays import (
    ScratchSet,
    full,
    order_of,
    parts_of,
    rows_where,
    taken,
)
from slipway.data.engine.scratch_tables import scratch_array, scratch_file
from slipway.data.images.quality import THUMBNAIL_PX
from slipway.data.images.thumbnails import Thumbnails
from slipway.system.cores import num_cores

MIN_CORRELATION = 0.92  # of two thumbnails that show the same picture; bench/results/cleaning.md says how it was chosen
_MIN_UNALIGNED = (
    0.6  # below it next to no crop of a twentieth brings two thumbnails into line (bench/LOG.md)
)
MAX_CLUSTER_SHARE = (
    0.02  # of all pictures in one cluster; a larger one is taken apart at stricter correlations
)
MIN_CLUSTER_LIMIT = 8  # below it no cluster is taken apart
_STRICTER = (0.96, 0.98, 0.99, 0.995)

_CROP = 0.05
_FINE_CROPS = (0.025, 0.05)
_BANDS = 4
_BAND_BITS = 16
_FLIPPED = (
    (),
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 1),
    (0, 2),
    (1, 2),
)  # of the least certain bits of a band, by rank
_MOST_BITS = 22  # of the hash that candidates may have to share, in the largest sets
_MAX_CROWDING = 8.0  # pictures in a bucket, as a picture meets them
_MAX_BUCKET = (
    24  # of candidates for one question; in a larger bucket only the nearest by the other bits
)
_CHUNK_ROWS = 1 << 12
_ROUGH = 1e-3  # more than float32 can be wrong by in a correlation
_CHUNK_PAIRS = 256  # compared at once: more would not stay in the processor's cache, fewer leave the threads waiting for the interpreter
# Of pictures in one product: OpenBLAS takes threads of its own for more than 2^18 multiplications (64 * 16 * 16 * 16), which get into
# the way of ours (bench/LOG.md).
_PRODUCT_PICTURES = 64
_LARGEST_WEIGHT = 126  # times 255 grey levels times 256 cells is below 2^24

Codes = NDArray[np.uint64]
Pairs = NDArray[np.int64]  # (P, 2) row numbers, the smaller first, each pair once
Pictures = NDArray[Any]  # (P, 16, 16) float64 or float32, mean 0
_NONE: Pairs = np.zeros((0, 2), np.int64)
_32, _LOW_32 = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class DuplicatePairs:
    """Pairs that look the same, and how well their thumbnails correlate at the best alignment."""

    pairs: Pairs
    correlations: NDArray[np.float64]  # (P,)


def find_pairs(thumbnails: NDArray[np.uint8] | Thumbnails, max_bits: int) -> DuplicatePairs:
    """All near duplicates among (N, 256) thumbnails whose hashes differ in at most `max_bits` of 64."""
    if not len(thumbnails):
        return DuplicatePairs(_NONE, np.zeros(0))
    candidates = _candidates(hashes(thumbnails), max_bits)
    correlations = _correlations(thumbnails, candidates)
    same = rows_where(correlations >= MIN_CORRELATION)
    return DuplicatePairs(candidates[same], correlations[same])


def find_pairs_by_hash(thumbnails: NDArray[np.uint8] | Thumbnails, max_bits: int) -> Pairs:
    """Pairs among (N, 256) thumbnails whose hashes differ in at most `max_bits` of 64 without any crop."""
    return _candidates(hashes(thumbnails, with_crops=False), max_bits) if len(thumbnails) else _NONE


def clusters(twins: DuplicatePairs, num_rows: int, of_rows: int | None = None) -> NDArray[np.int64]:
    """(N,) the smallest row number among those connected with each of `num_rows` rows, or -1 for a row that is alone.

    Chains of pairs that each look alike could glue a whole data set together. So a cluster of more than MAX_CLUSTER_SHARE of all rows
    keeps only its better correlated pairs, step by step, until it is small enough or nothing but copies are left. All rows are
    `of_rows`, where those without a pair are not numbered.
    """
    limit = max(
        MIN_CLUSTER_LIMIT, int((num_rows if of_rows is None else of_rows) * MAX_CLUSTER_SHARE)
    )
    pairs, correlations = twins.pairs, twins.correlations
    roots = _components(pairs, num_rows)
    for stricter in _STRICTER:
        too_large = np.bincount(roots, minlength=num_rows) > limit
        if not too_large.any():
            break
        stays = ~too_large[roots[pairs[:, 0]]] | (correlations >= stricter)
        pairs, correlations = pairs[stays], correlations[stays]
        roots = _components(pairs, num_rows)
    alone = np.bincount(roots, minlength=num_rows)[roots] == 1
    return np.where(alone, -1, roots)


def _components(pairs: Pairs, num_rows: int) -> NDArray[np.int64]:
    """(N,) the smallest row of each row's connected component: labels flow along the pairs, and along themselves."""
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


# Hashes ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hashes:
    """What the search knows of N pictures."""

    codes: Codes  # (N, W): first that of the picture, then those of its crops
    weakest: NDArray[
        np.uint8
    ]  # (N, 4, 4) the four least certain bits of each band, counted from its highest


def hashes(thumbnails: NDArray[np.uint8] | Thumbnails, with_crops: bool = True) -> Hashes:
    """Of (N, 256) thumbnails."""
    weights = _weights() if with_crops else np.ascontiguousarray(_weights()[:, :64])
    codes = scratch_array((len(thumbnails), weights.shape[1] // 64), np.uint64)
    weakest = scratch_array((len(thumbnails), _BANDS, 4), np.uint8)
    for begin in range(0, len(thumbnails), _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        codes[part], weakest[part] = _hash(thumbnails[part], weights)
    return Hashes(codes, weakest)


def _hash(
    thumbnails: NDArray[np.uint8], weights: NDArray[np.float32]
) -> tuple[Codes, NDArray[np.uint8]]:
    values = thumbnails.astype(np.float32)
    values -= np.rint(values.mean(axis=1, keepdims=True))
    frequencies = (values @ weights).reshape(
        len(values), -1, 64
    )  # whole numbers below 2^24: exact in float32, in any order
    plain = np.abs(frequencies[:, 0]).reshape(-1, _BANDS, _BAND_BITS)
    weakest = np.argsort(plain, axis=2, kind="stable")[:, :, :4].astype(np.uint8)
    return np.packbits(frequencies > 0, axis=2).view(">u8")[:, :, 0].astype(np.uint64), weakest


@lru_cache(maxsize=1)
def _weights() -> NDArray[np.float32]:
    """(256, 64 * W) whole numbers: for each window crop, resize back, and take 64 low frequencies, high and low ones in each band."""
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
    """Where the window of a crop begins and ends: at one side, in the middle, at the other."""
    return [(crop * shift, 1 - crop * (1 - shift)) for shift in (0.0, 0.5, 1.0)]


def _resampling(begin: float, end: float) -> NDArray[np.float64]:
    """(16, 16): the cells of a window from the cells of the whole, each by the share that it covers."""
    edges = np.linspace(begin, end, THUMBNAIL_PX + 1) * THUMBNAIL_PX
    cells = np.arange(THUMBNAIL_PX)
    overlap = np.clip(
        np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells), 0, None
    )
    return np.asarray(overlap / overlap.sum(axis=1, keepdims=True))


# Candidates -----------------------------------------------------------------------------------------------------------------------


def _candidates(known: Hashes, max_bits: int) -> Pairs:
    """Pairs whose hashes differ in at most `max_bits`, one side's being perhaps that of a crop."""

    with scratch_file() as file:
        found = ScratchSet(file)

        def search(number: int) -> None:
            for codes in _Band(known.codes[:, 0], number).candidates(known, max_bits):
                found.add(codes)

        with ThreadPoolExecutor(min(num_cores(), _BANDS)) as threads:
            list(threads.map(search, range(_BANDS)))
        codes = found.rising()
    pairs = scratch_array((len(codes), 2), np.int64)
    for part in parts_of(len(codes)):
        pairs[part] = np.stack([codes[part] >> _32, codes[part] & _LOW_32], axis=1)
    return pairs


class _Band:
    """All rows sorted by the hash as it reads from one of its four bands on, so that equal beginnings lie together: the buckets.

    The beginnings are the shortest ones whose buckets are not crowded.
    """

    def __init__(self, plain: Codes, number: int) -> None:
        self.number = number
        turned = scratch_array((len(plain),), np.uint64)
        for part in parts_of(len(plain)):
            turned[part] = self._turned(plain[part])
        self.order = order_of(turned)
        self.sorted = taken(turned, self.order)
        for num_bits in range(_BAND_BITS, _MOST_BITS + 1):
            self._below = np.uint64(64 - num_bits)
            self.starts = full((1 << num_bits) + 1, 0, np.int64)
            sizes = self.starts[1:]
            for part in parts_of(len(plain)):
                keys = (self.sorted[part] >> self._below).astype(np.int64)
                sizes[keys[0] : keys[-1] + 1] += np.bincount(keys - keys[0])
            if float(np.dot(sizes, sizes)) <= _MAX_CROWDING * len(plain):
                break
        np.cumsum(sizes, out=sizes)

    def candidates(self, known: Hashes, max_bits: int) -> Iterator[Codes]:
        """Pairs in one number each: the smaller row above the larger one, 32 bits for either. Some come several times."""
        if not self.number:
            yield from self._neighbours(max_bits)
        for part in parts_of(len(self.order), _CHUNK_ROWS):
            rows = self.order[
                part
            ]  # in this order, so that the buckets they open lie near each other
            plain, *crops = self._turned(known.codes[rows].T.copy())
            weakest = known.weakest[rows, self.number].T
            questions = [(plain, plain ^ _flips(weakest[list(ranks)])) for ranks in _FLIPPED] + [
                (crop, crop) for crop in crops
            ]
            yield np.unique(
                np.concatenate(
                    [self._ask(rows, asked, opened, max_bits) for asked, opened in questions]
                )
            )

    def _turned(self, values: Codes) -> Codes:
        by = np.uint64(self.number * _BAND_BITS)
        return values if by == 0 else (values << by) | (values >> (np.uint64(64) - by))

    def _ask(self, rows: NDArray[np.int64], asked: Codes, opened: Codes, max_bits: int) -> Codes:
        """Pairs of one of the rows, whose hashes are `asked`, and another in the bucket that is `opened` for it."""
        keys = (opened >> self._below).astype(np.int64)
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
        return _codes(rows[askers[near]], self.order[places[near]])

    def _neighbours(self, max_bits: int) -> Iterator[Codes]:
        """Pairs that follow each other in the order: no crowd of equal hashes falls apart for being crowded."""
        for part in parts_of(len(self.order) - 1):
            after = slice(part.start + 1, part.stop + 1)
            near = np.flatnonzero(
                np.bitwise_count(self.sorted[after] ^ self.sorted[part]) <= max_bits
            )
            yield _codes(self.order[part][near], self.order[after][near])


def _flips(places: NDArray[np.uint8]) -> Codes:
    """(R,) masks of the bits at (K, R) places, which are counted from the highest."""
    return np.asarray(
        np.bitwise_or.reduce(np.uint64(1) << (np.uint64(63) - places.astype(np.uint64)), axis=0)
    )


def _codes(rows: NDArray[np.int64], others: NDArray[np.int64]) -> Codes:
    different = rows != others
    low, high = np.minimum(rows, others)[different], np.maximum(rows, others)[different]
    return np.unique((low.astype(np.uint64) << _32) | high.astype(np.uint64))


# Verification ---------------------------------------------------------------------------------------------------------------------


def _correlations(thumbnails: NDArray[np.uint8] | Thumbnails, pairs: Pairs) -> NDArray[np.float64]:
    """(P,) the best correlation of each pair over the crops of either side; once it suffices no further crop is tried."""

    def pictures(chosen: Pairs) -> tuple[Pictures, Pictures]:
        return _centred(thumbnails[chosen[:, 0]]), _centred(thumbnails[chosen[:, 1]])

    def unaligned(chosen: Pairs) -> NDArray[np.float64]:
        return _correlation(*pictures(chosen))

    def aligned(chosen: Pairs) -> NDArray[np.float64]:
        one, other = pictures(chosen)
        return _aligned(one, other, _correlation(one, other))

    best = _over_chunks(unaligned, pairs)
    undecided = rows_where((best < MIN_CORRELATION) & (best >= _MIN_UNALIGNED))
    raised = _over_chunks(aligned, taken(pairs, undecided))
    for part in parts_of(len(undecided)):
        best[undecided[part]] = raised[part]
    return best


def _over_chunks(
    function: Callable[[Pairs], NDArray[np.float64]], pairs: Pairs
) -> NDArray[np.float64]:
    """(P,) what the function says of the pairs, each thread taking every so manieth chunk of them."""
    found, num_threads = scratch_array((len(pairs),), np.float64), num_cores()

    def work(first: int) -> None:
        for begin in range(first * _CHUNK_PAIRS, len(pairs), num_threads * _CHUNK_PAIRS):
            part = slice(begin, begin + _CHUNK_PAIRS)
            found[part] = function(pairs[part])

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))
    return found


def _aligned(one: Pictures, other: Pictures, unaligned: NDArray[np.float64]) -> NDArray[np.float64]:
    """The correlations, raised by the crops of those that a crop may raise to MIN_CORRELATION."""
    best = unaligned.copy()
    # Most pairs that share a hash by chance go no further than this.
    rough = _over_crops(
        one.astype(np.float32), other.astype(np.float32), best, MIN_CORRELATION - _ROUGH
    )
    undecided = np.flatnonzero(rough >= MIN_CORRELATION - _ROUGH)
    best[undecided] = _over_crops(
        one[undecided], other[undecided], best[undecided], MIN_CORRELATION
    )
    return best


def _over_crops(
    one: Pictures, other: Pictures, best: NDArray[np.float64], enough: float
) -> NDArray[np.float64]:
    """(P,) the better of `best` and what the crops of either side reach, in the pictures' own precision."""
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


def _times(pictures: Pictures, weights: NDArray[Any]) -> Pictures:
    """(P, 16, 16) each picture times (16, 16), in products of _PRODUCT_PICTURES."""
    made = np.empty(pictures.shape, np.result_type(pictures, weights))
    whole = len(pictures) // _PRODUCT_PICTURES * _PRODUCT_PICTURES
    for part, num_products in (
        (slice(0, whole), whole // _PRODUCT_PICTURES),
        (slice(whole, None), 1),
    ):
        lines = (num_products, -1, THUMBNAIL_PX)
        if len(pictures[part]):
            np.matmul(pictures[part].reshape(lines), weights, out=made[part].reshape(lines))
    return made


def _centred(thumbnails: NDArray[np.uint8]) -> Pictures:
    """(P, 16, 16) whose mean is 0, next to it."""
    values = thumbnails.astype(np.float64)
    values -= values.mean(axis=1, keepdims=True)
    return values.reshape(-1, THUMBNAIL_PX, THUMBNAIL_PX)


def _correlation(first: Pictures, centred: Pictures) -> NDArray[np.float64]:
    """(P,) of (P, 16, 16); 0 where one of the two is constant."""
    first, centred = first.reshape(-1, THUMBNAIL_PX**2), centred.reshape(-1, THUMBNAIL_PX**2)
    sums = first.sum(axis=1)
    squares = np.vecdot(first, first) - sums * sums / THUMBNAIL_PX**2
    spread = np.sqrt(np.maximum(squares, 0) * np.vecdot(centred, centred))
    return np.asarray(np.vecdot(first, centred) / np.where(spread == 0, 1, spread))


@lru_cache(maxsize=2)
def _crop_weights(dtype: np.dtype[Any]) -> list[tuple[NDArray[Any], list[NDArray[Any]]]]:
    """(16, 16) each: the first times a picture times one of the second is a crop, resized back."""
    found = []
    for crop in _FINE_CROPS:
        places = [_resampling(*place).astype(dtype) for place in _places_of(crop)]
        found += [(down, [np.ascontiguousarray(across.T) for across in places]) for down in places]
    return found
