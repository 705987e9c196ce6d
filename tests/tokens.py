"""A contract of tokens for tests: a BPE learned from a few sentences."""

from functools import cache
from typing import Any

from slipway.data.texts.packing import learned_tokenizer
from slipway.inputs.texts import TextContract
from tests.sentences import sentences


@cache
def bpe() -> str:
    """The content of a `tokenizer.json` with 400 tokens."""
    return learned_tokenizer([text for _, text in sentences(200, seed=5)], 400)


def token_contract(**changes: Any) -> TextContract:
    """Texts of one column as at most 16 tokens."""
    fields: dict[str, Any] = {
        "kind": "texts",
        "columns": ["text"],
        "max_bytes": 64,
        "max_characters": 2_000_000,
        "tokenizer": bpe(),
        "max_tokens": 16,
    }
    return TextContract(**(fields | changes))
