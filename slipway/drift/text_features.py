"""Drift features of texts: their length and the characters that they are made of.

Of rows of tokens also the number of tokens, and the characters for each: it falls for a language
that the tokenizer does not know.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature, Float
from slipway.inputs.texts import TRUNCATED, TextContract, decode_row, encode_texts

_NAMES = (
    *("log_characters", "mean_word_characters", "upper_case", "digits", "punctuation"),
    *("beyond_ascii", "three_byte_characters", "links", "truncated"),
)
_OF_TOKENS = ("log_tokens", "characters_per_token")
_BLOCK_BYTES = 1 << 22  # of texts processed at a time


def text_features(contract: TextContract) -> list[Feature]:
    """List the columns of `measure_texts`."""
    names = (*_NAMES, *_OF_TOKENS) if contract.tokenizer else _NAMES
    return [Feature(name=name, kind="number", origin="input", categories=[]) for name in names]


def measure_texts(contract: TextContract, inputs: NDArray[Any]) -> Float:
    """(rows, ...) bytes or tokens -> (rows, features) float32"""
    measure = _measured_tokens if contract.tokenizer else _measured
    block_rows = max(1, _BLOCK_BYTES // contract.max_bytes)
    blocks = [
        measure(np.asarray(inputs[begin : begin + block_rows]), contract)
        for begin in range(0, len(inputs), block_rows)
    ]
    return np.concatenate([np.empty((0, len(text_features(contract))), np.float32), *blocks])


def _measured_tokens(rows: NDArray[np.int32], contract: TextContract) -> Float:
    of_bytes = contract.model_copy(update={"tokenizer": None, "max_tokens": None})
    texts = [decode_row(row, contract, mark="") for row in rows]
    features = _measured(encode_texts(texts, of_bytes), of_bytes)
    features[:, _NAMES.index("truncated")] = contract.is_truncated(rows)
    num_tokens = np.maximum((rows != 0).sum(axis=1), 1)
    characters = np.exp(features[:, _NAMES.index("log_characters")])
    added = np.column_stack([np.log(num_tokens), characters / num_tokens])
    return np.concatenate([features, added.astype(np.float32)], axis=1)


def _measured(rows: NDArray[np.uint8], contract: TextContract) -> Float:
    """Count characters of a few kinds as fractions of all, which UTF-8 shows by single bytes.

    links: colons before a slash, such as in "https://", per 100 characters.
    """
    is_cut = contract.is_truncated(rows)
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
