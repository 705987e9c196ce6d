"""Sentences for tests: each is drawn from a few patterns and words, so their class is known."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

_WORDS = {
    "food": (
        ["the soup", "this noodle dish", "their bread", "a fresh salad", "the cake"],
        ["tastes salty", "was cold again", "smells of garlic", "needs more pepper"],
        ["\u5f88\u597d\u5403", "\u592a\u54b8\u4e86", "\u5473\u9053\u4e0d\u9519"],
    ),
    "travel": (
        ["the train", "our bus", "this night ferry", "a small plane", "the hotel"],
        ["leaves at noon", "was late again", "needs a ticket", "stops at every station"],
        ["\u665a\u70b9\u4e86", "\u5230\u7ad9\u4e86", "\u8f66\u7968\u592a\u8d35"],
    ),
}
CLASSES = tuple(_WORDS)
# Characters that have broken readers of text: of every length in UTF-8, marks that combine, marks
# that turn the direction, control characters, markup, and halves of surrogate pairs.
_HOSTILE = (
    *("\x00", "\x1b[31m", "\x7f", "\u0085", "\ufeff", "\u200d", "\u202e", "\u2066", "\ufffd"),
    *("e\u0301", "\u1100\u1161\u11a8", "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea"),
    *("<script>alert(1)</script>", "'; DROP TABLE x", '"', "\\", "{}", "%s", "\u0130", "\u00df"),
    *("\u5f88\u597d", "\u0645\u0631\u062d\u0628\u0627", "a\u0316\u0301\u0327", "\U0010ffff", "\t"),
)
_MOST = 1_000_000  # a number makes nearly every sentence different
HALF = "\ud83d"


def sentences(num_rows: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield class and sentence: one or two statements in English, or one in Chinese."""
    generator = np.random.default_rng(seed)
    draw = generator.choice
    for row in range(num_rows):
        name = CLASSES[row % len(CLASSES)]
        things, statements, chinese = _WORDS[name]
        parts = [
            f"{draw(things)} {draw(statements)}, {generator.integers(_MOST)}"
            for _ in range(generator.integers(1, 3))
        ]
        if row % 8 > 5:
            parts = [f"{draw(chinese)}{generator.integers(_MOST)}"]
        yield name, " and ".join(parts)


def hostile_texts(num_texts: int, seed: int) -> Iterator[str]:
    """Yield texts of up to 12 hostile pieces, each different; none has half a surrogate pair."""
    generator = np.random.default_rng(seed)
    for number in range(num_texts):
        pieces = generator.choice(_HOSTILE, generator.integers(1, 12)).tolist()
        joined = "".join(first + " " * (len(second) % 2) for first, second in pairwise(pieces))
        yield f"{joined}{pieces[-1]}{number}"
