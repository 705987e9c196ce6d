"""Describes texts for the page: the contract, the tokenizer and tables of characters.

The page repeats two forms of tokenizers: ByteLevel BPE, which `precompute` learns and RoBERTa has,
and BERT's WordPiece. What depends on a version of Unicode is listed here character by character,
because a browser's version is another one. Other forms are refused by name.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from slipway.export.targets.exported import as_ranges, exported_contract
from slipway.inputs.personal_data import EMAIL, NATIONAL_FORMS, NUMBER
from slipway.inputs.texts import TextContract, import_tokenizers

# Parts of a tokenizer.json; null stands for false and for an empty text as well.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PLAIN_MODEL: dict[str, str | None] = {
    "type": "BPE",
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("byte_fallback", "ignore_merges")),
}
_PROCESSORS = (None, "ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing")
_SURROGATES = range(0xD800, 0xE000)
_CODES = 0x34000  # above are no letters, numbers or punctuation
_ALL_CODES = sys.maxunicode + 1
_MARK = "|"  # separates the characters of a list; every tokenizer leaves it as it is


def unreadable_part(content: str | None) -> str | None:
    """Name the first part of a tokenizer that the exported page's JavaScript does not have.

    `content` is the text of a tokenizer.json; None for a model of bytes, which needs none. Returns
    None if the page can make the same tokens.
    """
    if content is None:
        return None
    found = json.loads(content)
    kinds = {
        name: (found.get(name) or {}).get("type")
        for name in ("model", "normalizer", "pre_tokenizer", "post_processor")
    }
    if kinds["model"] == "WordPiece":
        expected = {"normalizer": (None, "BertNormalizer"), "pre_tokenizer": ("BertPreTokenizer",)}
    else:
        expected = {"normalizer": (None,), "pre_tokenizer": ("ByteLevel",)}
        model = {name: found["model"].get(name) or None for name in _PLAIN_MODEL}
        alphabet = set(import_tokenizers().pre_tokenizers.ByteLevel.alphabet())
        if model != _PLAIN_MODEL or not alphabet <= set(found["model"]["vocab"]):
            return f"a model of the type {kinds['model']} with these settings"
    for name, known in (expected | {"post_processor": _PROCESSORS}).items():
        if kinds[name] not in known:
            return f"the {name.replace('_', '-')} {kinds[name]}"
    splits = found["pre_tokenizer"]
    own = {name: splits.get(name) for name in _BYTE_LEVEL}
    if splits["type"] == "ByteLevel" and own != _BYTE_LEVEL:
        return "a ByteLevel pre-tokenizer with these settings"
    others = [token["content"] for token in found["added_tokens"] if not token["special"]]
    return f"the added token {others[0]!r}" if others else None


def page_contract(contract: TextContract) -> dict[str, Any]:
    """Return the contract as JSON, with the tokenizer and the masks in the form of the page."""
    content = exported_contract(contract)
    if contract.tokenizer:
        content["tokenizer"] = _page_tokenizer(contract)
    if contract.masked:
        digits = (code for code in range(sys.maxunicode + 1) if chr(code).isdecimal())
        content["digits"] = as_ranges(digits)  # each range of ten begins with a zero
        content["patterns"] = {
            "email": EMAIL.pattern,
            "number": NUMBER.pattern,
            "national_forms": [form.pattern for form in NATIONAL_FORMS],
        }
    return content


def _page_tokenizer(contract: TextContract) -> dict[str, Any]:
    loaded = contract.loaded_tokenizer
    model = json.loads(contract.tokenizer or "")["model"]
    facts = {
        "type": model["type"],
        # A list, because `__proto__` would be lost as a key.
        "vocabulary": list(model["vocab"].items()),
        "around": [_around(loaded.encode("a"))],
    }
    if contract.is_pair:
        facts["around"].append(_around(loaded.encode("a", "a")))
    if model["type"] == "BPE":
        return facts | {"merges": model["merges"]} | _letters_and_numbers(_CODES)
    return facts | {
        "unknown": model["vocab"][model["unk_token"]],
        "prefix": model["continuing_subword_prefix"],
        "most_characters": model["max_input_chars_per_word"],
        "punctuation": as_ranges(_punctuation()),
        **_normalised_characters(loaded.normalizer),
    }


def _around(found: Any) -> list[list[int]]:
    """Return the ids of the special tokens before, between and after the texts of an `Encoding`."""
    parts: list[list[int]] = [[]]
    last = None
    for code, sequence in zip(found.ids, found.sequence_ids, strict=True):
        if sequence is None:
            parts[-1].append(code)
        elif sequence != last:
            parts.append([])
            last = sequence
    return parts


@cache
def _letters_and_numbers(codes: int) -> dict[str, list[list[int]]]:
    """Return the letters and the numbers below `codes`, as ranges, by the package tokenizers."""
    splitter = import_tokenizers().pre_tokenizers.ByteLevel(add_prefix_space=False)

    def joining(first: str) -> list[list[int]]:
        text = "".join(f"{first}{chr(code)}\n" for code in _below(codes))
        begins = {begin for _, (begin, _) in splitter.pre_tokenize_str(text)}
        return as_ranges(code for at, code in enumerate(_below(codes)) if 3 * at + 1 not in begins)

    return {"letters": joining("a"), "numbers": joining("1")}


def _punctuation() -> Iterator[int]:
    """Yield the characters that BERT's pre-tokenizer makes words of their own."""
    splitter = import_tokenizers().pre_tokenizers.BertPreTokenizer()
    text = "".join(f"a{chr(code)}a " for code in _below(_CODES))
    begins = {begin for _, (begin, _) in splitter.pre_tokenize_str(text)}
    return (code for at, code in enumerate(_below(_CODES)) if 4 * at + 1 in begins)


def _normalised_characters(normalizer: Any) -> dict[str, Any]:
    """Return the characters that BERT's normalizer removes, puts between spaces, or changes.

    It treats each character by itself: the text is in NFC, and no mark of two remains.
    """
    removed, spaced, changed = [], [], {}
    if normalizer is not None:
        codes = list(_below(_ALL_CODES))
        found = normalizer.normalize_str(_MARK.join(map(chr, codes))).split(_MARK)
        del found[ord(_MARK)]  # the mark divides itself into two
        for code, text in zip(codes, found, strict=True):
            own = chr(code)
            if not text and own != _MARK:
                removed.append(code)
            elif text == f" {own} ":
                spaced.append(code)
            elif text not in (own, ""):
                changed[own] = text
    return {"removed": as_ranges(removed), "spaced": as_ranges(spaced), "changed": changed}


def _below(codes: int) -> Iterator[int]:
    return (code for code in range(codes) if code not in _SURROGATES)
