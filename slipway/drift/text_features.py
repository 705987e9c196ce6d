"""Drift features of texts: their length and the characters that they are made of."""

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature, Float
from slipway.inputs.texts import TRUNCATED, TextContract

_NAMES = (
    *("log_characters", "mean_word_characters", "upper_case", "digits", "punctuation"),
    *("beyond_ascii", "three_byte_characters", "links", "truncated"),
)
_BLOCK_BYTES = 1 << 22  # of texts processed at a time


def text_features(contract: TextContract) -> list[Feature]:
    """List the columns of `measure_texts`."""
    return [Feature(name=name, kind="number", origin="input", categories=[]) for name in _NAMES]


def measure_texts(contract: TextContract, inputs: NDArray[np.uint8]) -> Float:
    """(rows, max_bytes) uint8 -> (rows, features) float32"""
    block_rows = max(1, _BLOCK_BYTES // contract.max_bytes)
    blocks = [
        _measured(np.asarray(inputs[begin : begin + block_rows]))
        for begin in range(0, len(inputs), block_rows)
    ]
    return np.concatenate([np.empty((0, len(_NAMES)), np.float32), *blocks])


def _measured(rows: NDArray[np.uint8]) -> Float:
    """Count characters of a few kinds as fractions of all, which UTF-8 shows by single bytes.

    links: colons before a slash, such as in "https://", per 100 characters.
    """
    is_cut = rows[:, -1] == TRUNCATED
    present = (rows > 0) & (rows != TRUNCATED)
    begins = present & ((rows < 0x80) | (rows >= 0xC0))
    characters = np.maximum(begins.sum(axis=1), 1)
    upper = (rows >= ord("A")) & (rows <= ord("Z"))
    lower = (rows >= ord("a")) & (rows <= ord("z"))
    digits = (rows >= ord("0")) & (rows <= ord("9"))
    is_space = (rows == ord(" ")) | (rows == ord("\n"))
    words = is_space.sum(axis=1) + 1
    is_ascii = present & (rows < 0x80)
    links = (rows[:, :-1] == ord(":")) & (rows[:, 1:] == ord("/"))
    counts = [
        upper,
        digits,
        is_ascii & ~(upper | lower | digits | is_space),
        begins & (rows >= 0x80),
        begins & (rows >= 0xE0),
    ]
    features = [
        np.log(characters),
        (characters - words + 1) / words,
        *(count.sum(axis=1) / characters for count in counts),
        100 * links.sum(axis=1) / characters,
        is_cut,
    ]
    return np.column_stack(features).astype(np.float32)
