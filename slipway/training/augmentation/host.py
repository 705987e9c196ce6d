"""Augments images on the CPU with OpenCV, straight from the memory map, without copying them first.

The results equal those of `batch` except for rounding. Pixels stay uint8. OpenCV releases the GIL,
so several threads work on one batch; the number of threads does not change any pixel.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from slipway.data.augmentation.draws import (
    LUMA,
    Draw,
    MixDraw,
    affine_matrices,
    colour_matrices,
    crop_bounds,
    erased_bounds,
)
from slipway.data.store.packed import Inputs
from slipway.inputs.texts import SEPARATOR, TRUNCATED
from slipway.training.augmentation.batch import GREY, samples_per_pixel

Pixels = NDArray[np.uint8]
_CACHED_BYTES = 2**20  # bytes gathered at a time, which stay in the processor's cache
_MIN_BYTES = 2**20  # size of a batch; threads cost more than they save for a smaller one


class StoredRows:
    """The rows of several splits, one split after the other.

    A row is an image (S, S, C) uint8, a table row (width,) float32, or a text as bytes or tokens.
    """

    def __init__(self, inputs: Sequence[Inputs]) -> None:
        # Indexing a memory map costs more than copying a small image, so take a plain view.
        self._inputs = [
            np.asarray(part) if isinstance(part, np.ndarray) else part for part in inputs
        ]
        self._starts = np.cumsum([0, *map(len, inputs)])
        self.shape, self._dtype = tuple(inputs[0].shape[1:]), inputs[0].dtype  # of one row

    def __getitem__(self, row: int) -> NDArray[Any]:
        part = 0
        if len(self._inputs) > 1:
            part = int(np.searchsorted(self._starts, row, side="right")) - 1
        inputs: NDArray[Any] = self._inputs[part][row - self._starts[part]]
        return inputs

    def gather(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows at positions `rows` (B,), in this order: (B, ...)."""
        if len(self._inputs) == 1:
            return np.asarray(self._inputs[0][rows])
        gathered = np.empty((len(rows), *self.shape), dtype=self._dtype)
        for part, start, end in zip(self._inputs, self._starts, self._starts[1:], strict=False):
            here = (rows >= start) & (rows < end)
            gathered[here] = part[rows[here] - start]
        return gathered


def changed_images(
    images: StoredRows, rows: NDArray[np.int64], change: Draw, size_px: int
) -> Pixels:
    """Return B images with the augmentation `change` applied, (B, size_px, size_px, C) uint8."""
    height, _, channels = images.shape
    result = np.empty((len(rows), size_px, size_px, channels), dtype=np.uint8)
    if not len(rows):
        return result
    _forbid_inner_threads(os.getpid())
    moves = change.moves_whole_pixels and height == size_px
    apply, part_bytes = (_move, _CACHED_BYTES) if moves else (_resample, result.nbytes)
    _in_parts(
        result,
        part_bytes,
        lambda part: apply(images, rows[part], change.part(part), result[part]),
    )
    if change.recolours:
        _in_parts(result, result.nbytes, lambda part: _recolour(change.part(part), result[part]))
    for row in np.flatnonzero(change.erased[:, 2]):
        left, top, right, bottom = erased_bounds(change.part(slice(row, row + 1)), size_px)[0]
        result[row, top:bottom, left:right] = GREY
    return result


def mixed_images(images: Pixels, partners: NDArray[np.int64], mixing: MixDraw) -> Pixels:
    """Mix each of the first B of `images` (R, ...) with the image whose index `partners` gives.

    `partners` is (B,). Returns (B, ...).
    """
    result = images[: len(partners)].copy()
    for row in np.flatnonzero(mixing.own_fraction < 1):
        left, top, right, bottom = mixing.boxes[row]
        partner, fraction = images[partners[row]], float(mixing.own_fraction[row])
        if right > left and bottom > top:
            result[row, top:bottom, left:right] = partner[top:bottom, left:right]
        else:
            result[row] = cv2.addWeighted(
                images[row], fraction, partner, 1 - fraction, 0.0
            ).reshape(partner.shape)
    return result


def _move(images: StoredRows, rows: NDArray[np.int64], change: Draw, result: Pixels) -> None:
    """Flip and shift images by whole pixels, by copying lines from images padded on both sides."""
    size, channels = result.shape[1], result.shape[3]
    margin = int(np.abs(change.shift_px[:, 0]).max(initial=0))
    flipped_last = np.argsort(change.horizontal_flip, kind="stable")
    place = np.empty_like(flipped_last)
    place[flipped_last] = np.arange(len(rows))
    wide = _widened(images.gather(rows[flipped_last]), margin)
    mirrored = wide[size * (len(rows) - np.count_nonzero(change.horizontal_flip)) :]
    if len(mirrored):
        cv2.flip(mirrored, 1, dst=mirrored)
    lines = (np.arange(size) - change.shift_px[:, 1:]).clip(0, size - 1)  # (B, size)
    lines = np.where(change.vertical_flip[:, None], size - 1 - lines, lines)
    # Positions in pixels of all padded lines.
    begins = (place[:, None] * size + lines) * wide.shape[1] + margin - change.shift_px[:, :1]
    # An element is a whole line of a result, which may begin at any pixel of a padded line.
    windows: NDArray[Any] = np.ndarray(
        (wide.shape[0] * wide.shape[1] - size + 1,),
        f"V{size * channels}",
        np.ascontiguousarray(wide),
        strides=(channels,),
    )
    result.reshape(-1).view(windows.dtype)[:] = windows[begins.ravel()]


def _widened(images: Pixels, margin: int) -> Pixels:
    """Pad images left and right with their edge columns.

    Maps (B, S, S, C) to (B * S, S + 2 * margin, C).
    """
    lines = images.reshape(-1, *images.shape[2:])
    if not margin:
        return lines
    wide: Pixels = np.empty(
        (len(lines), lines.shape[1] + 2 * margin, lines.shape[2]), dtype=np.uint8
    )
    cv2.copyMakeBorder(lines, 0, 0, margin, margin, cv2.BORDER_REPLICATE, dst=wide)
    return wide


def _resample(images: StoredRows, rows: NDArray[np.int64], change: Draw, result: Pixels) -> None:
    size_px = result.shape[1]
    fold = samples_per_pixel(images.shape[0], size_px)
    matrices = affine_matrices(change, size_px).astype(np.float64)
    # Resizing is five times as fast as warping, if an image is not turned, scaled or shifted.
    upright = (
        (change.rotation_deg == 0)
        & (change.scale == 1)
        & ~change.shift.any(axis=1)
        & ~change.shift_px.any(axis=1)
    )
    flips = _flip_codes(change)
    bounds = crop_bounds(change, images.shape[0]).tolist()
    for index, (row, (left, top, right, bottom)) in enumerate(
        zip(rows.tolist(), bounds, strict=True)
    ):
        crop, target = images[row][top:bottom, left:right], result[index]
        if upright[index]:
            _resize(crop, target, fold)
            if (flip := flips[index]) is not None:
                cv2.flip(target, flip, dst=target)
        else:
            _warp(crop, matrices[index], target, fold)


def _flip_codes(change: Draw) -> list[int | None]:
    """Return OpenCV's flip code of each image: 1 left-right, 0 upside down, -1 both, or None."""
    codes = {(False, False): None, (True, False): 1, (False, True): 0, (True, True): -1}
    return [
        codes[flip]
        for flip in zip(change.horizontal_flip.tolist(), change.vertical_flip.tolist(), strict=True)
    ]


def _resize(crop: Pixels, target: Pixels, fold: int) -> None:
    size = len(target)
    if fold == 1:
        cv2.resize(crop, (size, size), dst=target, interpolation=cv2.INTER_LINEAR)
    else:
        cv2.resize(
            cv2.resize(crop, (size * fold, size * fold), interpolation=cv2.INTER_LINEAR),
            (size, size),
            target,
            0,
            0,
            cv2.INTER_AREA,
        )


def _warp(crop: Pixels, matrix: NDArray[np.float64], target: Pixels, fold: int) -> None:
    size = len(target) * fold
    side = np.array(crop.shape[1::-1])  # width, height
    # From [-1, 1] over the edges to OpenCV's pixels, whose centres are whole numbers.
    in_pixels = matrix * side[:, None] / 2
    in_pixels[:, 2] += in_pixels[:, :2].sum(axis=1) * (1 / size - 1) + (side - 1) / 2
    in_pixels[:, :2] *= 2 / size
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    if fold == 1:
        cv2.warpAffine(
            crop, in_pixels, (size, size), dst=target, flags=flags, borderMode=cv2.BORDER_REPLICATE
        )
    else:
        large = cv2.warpAffine(
            crop, in_pixels, (size, size), flags=flags, borderMode=cv2.BORDER_REPLICATE
        )
        cv2.resize(large, target.shape[1::-1], target, 0, 0, cv2.INTER_AREA)


def _recolour(change: Draw, result: Pixels) -> None:
    channels = result.shape[3]
    colours, greys = colour_matrices(change, channels)
    weights = LUMA if channels == 3 else np.ones(1)
    for image, colour, grey in zip(result, colours, greys, strict=True):
        mean = float(np.dot(cv2.mean(image)[:channels], weights))
        offset = np.full((channels, 1), grey * mean)
        cv2.transform(image, np.concatenate([colour, offset], axis=1), dst=image)


def _in_parts(result: Pixels, max_bytes: int, work: Callable[[slice], None]) -> None:
    """Call `work` on slices of a batch of at most `max_bytes`, at least one slice per thread."""
    count = len(result)
    # torch has 1 thread in a loader process.
    num_threads = torch.get_num_threads() if result.nbytes >= _MIN_BYTES else 1
    step = min(-(-count // num_threads), max(1, max_bytes * count // result.nbytes))
    parts = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
    if num_threads == 1:
        for part in parts:
            work(part)
        return
    for done in [_threads(num_threads, os.getpid()).submit(work, part) for part in parts]:
        done.result()


@cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; the pool of a parent process hangs after a fork."""
    return ThreadPoolExecutor(count)


@cache
def _forbid_inner_threads(process: int) -> None:
    """Turn off OpenCV's own threads, which would compete with ours and not survive a fork."""
    cv2.setNumThreads(0)


def without_tokens(
    rows: NDArray[Any], drawn: NDArray[np.float64], fraction: float, separator: int | None
) -> NDArray[Any]:
    """Drop the tokens whose random number in `drawn` (B, L) is below `fraction`.

    Keeps the first and the last token of a text, and every `separator`. Returns (B, L) in the
    dtype of `rows`.
    """
    is_there = rows != 0
    places, last = np.arange(rows.shape[1]), is_there.sum(axis=1, keepdims=True) - 1
    stays = (drawn >= fraction) | (places == 0) | (places == last)
    if separator is not None:
        stays |= np.abs(rows) == separator + 1
    return _closed_up(rows, is_there & stays)


def without_words(rows: NDArray[Any], drawn: NDArray[np.float64], fraction: float) -> NDArray[Any]:
    """Drop random words, with the space after them, from texts stored as bytes.

    `drawn` (B, L) holds random numbers in [0, 1): column n belongs to the n-th word. A word is a
    run of characters without white space. It is dropped if its number is below `fraction`. Line
    breaks and the word with the largest number stay. Returns (B, L) in the dtype of `rows`.
    """
    is_text, is_break = (rows != 0) & (rows != TRUNCATED), rows == ord(SEPARATOR)
    is_inside = is_text & ~is_break & (rows != ord(" "))
    begins = is_inside & ~np.pad(is_inside, ((0, 0), (1, 0)))[:, :-1]
    words = np.maximum(begins.cumsum(axis=1) - 1, 0)
    is_word = np.arange(rows.shape[1]) < begins.sum(axis=1, keepdims=True)
    largest = np.where(is_word, drawn, -1.0).argmax(axis=1)[:, None]
    own = np.take_along_axis(drawn, words, axis=1)
    return _closed_up(rows, is_text & ((own >= fraction) | (words == largest) | is_break))


def _closed_up(rows: NDArray[Any], stays: NDArray[np.bool_]) -> NDArray[Any]:
    order = np.argsort(~stays, axis=1, kind="stable")
    moved = np.take_along_axis(rows, order, axis=1)
    moved[~np.take_along_axis(stays, order, axis=1)] = 0
    return moved
