"""Finds nearly equal texts, in any language: texts that share most of their character sequences.

Two texts are compared by the sets of all sequences of four characters in them. The fraction of
sequences that both have, of those that either has (Jaccard), is estimated by MinHash (Broder 1997):
128 hash functions agree on the smallest element of both sets with this probability. Texts that
agree in one of 32 bands of four values are candidates. The result depends on the set of texts only.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import Action, CleanParams
from slipway.data.engine.scratch import (
    ScratchSet,
    each_true,
    key_slices,
    order_by,
    pairs_of,
    scratch_array,
    scratch_file,
    slices,
    take,
    true_rows,
)
from slipway.data.images.near_duplicates import DuplicatePairs, cluster_roots
from slipway.data.tables.cleaning import rows_by_digest
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.targets import Annotations
from slipway.data.texts.columns import TextColumn, joined_texts, num_characters

MIN_CHARACTERS = 24  # shorter texts have too few sequences to compare
_STRICTER = (0.8, 0.9, 0.95, 0.98)  # similarities that divide a cluster of too many texts
_LENGTH = 4  # characters of a sequence
_HASHES, _BAND = 128, 4  # the standard error of an estimate is at most 0.044
_BLOCK_CHARACTERS = 1 << 16  # characters hashed at a time, and the most that are compared of a text
_BLOCK_TEXTS = 1 << 12
_PAIRS = 1 << 14  # pairs compared at a time
_RANDOM = np.random.default_rng(17)
_FACTORS = _RANDOM.integers(1 << 31, 1 << 32, _HASHES, dtype=np.uint32) | np.uint32(1)
_OFFSETS = _RANDOM.integers(0, 1 << 32, _HASHES, dtype=np.uint32)
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)

Hashes = NDArray[np.uint32]


def find_similar(
    num_texts: int, texts: Callable[[slice], list[str]], min_similarity: float
) -> DuplicatePairs:
    """Return pairs of nearly equal texts, and the similarity of each pair.

    `texts` returns the texts of a slice; each has at least MIN_CHARACTERS characters. Memory does
    not grow with the number of texts.
    """
    known = scratch_array((num_texts, _HASHES), np.uint32)
    for part in slices(num_texts, _BLOCK_TEXTS):
        known[part] = signatures(texts(part))
    with scratch_file() as file:
        found = ScratchSet(file)
        for band in range(0, _HASHES, _BAND):
            for candidates in _candidates(known[:, band : band + _BAND]):
                found.add(_similar(known, candidates, min_similarity))
        codes = found.ascending()
    pairs = pairs_of(np.asarray(codes))
    return DuplicatePairs(pairs, _similarities(known, pairs))


def signatures(texts: list[str]) -> Hashes:
    """Return signatures of texts, (N, 128): the smallest value of each hash function.

    The hash functions are applied to all sequences of four characters in a text.
    """
    found = np.empty((len(texts), _HASHES), np.uint32)
    begin = 0
    while begin < len(texts):
        end, size = begin, 0
        while end < len(texts) and (end == begin or size < _BLOCK_CHARACTERS):
            size += len(texts[end])
            end += 1
        found[begin:end] = _signatures([text[:_BLOCK_CHARACTERS] for text in texts[begin:end]])
        begin = end
    return found


def _signatures(texts: list[str]) -> Hashes:
    lengths = np.array([len(text) for text in texts])
    characters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32).astype(np.uint64)
    hashes = np.zeros(len(characters) - _LENGTH + 1, np.uint64)
    for place in range(_LENGTH):
        hashes = (hashes + characters[place : place + len(hashes)] + np.uint64(1)) * _PRIME
        hashes ^= hashes >> np.uint64(29)
    is_inside = np.ones(len(characters), bool)  # False for sequences that span two texts
    ends = np.cumsum(lengths)
    for back in range(1, _LENGTH):
        is_inside[ends - back] = False
    values = (hashes[is_inside[: len(hashes)]] >> _32).astype(np.uint32)
    starts = np.concatenate([[0], np.cumsum(lengths - _LENGTH + 1)[:-1]])
    found = np.empty((len(texts), _HASHES), np.uint32)
    for index in range(_HASHES):
        mixed = (values ^ _OFFSETS[index]) * _FACTORS[index]
        mixed ^= mixed >> np.uint32(15)
        found[:, index] = np.minimum.reduceat(mixed, starts)
    return found


def _candidates(band: Hashes) -> Iterator[NDArray[np.int64]]:
    """Yield pairs (P, 2) of texts with equal values in a band.

    Each text is paired with the first one that has its values, and with the next one.
    """
    keys = scratch_array((len(band),), np.uint64)
    for part in slices(len(band)):
        mixed = np.zeros(part.stop - part.start, np.uint64)
        for values in band[part].T:
            mixed = (mixed ^ values) * _PRIME
            mixed ^= mixed >> np.uint64(29)
        keys[part] = mixed
    order = order_by(keys)
    for part in key_slices(len(keys), lambda part: keys[order[part]]):
        rows = order[part]
        is_same = keys[rows[1:]] == keys[rows[:-1]]
        places = np.flatnonzero(is_same) + 1
        starts = np.where(np.append(False, is_same), 0, np.arange(len(rows)))
        first = rows[np.maximum.accumulate(starts)[places]]
        for pairs in ((rows[places - 1], rows[places]), (first, rows[places])):
            yield np.stack([np.minimum(*pairs), np.maximum(*pairs)], axis=1)


def _similar(known: Hashes, pairs: NDArray[np.int64], min_similarity: float) -> NDArray[np.uint64]:
    """Return a uint64 code for each similar pair: its first text is in the upper 32 bits."""
    chosen = pairs[_similarities(known, pairs) >= min_similarity].astype(np.uint64)
    return (chosen[:, 0] << _32) | chosen[:, 1]


def _similarities(known: Hashes, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the fraction of equal values in the signatures of each pair, (P,)."""
    found = scratch_array((len(pairs),), np.float64)
    for part in slices(len(pairs), _PAIRS):
        left, right = known[pairs[part, 0]], known[pairs[part, 1]]
        found[part] = (left == right).mean(axis=1)
    return found


def apply_near_duplicate_rule(
    columns: Sequence[TextColumn],
    clusters: NDArray[np.int64],
    digests: NDArray[np.uint8],
    annotations: Annotations,
    clean: CleanParams,
    ledger: Ledger,
) -> None:
    """Apply the rules for nearly equal texts, and add these texts to the clusters.

    `clusters` is (N,): for rows whose texts differ only in case and white space, it holds the first
    of these rows, for others -1. Afterwards it also holds the first row of each cluster of nearly
    equal texts.
    """
    action = clean.rules.near_duplicate
    if action is None:
        return
    compared = _compared_rows(columns, clusters, digests, ledger)
    found = find_similar(
        len(compared),
        lambda part: joined_texts(columns, compared[part]),
        clean.near_duplicate_similarity,
    )
    rows, pairs = _paired_rows(compared, found)
    _flag_near_conflicts(rows, pairs.pairs, annotations, ledger)
    roots = cluster_roots(pairs, len(rows), int(ledger.alive.sum()), _STRICTER)
    _report_clusters(action, rows, pairs.pairs, roots, ledger)
    if action == "refuse":
        return
    clusters[rows[roots >= 0]] = rows[roots[roots >= 0]]
    for part in slices(len(clusters)):  # equal texts follow the one that was compared
        own = clusters[part]
        clusters[part] = np.where(own < 0, own, clusters[own])


def _compared_rows(
    columns: Sequence[TextColumn],
    clusters: NDArray[np.int64],
    digests: NDArray[np.uint8],
    ledger: Ledger,
) -> NDArray[np.int64]:
    """Return the rows to compare, by id: one row of equal texts, and no short texts."""
    rows = rows_by_digest(digests, ledger)
    lengths = num_characters(columns)
    is_compared = scratch_array((len(rows),), np.bool_)
    for part in slices(len(rows)):
        own = rows[part]
        is_single = (clusters[own] < 0) | (clusters[own] == own)
        is_compared[part] = is_single & (lengths[own] >= MIN_CHARACTERS)
    return take(rows, true_rows(is_compared))


def _paired_rows(
    rows: NDArray[np.int64], found: DuplicatePairs
) -> tuple[NDArray[np.int64], DuplicatePairs]:
    """Return the rows that belong to a pair, and the pairs as indices of these rows."""
    is_paired = scratch_array((len(rows),), np.bool_)
    is_paired[:] = False
    for part in slices(len(found.pairs)):
        is_paired[found.pairs[part]] = True
    places = true_rows(is_paired)
    pairs = scratch_array(found.pairs.shape, np.int64)
    for part in slices(len(pairs)):
        pairs[part] = np.searchsorted(places, found.pairs[part])
    return take(rows, places), DuplicatePairs(pairs, found.correlations)


def _report_clusters(
    action: Action,
    rows: NDArray[np.int64],
    pairs: NDArray[np.int64],
    roots: NDArray[np.int64],
    ledger: Ledger,
) -> None:
    """Apply the action to the rows of clusters; to all but the first of each if they are refused.

    The detail of a row names the text that it resembles.
    """
    like = np.where(roots < 0, 0, roots)
    within = pairs[roots[pairs[:, 0]] == roots[pairs[:, 1]]][::-1]  # the first one is written last
    like[within[:, 0]] = within[:, 1]
    like[within[:, 1]] = within[:, 0]
    is_named = (roots >= 0) if action == "flag" else (roots >= 0) & (roots != np.arange(len(roots)))
    details = (
        (int(rows[place]), f"nearly the same text as {ledger.source(int(rows[like[place]]))}")
        for place in each_true(is_named)
    )
    ledger.apply(action, "near_duplicate", details)


def _flag_near_conflicts(
    rows: NDArray[np.int64], pairs: NDArray[np.int64], annotations: Annotations, ledger: Ledger
) -> None:
    if annotations.labels is None or not len(pairs):
        return
    labels = annotations.labels[rows]
    one_way = pairs[labels[pairs[:, 0]] != labels[pairs[:, 1]]]
    both_ways = np.concatenate([one_way, one_way[:, ::-1]])
    _, first = np.unique(both_ways[:, 0], return_index=True)
    details = (
        (
            int(rows[row]),
            f"{labels[row]}, nearly the same text as {labels[other]} of "
            f"{ledger.source(int(rows[other]))}",
        )
        for row, other in both_ways[first].tolist()
    )
    ledger.apply("flag", "near_conflict", details)
