"""Texts to network inputs, shared by training and serving: their bytes in UTF-8.

There is no vocabulary to fit, to store or to mismatch: bytes are the tokens. A text is normalised
(Unicode NFC; every run of white space and control characters becomes one space), encoded, and
padded with zeros, which no text contains. A longer text is cut at a character, and the mark
TRUNCATED, which no text contains either, takes the last place of its row.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.inputs.contract import InputContract
from slipway.system.errors import BundleError, CellError

TRUNCATED = 0xFF  # no byte of UTF-8
SEPARATOR = "\n"  # between the columns of a row; a normalised text has none
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
# Characters of a text that are read, for each byte of a row. It bounds the cost of normalisation,
# which is quadratic in a run of combining marks; NFC joins at most four characters to one.
_CHARACTERS_PER_BYTE = 4
_EXAMPLE = "This is an example."


class TextContract(InputContract):
    """Input of a text network: (rows, max_bytes) uint8, the UTF-8 bytes of each row."""

    kind: Literal["texts"]
    columns: list[str]  # the texts of a row, joined in this order
    max_bytes: int  # of a row
    max_characters: int | None  # of a row; a longer one is refused
    # Other columns of the training table except the target: rows may have them, with any value.
    ignored: list[str] = Field(default_factory=list)

    @property
    def shape(self) -> tuple[int]:
        """(max_bytes,)"""
        return (self.max_bytes,)

    @property
    def dtype(self) -> type[np.uint8]:
        return np.uint8

    @cached_property
    def accepted(self) -> frozenset[str]:
        """Names that a row may have."""
        return frozenset([*self.columns, *self.ignored])

    def require_usable(self) -> None:
        """BundleError if there is no column, or two of the same name."""
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise BundleError(
                f"the bundle's text columns are {self.columns}, expected one or more different "
                "names. Run `dvc repro export`."
            )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "columns": [
                {"name": name, "kind": "text", "required": len(self.columns) == 1}
                for name in self.columns
            ],
            "max_bytes": self.max_bytes,
            "max_characters": self.max_characters,
            "ignored": self.ignored,
            "example": self.example_row(),
        }

    def example_row(self) -> dict[str, Any]:
        """Return a valid row, as JSON."""
        return dict.fromkeys(self.columns, _EXAMPLE)

    def example_rows(self, num_rows: int) -> NDArray[np.uint8]:
        """Return (num_rows, max_bytes) texts of different lengths and words."""
        texts = [" ".join(map(str, range(row, 3 * row + 2))) for row in range(num_rows)]
        return encode_texts(texts, self)

    @property
    def remark_names(self) -> tuple[str, ...]:
        return ("truncated",)

    def remarks(self, rows: NDArray[Any]) -> list[dict[str, bool]]:
        """Tell for each row if its text was longer than the network reads."""
        return [{"truncated": cut} for cut in (rows[:, -1] == TRUNCATED).tolist()]


def normalised(text: str, most: int | None = None) -> str:
    """Return a text in the form that networks see, at most its first `most` characters."""
    text = _SPACE.sub(" ", text).strip(" ")
    if not text.isascii():
        text = unicodedata.normalize("NFC", _SURROGATE.sub(_REPLACEMENT, text[:most]))
    return text[:most]


def text_of(cells: Iterable[str], contract: TextContract) -> str:
    """Return the text of a row from its cells, in the order of the contract's columns."""
    most = _CHARACTERS_PER_BYTE * contract.max_bytes
    return SEPARATOR.join(normalised(cell, most) for cell in cells)


def encode_texts(texts: Sequence[str], contract: TextContract) -> NDArray[np.uint8]:
    """(rows, max_bytes) uint8 from normalised texts."""
    size = contract.max_bytes
    rows = np.zeros((len(texts), size), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        encoded = text.encode()
        if len(encoded) > size:
            encoded = encoded[: size - 1].decode(errors="ignore").encode()
            row[-1] = TRUNCATED
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return rows


def decode_row(row: NDArray[np.uint8], mark: str = "...") -> str:
    """Return the text of an encoded row, with `mark` at its end if it was cut."""
    payload = row.tobytes()
    text = payload.rstrip(b"\xff").rstrip(b"\0").decode(errors="replace")
    return text + mark if payload.endswith(b"\xff") else text


def read_text(row: Mapping[str, Any], contract: TextContract) -> str:
    """Read the text of one JSON object; CellError with the column and the broken rule."""
    for fault in text_faults(row, contract):
        raise fault
    return text_of((row.get(name) or "" for name in contract.columns), contract)


def text_faults(row: Mapping[str, Any], contract: TextContract) -> Iterator[CellError]:
    """Yield all faults of a row: unknown columns first, then cells in the contract's order."""
    for name in row:
        if name not in contract.accepted:
            known = ", ".join(map(repr, contract.columns))
            detail = f"there is no such column, expected {known}"
            yield CellError("unknown_column", str(name)[:80], detail[:1000])
    texts = {name: row.get(name) or "" for name in contract.columns}
    for name, text in texts.items():
        if not isinstance(text, str):
            found = f"found {str(text)[:80]!r}, expected text"
            yield CellError("type_violation", name, found)
            return
    first = contract.columns[0]
    if all(map(is_blank, texts.values())):
        detail = "the text is missing or blank, expected at least one visible character"
        yield CellError("missing_value", first, detail)
    elif contract.max_characters is not None:
        length = sum(map(len, texts.values()))
        if length > contract.max_characters:
            detail = f"found {length:,} characters, expected at most {contract.max_characters:,}"
            yield CellError("out_of_range", first, detail)


def is_blank(text: str) -> bool:
    """True for a text without a character besides white space and control characters."""
    return not text or _SPACE.fullmatch(text) is not None
