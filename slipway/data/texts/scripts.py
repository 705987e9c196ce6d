"""Determines the script of a text, such as Latin or Han, by the blocks of Unicode."""

import re

import numpy as np

NO_SCRIPT = "none"  # texts without letters, only digits, signs and emoji
_RANGES = {
    "Latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF), (0xFF21, 0xFF5A)],
    "Greek": [(0x370, 0x3FF), (0x1F00, 0x1FFF)],
    "Cyrillic": [(0x400, 0x52F)],
    "Armenian": [(0x531, 0x58F)],
    "Hebrew": [(0x591, 0x5FF)],
    "Arabic": [(0x600, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)],
    "Devanagari": [(0x900, 0x97F)],
    "another of India": [(0x980, 0xDFF)],
    "Thai": [(0xE00, 0xE7F)],
    "Georgian": [(0x10A0, 0x10FF)],
    "Ethiopic": [(0x1200, 0x139F)],
    "Kana": [(0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9D)],
    "Hangul": [(0x1100, 0x11FF), (0x3131, 0x318E), (0xAC00, 0xD7AF)],
    "Han": [(0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)],
}
_NAMES = (NO_SCRIPT, *_RANGES)
_KANA, _HAN = _NAMES.index("Kana"), _NAMES.index("Han")
_KANA_FRACTION = 0.1  # least fraction of the letters of a Japanese text
_EDGES = sorted(
    edge
    for index, name in enumerate(_NAMES[1:], 1)
    for low, high in _RANGES[name]
    for edge in ((low, index), (high + 1, 0))
)
_BEGINS, _SCRIPTS = (np.array(column) for column in zip((0, 0), *_EDGES, strict=True))
_LETTER = re.compile("[A-Za-z]")


def main_script(text: str) -> str:
    """Return the script of most letters, or NO_SCRIPT; in Japanese, Han counts as Kana."""
    if text.isascii():
        return "Latin" if _LETTER.search(text) else NO_SCRIPT
    characters = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    scripts = _SCRIPTS[np.searchsorted(_BEGINS, characters, "right") - 1]
    counts = np.bincount(scripts, minlength=len(_NAMES))
    counts[0] = 0
    if counts[_KANA] > _KANA_FRACTION * counts[_HAN]:
        counts[_KANA] += counts[_HAN]
    return _NAMES[int(counts.argmax())]
