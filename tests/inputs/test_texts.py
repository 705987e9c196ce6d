"""Encoding of texts as bytes, equal in training and serving for any Unicode text."""

import json
import unicodedata
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.inputs.texts import (
    TRUNCATED,
    TextContract,
    decode_row,
    encode_texts,
    normalised,
    read_text,
    text_faults,
)
from slipway.system.errors import BundleError, CellError
from tests.sentences import hostile_texts

pytestmark = pytest.mark.unit
SHORT = TextContract(kind="texts", columns=["text"], max_bytes=16, max_characters=100)
PAIR = TextContract(kind="texts", columns=["title", "text"], max_bytes=64, max_characters=None)


def encoded(text: str) -> list[int]:
    row: list[int] = encode_texts([read_text({"text": text}, SHORT)], SHORT)[0].tolist()
    return row


def test_a_text_becomes_its_bytes_padded_with_zeros() -> None:
    assert encoded("é b") == [0xC3, 0xA9, 0x20, 0x62, *[0] * 12]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  a \t\r\n b\u00a0\u2003c ", "a b c"),
        ("a\x00\x07b", "a b"),
        ("e\u0301", "\u00e9"),
        ("\ud83d", "\ufffd"),
        ("\u202eabc", "\u202eabc"),
    ],
)
def test_white_space_control_characters_and_unicode_forms_are_normalised(
    text: str, expected: str
) -> None:
    assert normalised(text) == expected


def test_text_of_the_maximum_length_is_kept_whole_and_a_longer_one_is_marked() -> None:
    rows = encode_texts(["x" * 16, "x" * 17], SHORT)
    assert SHORT.remarks(rows) == [{"truncated": False}, {"truncated": True}]
    assert [decode_row(row, SHORT) for row in rows] == ["x" * 16, "x" * 15 + "..."]


def test_a_text_is_cut_between_characters() -> None:
    (row,) = encode_texts(["\u20ac" * 9], SHORT)  # of 3 bytes each
    assert decode_row(row, SHORT) == "\u20ac" * 5 + "..."
    (row,) = encode_texts(["ab" + "\u20ac" * 9], SHORT)
    assert decode_row(row, SHORT) == "ab" + "\u20ac" * 4 + "..."


@given(st.text(st.characters(codec=None, categories=None), max_size=40))
def test_any_text_is_refused_or_encoded_to_a_row_that_decodes_to_it(text: str) -> None:
    if list(text_faults({"text": text}, SHORT)):
        assert not any(unicodedata.category(letter)[0] in "LNPS" for letter in text)
        return
    (row,) = encode_texts([read_text({"text": text}, SHORT)], SHORT)
    shown = decode_row(row, SHORT)
    assert row[0]
    assert normalised(shown.removesuffix("...")) == shown.removesuffix("...").strip()
    if row[-1] != TRUNCATED:
        assert shown == normalised(text)


def test_long_run_of_combining_marks_is_cut_before_unicode_sorts_it() -> None:
    marks = "a" + "\u0316\u0301" * 500_000
    assert unicodedata.is_normalized("NFC", normalised(marks, 64))
    assert len(normalised(marks, 64)) <= 64


@pytest.mark.parametrize(
    ("row", "rule", "column"),
    [
        ({}, "missing_value", "text"),
        ({"text": None}, "missing_value", "text"),
        ({"text": " \x00\u3000"}, "missing_value", "text"),
        ({"text": "\u200b\u200d\ufe0f\U000e0041"}, "missing_value", "text"),
        ({"text": 3}, "type_violation", "text"),
        ({"text": ["a"]}, "type_violation", "text"),
        ({"text": "x" * 101}, "out_of_range", "text"),
        ({"texts": "a"}, "unknown_column", "texts"),
    ],
)
def test_error_for_a_wrong_row_names_its_column_and_rule(
    row: dict[str, object], rule: str, column: str
) -> None:
    (first,) = islice(text_faults(row, SHORT), 1)
    assert (first.rule, first.column) == (rule, column)
    with pytest.raises(CellError, match="expected"):
        read_text(row, SHORT)


def test_text_columns_of_a_row_are_joined_and_one_may_be_missing() -> None:
    assert read_text({"title": "a\nb", "text": "c"}, PAIR) == "a b\nc"
    assert read_text({"title": None, "text": "c"}, PAIR) == "\nc"
    assert read_text({"title": "a"}, PAIR) == "a\n"


def test_example_rows_of_texts_have_different_lengths() -> None:
    rows = PAIR.example_rows(20)
    assert rows.shape == (20, 64)
    assert len({int(np.count_nonzero(row)) for row in rows}) > 5


def test_text_contract_without_columns_is_refused() -> None:
    with pytest.raises(BundleError, match="expected one or more"):
        SHORT.model_copy(update={"columns": []}).require_usable()


PRIVATE = "mail a.b@c.de, call 0301 2345678 or\n0301\t2345678, pay by 4111 1111 1111 1111"


def test_logged_request_is_masked_but_encodes_to_the_same_rows() -> None:
    contract = PAIR.model_copy(update={"masked": ["email", "phone"], "ignored": ["note", "id"]})
    texts = [
        f"{text}: {PRIVATE[(0, 5, 13)[number % 3] :]}"
        for number, text in enumerate(hostile_texts(500, 3))
    ]
    long = f"{'a@b.cd ' * 200}{PRIVATE}"
    rows = [{"title": PRIVATE, "text": text, "note": PRIVATE, "id": 7} for text in [*texts, long]]
    body = json.dumps({"rows": rows}).encode()
    logged = contract.redacted(body)
    assert b"2345678" not in logged
    assert b"@c.de" not in logged
    assert logged.count(b"4111 1111 1111 1111") >= len(rows)  # a kind that is not masked
    again = json.loads(logged)["rows"]
    # A text beyond the length that is read becomes longer, and would be cut once more.
    assert json.loads(contract.redacted(logged))["rows"][:-1] == again[:-1]
    assert [row["id"] for row in again] == [7] * len(rows)
    np.testing.assert_array_equal(
        encode_texts([read_text(row, contract) for row in again], contract),
        encode_texts([read_text(row, contract) for row in rows], contract),
    )


def test_redacted_masks_only_the_contracts_kinds_and_keeps_missing_cells() -> None:
    body = json.dumps({"title": None, "text": PRIVATE}).encode()
    assert PAIR.redacted(body) == body
    logged = PAIR.model_copy(update={"masked": ["card"]}).redacted(body)
    assert json.loads(logged)["title"] is None
    assert "[card]" in json.loads(logged)["text"]
