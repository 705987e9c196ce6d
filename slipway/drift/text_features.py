"""Drift features of texts: their length, their kinds of characters, and their words.

Rows of tokens also have the number of tokens, and the characters per token, which fall for a
language that the tokenizer does not know.

The features `vocabulary_1` to `vocabulary_4` notice changed frequencies of words. A hash divides
all possible tokens into two halves, in a different way for each feature. The feature is the
fraction of a text's tokens in the first half. This gives one number for each row, as the tests
require: counts of all tokens would alarm without drift, because the tokens of a row depend on each
other. Rows of bytes use sequences of four bytes in place of tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature, Float
from slipway.inputs.texts import TRUNCATED, TextContract, decode_row, encode_texts

_NAMES = (
    *("log_characters", "mean_word_characters", "upper_case", "digits", "punctuation"),
    *("beyond_ascii", "three_byte_characters", "replacement_characters", "links", "truncated"),
)
VOCABULARY = tuple(f"vocabulary_{number}" for number in range(1, 5))
_OF_TOKENS = ("log_tokens", "characters_per_token")
_BLOCK_BYTES = 1 << 22  # bytes of texts processed at a time


def text_features(contract: TextContract) -> list[Feature]:
    """List the columns of `measure_texts`."""
    names = (*_NAMES, *(_OF_TOKENS if contract.tokenizer else ()), *VOCABULARY)
    return [Feature(name=name, kind="number", origin="input", categories=[]) for name in names]


def measure_texts(contract: TextContract, inputs: NDArray[Any]) -> Float:
    """Convert (rows, ...) bytes or tokens to (rows, features) float32."""
    measure = _measured_tokens if contract.tokenizer else _measured_bytes
    block_rows = max(1, _BLOCK_BYTES // contract.max_bytes)
    blocks = [
        measure(np.asarray(inputs[begin : begin + block_rows]), contract)
        for begin in range(0, len(inputs), block_rows)
    ]
    return np.concatenate([np.empty((0, len(text_features(contract))), np.float32), *blocks])


def _measured_bytes(rows: NDArray[np.uint8], contract: TextContract) -> Float:
    payload = np.where(rows == TRUNCATED, 0, rows).astype(np.uint32)
    first, second, third, fourth = (payload[:, place : place - 3 or None] for place in range(4))
    sequences = first | second << np.uint32(8) | third << np.uint32(16) | fourth << np.uint32(24)
    return np.concatenate([_measured(rows, contract), _halves(sequences, fourth > 0)], axis=1)


def _halves(tokens: NDArray[np.uint32], present: NDArray[np.bool_]) -> Float:
    """Return (rows, 4) the fraction of a row's tokens in one half of the vocabulary, four times.

    0 for a row without tokens.
    """
    hashes = np.where(present, _mixed(tokens), np.uint32(0))
    counts = [((hashes >> np.uint32(bit)) & np.uint32(1)).sum(axis=1) for bit in range(4)]
    total = np.maximum(present.sum(axis=1), 1)
    return np.asarray(np.column_stack(counts) / total[:, None], np.float32)


def _mixed(numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash numbers by the final mixing step of MurmurHash3."""
    numbers = (numbers ^ (numbers >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    numbers = (numbers ^ (numbers >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return numbers ^ (numbers >> np.uint32(16))


def _measured_tokens(rows: NDArray[np.int32], contract: TextContract) -> Float:
    of_bytes = contract.model_copy(update={"tokenizer": None, "max_tokens": None})
    texts = [decode_row(row, contract, mark="") for row in rows]
    features = _measured(encode_texts(texts, of_bytes), of_bytes)
    features[:, _NAMES.index("truncated")] = contract.is_truncated(rows)
    num_tokens = np.maximum((rows != 0).sum(axis=1), 1)
    characters = np.exp(features[:, _NAMES.index("log_characters")])
    halves = _halves(np.abs(rows).astype(np.uint32), rows != 0)
    added = np.column_stack([np.log(num_tokens), characters / num_tokens, halves])
    return np.concatenate([features, added.astype(np.float32)], axis=1)


def _measured(rows: NDArray[np.uint8], contract: TextContract) -> Float:
    """Return (rows, features): fractions of a few kinds of characters, counted on UTF-8 bytes.

    links: number of ":/" as in "https://", per 100 characters.
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
    is_replaced = (rows[:, :-2] == 0xEF) & (rows[:, 1:-1] == 0xBF) & (rows[:, 2:] == 0xBD)
    counts = [
        upper,
        digits,
        is_ascii & ~(upper | lower | digits | is_space),
        begins & (rows >= 0x80),
        begins & (rows >= 0xE0),
        is_replaced,
    ]
    features = [
        np.log(characters),
        (characters - words + 1) / words,
        *(count.sum(axis=1) / characters for count in counts),
        100 * links.sum(axis=1) / characters,
        is_cut,
    ]
    return np.column_stack(features).astype(np.float32)
