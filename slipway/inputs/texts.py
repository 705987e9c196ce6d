"""Converts texts to network inputs, for training and serving alike: UTF-8 bytes, or tokens.

A text is normalised (Unicode NFC; every run of white space and control characters becomes one
space), encoded, and cut between two characters, so that at most `max_bytes` bytes remain.

Without a tokenizer the row is these bytes, padded with zeros, which no text contains. The row of a
longer text ends with the marker TRUNCATED, which no text contains either.

With a tokenizer the row is each token's id plus 1, padded with zeros. The first number is negative
if the text was cut. A tokenizer that joins pairs encodes two columns as one, with its separator
between them. The tokenizer is a part of the contract, as the content of a `tokenizer.json`, so that
it cannot be lost or replaced between training and serving.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.inputs.contract import InputContract, listed_rows
from slipway.system.errors import BundleError, CellError, ParamsError, UnavailableError

PersonalData = Literal["email", "phone", "card"]  # slipway/inputs/personal_data.py finds it
TRUNCATED = 0xFF  # a value that is no byte of UTF-8
SEPARATOR = "\n"  # stands between the columns of a row; a normalised text has none
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
# White space, control characters, and characters that show nothing by themselves: joiners,
# marks of direction, tags and the like. The exports for the browser and small machines agree.
_INVISIBLE = re.compile(
    "[\\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]*"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
# Characters of a text that are read, for each byte of a row. It bounds the cost of normalisation,
# which is quadratic in a run of combining marks; NFC joins at most four characters to one.
_CHARACTERS_PER_BYTE = 4
_ROWS_ON_THREADS = 64
_TOKENIZER = "tokenizer.json"
_EXAMPLE = "This is an example."


class TextContract(InputContract):
    """Input of a text network: the bytes or the tokens of each row's text.

    Without a tokenizer it is (rows, max_bytes) uint8, with one (rows, max_tokens) int32.
    """

    kind: Literal["texts"]
    columns: list[str]  # the texts of a row, joined in this order
    max_bytes: int  # most bytes of a row
    max_characters: int | None  # most characters of a row; a longer one is refused
    tokenizer: str | None = None  # the content of a `tokenizer.json`; null: the row is bytes
    max_tokens: int | None = None  # most tokens of a row; null for bytes
    is_pair: bool = False  # the tokenizer joins the two columns, instead of SEPARATOR
    # Personal data that a text shows only as its kind in brackets.
    masked: list[PersonalData] = Field(default_factory=list)
    # Other columns of the training table except the target: rows may have them, with any value.
    ignored: list[str] = Field(default_factory=list)

    @property
    def shape(self) -> tuple[int]:
        """The shape of one row: (max_bytes,) or (max_tokens,)."""
        return (self.max_tokens or self.max_bytes,)

    @property
    def dtype(self) -> type[np.uint8] | type[np.int32]:
        return np.int32 if self.tokenizer else np.uint8

    @property
    def varies_in_length(self) -> bool:
        """True for tokens: the network reads a batch only up to the end of its longest row."""
        return self.tokenizer is not None

    @cached_property
    def loaded_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, which cuts at `max_tokens`.

        Raises BundleError if its content cannot be read, UnavailableError without the package.
        """
        loaded = load_tokenizer(self.tokenizer or "")
        loaded.enable_truncation(self.max_tokens)
        return loaded

    @cached_property
    def pair_separator(self) -> int | None:
        """The id of the token that ends each text of a pair; None without pairs."""
        return int(self.loaded_tokenizer.encode("").ids[-1]) if self.is_pair else None

    @property
    def has_pair_types(self) -> bool:
        """True if the tokenizer gives the tokens of the second text of a pair a type of its own."""
        return self.is_pair and 1 in self.loaded_tokenizer.encode("", "").type_ids

    @property
    def vocabulary_size(self) -> int:
        """Number of possible token ids: the largest id plus 1. For bytes it is 256."""
        if self.tokenizer is None:
            return 256
        vocabulary: dict[str, int] = self.loaded_tokenizer.get_vocab(with_added_tokens=True)
        return 1 + max(vocabulary.values())

    @cached_property
    def accepted(self) -> frozenset[str]:
        """Names of the columns that a row may have."""
        return frozenset([*self.columns, *self.ignored])

    def require_usable(self) -> None:
        """Raise BundleError if there is no column, two of the same name, or no usable tokenizer.

        Raises UnavailableError if the package for tokens is not installed.
        """
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise BundleError(
                f"the bundle's text columns are {self.columns}, expected one or more different "
                "names. Run `dvc repro export`."
            )
        if self.tokenizer is not None:
            assert self.loaded_tokenizer

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "columns": [
                {"name": name, "kind": "text", "required": len(self.columns) == 1}
                for name in self.columns
            ],
            "max_bytes": self.max_bytes,
            "max_characters": self.max_characters,
            "tokenizer": self._described_tokenizer(),
            "ignored": self.ignored,
            "example": self.example_row(),
        }

    def _described_tokenizer(self) -> dict[str, Any] | None:
        if self.tokenizer is None:
            return None
        return {
            "sha256": sha256(self.tokenizer.encode()).hexdigest(),
            "vocabulary_size": self.vocabulary_size,
            "max_tokens": self.max_tokens,
        }

    def example_row(self) -> dict[str, Any]:
        """Return a valid row, as JSON."""
        return dict.fromkeys(self.columns, _EXAMPLE)

    def example_rows(self, num_rows: int) -> NDArray[Any]:
        """Return made-up encoded texts (num_rows, ...) of different lengths and words."""
        texts = [" ".join(map(str, range(row, 3 * row + 2))) for row in range(num_rows)]
        return encode_texts(texts, self)

    @property
    def remark_names(self) -> tuple[str, ...]:
        return ("truncated",)

    def remarks(self, rows: NDArray[Any]) -> list[dict[str, bool]]:
        """Return for each row the field `truncated`: True if its text was cut for the network."""
        return [{"truncated": cut} for cut in self.is_truncated(rows).tolist()]

    def redacted(self, payload: bytes) -> bytes:
        """Return a request's JSON body with personal data in its texts masked.

        Texts of the contract's columns are also normalised. Returns `payload` itself if the
        contract masks nothing.
        """
        if not self.masked:
            return payload
        content = json.loads(payload)
        for row in listed_rows(content) or [content]:
            for name, cell in row.items():
                if isinstance(cell, str):
                    is_read = name in self.columns
                    row[name] = self.seen(cell) if is_read else self._masked(_joined(cell))
        return json.dumps(content).encode()

    def seen(self, cell: str) -> str:
        """Return a cell's text as the network sees it: normalised, with personal data masked."""
        return self._masked(normalised(cell, _CHARACTERS_PER_BYTE * self.max_bytes))

    def _masked(self, text: str) -> str:
        if not self.masked:
            return text
        from slipway.inputs.personal_data import mask  # few services need it

        return mask(text, self.masked)

    def is_truncated(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask (rows,) of the encoded texts that were cut because they were too long."""
        cut: NDArray[np.bool_] = rows[:, 0] < 0 if self.tokenizer else rows[:, -1] == TRUNCATED
        return cut


def _joined(text: str) -> str:
    """Replace each run of white space and control characters in a text by one space."""
    return _SPACE.sub(" ", text).strip(" ")


def normalised(text: str, most: int | None = None) -> str:
    """Return a text in Unicode NFC with single spaces, cut to its first `most` characters."""
    text = _joined(text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", _SURROGATE.sub(_REPLACEMENT, text[:most]))
    return text[:most]


def text_of(cells: Iterable[str], contract: TextContract) -> str:
    """Join a row's text cells, given in the order of the contract's columns, to one text."""
    return SEPARATOR.join(map(contract.seen, cells))


def encode_texts(texts: Sequence[str], contract: TextContract) -> NDArray[Any]:
    """Encode normalised texts as (rows, ...), in the shape and dtype of the contract."""
    if contract.tokenizer:
        return _encode_tokens(texts, contract)
    size = contract.max_bytes
    rows = np.zeros((len(texts), size), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        encoded = text.encode()
        if len(encoded) > size:
            encoded = _cut(encoded, size - 1).encode()
            row[-1] = TRUNCATED
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return rows


def load_tokenizer(content: str) -> Any:
    """Load the tokenizer in the text of a `tokenizer.json`; it neither pads nor cuts.

    Names of special tokens within a text are ordinary characters. Raises BundleError if the content
    cannot be read, UnavailableError without the package.
    """
    tokenizers = import_tokenizers()
    try:
        loaded = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises its base class
        raise BundleError(
            f"the tokenizer cannot be read: {error}; expected the content of a tokenizer.json. "
            "Save it with the package tokenizers again, and run `dvc repro precompute`."
        ) from error
    loaded.no_padding()
    loaded.no_truncation()
    loaded.encode_special_tokens = True
    return loaded


def joins_pairs(tokenizer: Any) -> bool:
    """Return True if a `tokenizers.Tokenizer` puts special tokens between the texts of a pair."""
    of_one, of_two = map(tokenizer.num_special_tokens_to_add, (False, True))
    return bool(0 < of_one < of_two)


def read_tokenizer(path: Path) -> str:
    """Read the text of a `tokenizer.json`, without its rules for padding and length.

    `path` is the file, or a folder that contains it. Raises ParamsError if it is missing or cannot
    be read.
    """
    file = path / _TOKENIZER if path.is_dir() else path
    try:
        content: str = load_tokenizer(file.read_text(encoding="utf-8")).to_str()
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(
            f"precompute.tokenizer is {str(path)!r}, but {file} cannot be read ({error}); expected "
            "'bpe', or a tokenizer.json. From a folder with only a vocabulary make one: "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from None
    except BundleError as error:
        raise ParamsError(f"precompute.tokenizer is {str(path)!r}: {error}") from None
    return content


def import_tokenizers() -> Any:
    """Import the package tokenizers. Raises UnavailableError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UnavailableError(
            "this model reads tokens, but the package tokenizers is not installed. Install it: "
            "pip install 'slipway-ml[tokens]' (in a clone: make install)."
        ) from None
    return tokenizers


def _encode_tokens(texts: Sequence[str], contract: TextContract) -> NDArray[np.int32]:
    size = contract.max_bytes
    encoded = [text.encode() for text in texts]
    read: list[Any] = [
        text if len(payload) <= size else _cut(payload, size)
        for text, payload in zip(texts, encoded, strict=True)
    ]
    if contract.is_pair:
        read = [_pair(payload, size) for payload in encoded]
    tokenizer = contract.loaded_tokenizer
    # Batches run on threads of the package's own, which few rows are not worth.
    found = (
        tokenizer.encode_batch_fast(read)
        if len(read) > _ROWS_ON_THREADS
        else (tokenizer.encode(*text) for text in read)
        if contract.is_pair
        else map(tokenizer.encode, read)
    )
    rows = np.zeros((len(texts), *contract.shape), np.int32)
    for row, tokens, payload in zip(rows, found, encoded, strict=True):
        ids = tokens.ids or [0]  # a tokenizer may drop every character; no row is padding alone
        row[: len(ids)] = np.array(ids, np.int32) + 1
        if tokens.overflowing or len(payload) > size:
            row[0] = -row[0]
    return rows


def _pair(encoded: bytes, size: int) -> tuple[str, str]:
    """Divide an encoded pair into its two texts, and cut the longer one to fit.

    Together with the separator, the texts have at most `size` bytes.
    """
    first, _, second = encoded.partition(SEPARATOR.encode())
    room = size - len(SEPARATOR)
    most = min(len(second), max(room - len(first), room // 2))
    return _cut(first, room - most), _cut(second, most)


def _cut(encoded: bytes, size: int) -> str:
    """Decode the first `size` bytes of UTF-8, without an incomplete character at their end."""
    return encoded[:size].decode(errors="ignore")


def decode_row(row: NDArray[Any], contract: TextContract, mark: str = "...") -> str:
    """Decode an encoded row to text, with `mark` at its end if the text was cut.

    A tokenizer may change letters: the text is then as the tokenizer sees it, such as in lower
    case.
    """
    if contract.tokenizer:
        ids = (np.abs(row[row != 0]) - 1).tolist()
        place = _place_of_second(ids, contract)
        parts = [ids] if place is None else [ids[:place], ids[place:]]
        shown = SEPARATOR.join(map(contract.loaded_tokenizer.decode, parts))
        return shown.rstrip(_REPLACEMENT) + mark if row[0] < 0 else shown
    payload = row.tobytes()
    text = payload.rstrip(b"\xff").rstrip(b"\0").decode(errors="replace")
    return text + mark if payload.endswith(b"\xff") else text


def _place_of_second(ids: list[int], contract: TextContract) -> int | None:
    """Return the position of the first token of a pair's second text; None without a second."""
    separator = contract.pair_separator
    return ids.index(separator) + 1 if separator in ids else None


def read_text(row: Mapping[str, Any], contract: TextContract) -> str:
    """Read the text of one JSON object. Raises CellError with the column and the broken rule."""
    for fault in text_faults(row, contract):
        raise fault
    return text_of((row.get(name) or "" for name in contract.columns), contract)


def text_faults(row: Mapping[str, Any], contract: TextContract) -> Iterator[CellError]:
    """Yield an error for each fault of a row: first unknown columns, then the contract's."""
    for name in row:
        if name not in contract.accepted:
            known = ", ".join(map(repr, contract.columns))
            detail = f"there is no such column, expected {known}"
            yield CellError("unknown_column", str(name)[:80], detail[:1000])
    texts = {name: row.get(name) or "" for name in contract.columns}
    for name, text in texts.items():
        if not isinstance(text, str):
            found = f"found {repr(text)[:80]}, expected text"
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
    """Return True for a text without a visible character."""
    return _INVISIBLE.fullmatch(text) is not None
