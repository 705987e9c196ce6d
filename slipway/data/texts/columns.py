"""The text columns of a table: facts about their cells for the rules, and the texts of rows."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.scratch import scratch_array, slices, take
from slipway.data.sources.raw_tables import RawColumn, cell_text
from slipway.data.sources.text_format import NOT_UTF8
from slipway.data.texts.source import text_cells
from slipway.inputs.personal_data import IN_WORDS, personal_data
from slipway.inputs.texts import SEPARATOR, PersonalData, is_blank, normalised

BLOCK_ROWS = 1 << 12  # rows whose texts are in memory at once
PERSONAL: tuple[PersonalData, ...] = tuple(IN_WORDS)
# White space is no control character here: a text may have lines and tabs. Joiners and variation
# selectors are parts of letters and emoji.
_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # control characters of ASCII and Latin-1
    "\u00ad\u200b\u2060\ufeff\U000e0000-\U000e007f"  # characters without a width
    "\u202a-\u202e\u2066-\u2069]"  # characters that turn the direction
)
# The first two bytes of a character of UTF-8, as letters of Windows-1252 or Latin-1.
_GARBLED = re.compile(
    "[\u00c2\u00c3\u00d0\u00d1\u00e2-\u00ef][\u0080-\u00bf\u0152-\u0192\u2013-\u2122]"
)
_GREEK_OR_CYRILLIC = "\u0370-\u03a8\u03aa-\u03bb\u03bd-\u03bf\u03c1-\u03ff\u0400-\u052f"  # no unit
_MIXED = re.compile(f"[A-Za-z][{_GREEK_OR_CYRILLIC}]|[{_GREEK_OR_CYRILLIC}][A-Za-z]")
_KEY_BYTES = 8
_COMPARED_CHARACTERS = 1 << 16  # characters of a cell that are compared


@dataclass(frozen=True)
class TextColumn:
    """A text column of N rows and U distinct cells.

    Arrays have U + 1 entries; the last one is for rows without a cell.
    """

    raw: RawColumn
    lengths: NDArray[np.int64]  # (U + 1,) characters of the normalised text; 0 if none shows
    keys: NDArray[np.int64]  # (U + 1,) equal for texts that differ in case and white space only
    is_bad: NDArray[np.bool_]  # (U + 1,)
    has_control: NDArray[np.bool_]  # (U + 1,)
    is_garbled: NDArray[np.bool_]  # (U + 1,)
    is_mixed: NDArray[np.bool_]  # (U + 1,)
    personal: NDArray[np.uint8]  # (U + 1,) a bit for each kind of personal data

    def texts(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the normalised texts of `rows`; "" for rows without a cell."""
        codes = self.raw.codes[rows]
        cells = self.raw.values.take(pa.array(codes, mask=codes < 0)).to_pylist()
        return [
            "" if cell is None else normalised(cell_text(cell), _COMPARED_CHARACTERS)
            for cell in cells
        ]


def read_column(raw: RawColumn) -> TextColumn:
    size = len(raw.values) + 1
    lengths, keys = scratch_array((size,), np.int64), scratch_array((size,), np.int64)
    flags = [scratch_array((size,), np.bool_) for _ in range(4)]
    is_bad, has_control, is_garbled, is_mixed = flags
    personal = scratch_array((size,), np.uint8)
    for each in (*flags, personal):
        each[:] = 0
    for code, cell in enumerate(text_cells(raw)):
        text = normalised(cell)
        lengths[code] = 0 if is_blank(text) else len(text)
        keys[code] = _key(text)
        is_bad[code] = NOT_UTF8 in cell
        has_control[code] = _CONTROL.search(cell) is not None
        if not text.isascii():
            is_garbled[code] = _is_garbled(cell)
            is_mixed[code] = _MIXED.search(text) is not None
        for found in personal_data(text):
            personal[code] |= 1 << PERSONAL.index(found.kind)
    lengths[-1], keys[-1] = 0, _key("")
    return TextColumn(raw, lengths, keys, is_bad, has_control, is_garbled, is_mixed, personal)


def _is_garbled(text: str) -> bool:
    """Return True if bytes of the text, read as UTF-8, give other letters: a wrong encoding."""
    for match in re.finditer(r"[\u0080-\uffff]{2,}", text):
        if _GARBLED.search(match.group()):
            for encoding in ("cp1252", "latin-1"):
                try:
                    match.group().encode(encoding).decode()
                except UnicodeError:
                    continue
                return True
    return False


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=_KEY_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)


def joined_texts(columns: Sequence[TextColumn], rows: NDArray[np.int64]) -> list[str]:
    """Return the texts of `rows` in lower case, with all columns joined."""
    cells = zip(*(column.texts(rows) for column in columns), strict=True)
    return [SEPARATOR.join(row).strip().casefold() for row in cells]


def num_characters(columns: Sequence[TextColumn]) -> NDArray[np.int64]:
    """Return the number of characters in the texts of each row, (N,)."""
    first, *others = columns
    lengths = take(first.lengths, first.raw.codes)
    for column in others:
        for part in slices(len(lengths)):
            lengths[part] += column.lengths[column.raw.codes[part]]
    return lengths
