import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from slipway.inputs.columns import ColumnContract, encode, read_row
from slipway.inputs.texts import TextContract, encode_texts
from slipway.serving.http.responses import ERRORS, Refusal
from slipway.serving.http.strict_json import parse
from slipway.serving.requests import rows
from slipway.serving.requests.decoding import Decoded
from slipway.serving.requests.rows import INLINE_BYTES, MAX_FAULTS, RowDecoder, TextDecoder
from tests.serving.any_json import BODIES
from tests.serving.bundles import COLUMNS, ROW, column, table_row

MAX_ROWS = 50


def decode(
    body: bytes | Any, contract: ColumnContract = COLUMNS, max_rows: int = MAX_ROWS
) -> Decoded:
    decoder = RowDecoder(contract, max_rows)
    try:
        return asyncio.run(
            decoder.decode(body if isinstance(body, bytes) else json.dumps(body).encode())
        )
    finally:
        decoder.close()


def refused(body: bytes | Any, contract: ColumnContract = COLUMNS) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        decode(body, contract)
    return refusal.value


def test_json_object_is_encoded_as_one_row_bit_for_bit_as_in_training() -> None:
    decoded = decode(ROW)
    typed = read_row(ROW, COLUMNS)
    expected = encode({name: [cell] for name, cell in typed.items()}, COLUMNS)
    assert decoded.inputs.dtype == np.float32
    assert (decoded.inputs.shape, decoded.is_list) == ((1, *COLUMNS.shape), False)
    assert decoded.inputs.tobytes() == expected.tobytes()


def test_several_rows_keep_their_order_and_equal_single_rows() -> None:
    several = decode({"rows": [table_row(number) for number in range(20)]})
    assert several.is_list
    for number, vector in enumerate(several.inputs):
        assert vector.tobytes() == decode(table_row(number)).inputs.tobytes()
    assert decode({"rows": [ROW]}).is_list


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"age": "41"}, "type_violation", "age"),
        ({"age": True}, "type_violation", "age"),
        ({"age": [41]}, "type_violation", "age"),
        ({"age": {"value": 41}}, "type_violation", "age"),
        ({"age": 120.5}, "out_of_range", "age"),
        ({"age": -1}, "out_of_range", "age"),
        ({"age": None}, "missing_value", "age"),
        ({"age": " "}, "missing_value", "age"),
        ({"income": 1e300}, "out_of_range", "income"),
        ({"colour": "mauve"}, "unknown_category", "colour"),
        ({"colour": 3}, "type_violation", "colour"),
        ({"city": "x" * 300}, "type_violation", "city"),
        ({"member": 1}, "type_violation", "member"),
        ({"since": "yesterday"}, "type_violation", "since"),
        ({"since": 20210304}, "type_violation", "since"),
        ({"Age": 41}, "unknown_column", "Age"),
        ({"rows": []}, "unknown_column", "rows"),
        ({"a\x00b": 1}, "unknown_column", "a\x00b"),
    ],
)
def test_a_bad_cell_is_refused_with_its_rule_and_position(
    change: dict[str, Any], code: str, field: str
) -> None:
    alone, among = refused(ROW | change), refused({"rows": [ROW, ROW | change, ROW]})
    assert (alone.code, alone.field) == (code, field)
    assert (among.code, among.field) == (code, f"rows[1].{field}")
    assert alone.status == among.status == ERRORS[code] == 422
    assert "more" not in alone.message


@pytest.mark.parametrize(
    "change",
    [
        {"age": 120},
        {"age": 0},
        {"income": None},
        {"city": "Atlantis"},
        {"city": ""},
        {"since": "2021-03-04T05:06:07+02:00"},
    ],
)
def test_valid_values_close_to_the_refused_ones_are_accepted(change: dict[str, Any]) -> None:
    assert decode(ROW | change).inputs.shape == (1, *COLUMNS.shape)


def test_an_omitted_column_is_a_missing_value() -> None:
    without = {name: value for name, value in ROW.items() if name not in ("income", "city")}
    assert (
        decode(without).inputs.tobytes()
        == decode(ROW | {"income": None, "city": None}).inputs.tobytes()
    )
    assert refused({"age": 1}).code == "missing_value"


@pytest.mark.parametrize(
    ("column", "text", "is_reported"),
    [
        ("age", "38", True),
        ("age", " 3.5e1 ", True),
        ("member", "True", True),
        ("age", "x", False),
        ("age", "nan", False),
        ("member", "1", False),
    ],
)
def test_error_for_a_number_sent_as_text_says_so(column: str, text: str, is_reported: bool) -> None:
    message = refused(ROW | {column: text}).message
    assert (f"found the text {text!r}, expected " in message) == is_reported
    assert (f"found {text!r}, expected " in message) == (not is_reported)


def test_error_for_bad_rows_counts_all_bad_cells_and_names_the_first_ones() -> None:
    refusal = refused(
        {
            "rows": [
                ROW,
                ROW | {"age": -1, "colour": "mauve"},
                ROW | {"extra": 1, "member": 0},
                ROW | {"age": "x"},
            ]
        }
    )
    assert (refusal.code, refusal.field) == ("out_of_range", "rows[1].age")
    named = (
        "4 more: rows[1].colour (unknown_category), rows[2].extra (unknown_column), "
        "rows[2].member (type_violation), ..."
    )
    assert refusal.message.endswith(named)


def test_error_messages_stay_short_for_any_input() -> None:
    row = {f"{'long' * 30}{number}": "x" * 1000 for number in range(40)}
    refusal = refused({"rows": [row] * MAX_ROWS})
    assert len(refusal.message) < 2500
    many = refused({"rows": [ROW | {"age": -1, "colour": "mauve", "member": 0}] * MAX_ROWS})
    assert f". At least {MAX_FAULTS - 1} more: rows[0].colour" in many.message
    assert len(many.message) < 400


def test_a_number_beyond_float32_is_reported_with_its_row() -> None:
    refusal = refused({"rows": [ROW, ROW, ROW | {"income": 1e300}, ROW | {"income": -1e300}]})
    assert (refusal.code, refusal.field) == ("out_of_range", "rows[2].income")
    assert "rows[3].income" in refusal.message


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"[]", "not_a_row", None),
        (b"[{}]", "not_a_row", None),
        (b"null", "not_a_row", None),
        (b"3", "not_a_row", None),
        (b'"text"', "not_a_row", None),
        (b'{"rows": []}', "no_rows", "rows"),
        (b'{"rows": [{}, 3]}', "not_a_row", "rows[1]"),
        (b'{"rows": [[]]}', "not_a_row", "rows[0]"),
        (b'{"rows": null}', "unknown_column", "rows"),
        (b'{"rows": {"age": 1}}', "unknown_column", "rows"),
        (b"{}", "missing_value", "age"),
        (b"", "malformed_json", None),
    ],
)
def test_bodies_that_are_not_rows_are_refused(body: bytes, code: str, field: str | None) -> None:
    refusal = refused(body)
    assert (refusal.code, refusal.field) == (code, field)


def test_rows_up_to_the_limit_are_accepted_and_one_more_is_refused() -> None:
    assert len(decode({"rows": [ROW] * MAX_ROWS}).inputs) == MAX_ROWS
    refusal = refused({"rows": [ROW] * (MAX_ROWS + 1)})
    assert (refusal.code, refusal.status) == ("too_many_rows", 413)
    assert "SLIPWAY_MAX_ROWS" in refusal.message


def test_a_body_of_a_million_values_is_refused_before_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[bytes] = []

    def noting(body: bytes) -> Any:
        parsed.append(body)
        return parse(body)

    monkeypatch.setattr(rows, "parse", noting)
    for body in (b'{"a":[' + b"1," * 1_000_000 + b"1]}", b"[" + b"{}," * 500_000 + b"{}]"):
        assert refused(body).code == "too_many_rows"
    assert parsed == []
    refused(b"{}")
    assert parsed == [b"{}"]  # the twin: what is read is seen


def test_table_column_may_be_named_rows() -> None:
    contract = ColumnContract(kind="columns", columns=[column("rows")])
    assert not decode({"rows": 3}, contract).is_list
    assert (
        decode({"rows": [{"rows": 3}]}, contract).inputs.tobytes()
        == decode({"rows": 3}, contract).inputs.tobytes()
    )


@pytest.mark.parametrize(("num_rows", "thread"), [(1, "MainThread"), (50, "slipway-rows")])
def test_many_rows_are_parsed_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, thread: str
) -> None:
    seen: set[str] = set()

    def noting(body: bytes) -> Any:
        seen.add(threading.current_thread().name.split("_")[0])
        return parse(body)

    monkeypatch.setattr(rows, "parse", noting)
    body = json.dumps({"rows": [ROW] * num_rows}).encode()
    assert (len(body) > INLINE_BYTES) == (num_rows > 1)
    decode(body)
    assert seen == {thread}


@pytest.mark.process
@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_any_body_decodes_to_finite_rows_or_a_refusal(body: bytes) -> None:
    answer = decoded_or_refusal(body)
    if isinstance(answer, Refusal):
        assert 400 <= answer.status < 500
        json.dumps([answer.message, answer.field], ensure_ascii=False).encode()  # it can be sent
    else:
        assert answer.inputs.shape[1:] == COLUMNS.shape
        assert np.isfinite(answer.inputs).all()


def decoded_or_refusal(body: bytes) -> Decoded | Refusal:
    try:
        return decode(body)
    except Refusal as refusal:
        return refusal


def test_ignored_columns_do_not_change_a_row() -> None:
    contract = COLUMNS.model_copy(update={"ignored": ["id", "note"]})
    extra = {"id": 7, "note": ["x", "y"]}
    assert decode(ROW | extra, contract).inputs.tobytes() == decode(ROW).inputs.tobytes()
    refusal = refused({"rows": [ROW | extra, ROW | extra | {"other": 1, "age": -1}]}, contract)
    assert (refusal.code, refusal.field) == ("unknown_column", "rows[1].other")
    assert refusal.message.endswith("1 more: rows[1].age (out_of_range)")


def test_ignored_columns_do_not_reduce_the_number_of_accepted_rows() -> None:
    ignored = [f"id {number}" for number in range(200)]
    contract = COLUMNS.model_copy(update={"ignored": ignored})
    rows = [table_row(number) | dict.fromkeys(ignored, 1) for number in range(MAX_ROWS)]
    assert len(decode({"rows": rows}, contract).inputs) == MAX_ROWS


# Texts --------------------------------------------------------------------------------------------

TEXTS = TextContract(kind="texts", columns=["text"], max_bytes=32, max_characters=40)


def decode_texts(body: Any) -> Decoded:
    decoder = TextDecoder(TEXTS, MAX_ROWS)
    try:
        return asyncio.run(decoder.decode(json.dumps(body).encode()))
    finally:
        decoder.close()


def test_texts_are_encoded_bit_for_bit_as_in_training() -> None:
    single, several = decode_texts({"text": "a  é"}), decode_texts({"rows": [{"text": "a  é"}] * 3})
    expected = encode_texts(["a é"], TEXTS)
    assert (single.is_list, several.is_list) == (False, True)
    assert single.inputs.tobytes() == expected.tobytes()
    assert several.inputs.tobytes() == expected.tobytes() * 3


def test_error_counts_all_bad_texts_of_a_request_and_shows_the_first() -> None:
    body = {"rows": [{"text": "a"}, {"text": ""}, {"text": 3}, {"words": "a"}]}
    with pytest.raises(Refusal) as found:
        decode_texts(body)
    assert (found.value.code, found.value.field) == ("missing_value", "rows[1].text")
    assert "3 more: rows[2].text (type_violation), rows[3].words" in found.value.message


def test_a_text_beyond_the_limit_of_characters_is_refused() -> None:
    with pytest.raises(Refusal, match="found 41 characters, expected at most 40"):
        decode_texts({"text": "x" * 41})


def test_a_text_of_ten_megabytes_is_refused_and_named_by_its_length() -> None:
    with pytest.raises(Refusal, match="found 10,000,000 characters, expected at most 40") as found:
        decode_texts({"rows": [{"text": "a"}, {"text": "soup " * 2_000_000}]})
    assert (found.value.code, found.value.field) == ("out_of_range", "rows[1].text")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\0b", "a b"),
        ("\u202eleft", "\u202eleft"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    ],
)
def test_control_characters_become_spaces_and_marks_and_markup_stay(text: str, seen: str) -> None:
    assert decode_texts({"text": text}).inputs.tobytes().rstrip(b"\0").decode() == seen


@given(BODIES)
@settings(deadline=None)
def test_any_body_for_texts_decodes_to_rows_or_a_refusal(body: bytes) -> None:
    decoder = TextDecoder(TEXTS, MAX_ROWS)
    try:
        decoded = asyncio.run(decoder.decode(body))
    except Refusal as found:
        assert found.code in ERRORS  # noqa: PT017  # a refusal is one of two right outcomes
    else:
        assert decoded.inputs.shape[1:] == TEXTS.shape
    finally:
        decoder.close()
