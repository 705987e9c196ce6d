"""Divides a text into words, and makes copies of it that lack one of them.

A word is a run of characters without white space; in scripts without spaces, a single character.
"""

import re
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from slipway.inputs.texts import SEPARATOR, TextContract, encode_texts

_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # kana, Chinese characters, Hangul
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


def words_of(text: str, most: int) -> list[str]:
    """Divide a text into at most `most` pieces of one or more words and the white space after them.

    Joined, the pieces are the text.
    """
    begins = [found.start() for found in _WORD.finditer(text)]
    per_piece = -(-len(begins) // most)
    begins = [0, *begins[::per_piece][1:]] if begins else [0]
    ends = [*begins[1:], len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def without_each(words: Sequence[str], contract: TextContract) -> NDArray[Any]:
    """Return network inputs (words, ...): for each word, a copy of the text that lacks this word.

    Separators between the columns of a text stay, even if they are a part of the word.
    """
    left = [SEPARATOR * word.count(SEPARATOR) for word in words]
    copies = [
        "".join([*words[:place], left[place], *words[place + 1 :]]) for place in range(len(words))
    ]
    return encode_texts(copies, contract)
