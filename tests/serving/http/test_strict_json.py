import json
import math
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.serving.http.responses import Refusal
from slipway.serving.http.strict_json import MAX_DEPTH, MAX_DIGITS, _blocks, may_exceed, parse

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**17), 10**17),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
ROWS = st.dictionaries(st.text(), SCALARS, max_size=5)


def read(body: bytes) -> Any:
    """Parse a body as slipway/serving/requests/rows.py does."""
    assert not may_exceed(body, 1_000_000)
    return parse(body)


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        read(body)
    assert refusal.value.code == "malformed_json"
    return refusal.value


@settings(deadline=None)
@given(st.one_of(SCALARS, ROWS, st.lists(ROWS, max_size=4)), st.booleans())
def test_valid_json_is_parsed_as_by_the_standard_library(content: Any, ascii_only: bool) -> None:
    body = json.dumps(content, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(body.decode())
        json.dumps(expected, ensure_ascii=False).encode()
    except UnicodeError:
        refused(body)
    else:
        assert parse(body) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": 1', "Expecting"),
        (b"{'a': 1}", "Expecting property name"),
        (b'{"a": 1,}', "line 1 column"),  # Python 3.13 words it otherwise
        (b'{"a": 01}', "Expecting"),
        (b'{"a": +1}', "Expecting value"),
        (b'{"a": .5}', "Expecting value"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": 1}{"a": 1}', "Extra data"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "1e999 is beyond the range"),
        (b'{"a": -1e999}', "beyond the range"),
        (b'{"a": ' + b"9" * 310 + b"}", "beyond the range"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "beyond the range"),
        (b'{"a": 0.' + b"1" * 1_000_000 + b"}", "too many digits"),
        (b'{"a": 1, "a": 2}', "the key 'a' is repeated"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "the key 'b' is repeated"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "Expecting value"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        ('{"a": 1}'.encode("utf-32-le"), "Expecting property name"),
        (b'{"a": "x\ny"}', "control character"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b'{"rows": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"a": "\\ud800", "a": 1}', "is repeated"),
        (b"[" * 100_000, f"more than {MAX_DEPTH} levels deep"),
        (b'{"a":' * 100_000, f"more than {MAX_DEPTH} levels deep"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels deep"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    message = refused(body).message
    assert reason in message
    assert len(message) < 400
    message.encode()  # it can be sent


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (b' {"a" : 1 } \n', {"a": 1}),
        (b'{"a": 1.7976931348623157e308}', {"a": 1.7976931348623157e308}),
        (b'{"a": ' + b"9" * 308 + b"}", {"a": 1e308}),
        (b'{"a": 0.' + b"1" * (MAX_DIGITS - 2) + b"}", {"a": 1 / 9}),
        (b'{"a": -0.0}', {"a": 0.0}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "[[[[[[{{{{{{"}', {"a": "[[[[[[{{{{{{"}),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, [[[[]]]]),
    ],
)
def test_valid_json_close_to_the_refused_cases_is_parsed(body: bytes, content: Any) -> None:
    assert read(body) == content


@settings(deadline=None)
@given(st.lists(ROWS, max_size=6))
def test_json_values_are_counted_before_parsing_and_never_underestimated(
    rows: list[dict[str, Any]],
) -> None:
    body = json.dumps({"rows": rows}).encode()
    num_values = sum(map(len, rows)) + len(rows)
    assert may_exceed(body, num_values - 1)
    assert not may_exceed(body, 2 * num_values + 10)


HEADS = [b"", b'"', b'{"', b'{"a":"']
UNITS = [
    b'"',
    b'\\"',
    b"\\",
    b'"\\',
    b'"a',
    b"[]",
    b'""',
    b'"\\""',
    b"\\\\",
    b'\\"\\\\"',
    b"1,",
    b'"a":1,',
    b"{}",
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("head", HEADS)
def test_counting_json_values_takes_linear_time_for_any_body(head: bytes, unit: bytes) -> None:
    """Counts a megabyte; anything quadratic takes hours and ends at pytest's time limit."""
    body = head + unit * (1_000_000 // len(unit))
    may_exceed(body, 10_000)


@pytest.mark.process
@pytest.mark.parametrize(
    "unit", [*UNITS, b'"a,b", 1,', b"x" * 700 + b"[]", b'"' + b"x" * 3000 + b'",']
)
@pytest.mark.parametrize("head", HEADS)
def test_counting_json_values_in_blocks_equals_counting_the_whole_text(
    head: bytes, unit: bytes
) -> None:
    """A text of several blocks, compared with a count of the whole text at once."""
    body = head + unit * (1_200_000 // len(unit))
    structure, num_strings = re.subn(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', b"", body, flags=re.DOTALL)
    num_separators = sum(structure.count(mark) for mark in (b",", b"[", b"]", b"{", b"}"))
    exact = max((num_strings + 1) // 2, num_separators + 1, 1)
    assert may_exceed(body, exact - 1)
    assert not may_exceed(body, exact)


@pytest.mark.process
@pytest.mark.parametrize(
    "content", [b"[[1], ", b'["' + b"x" * 2_000_000 + b'", ', b" " * 2_000_000]
)
def test_counting_json_values_of_a_long_text_needs_no_second_copy(content: bytes) -> None:
    body = content + b'"y", ' * 400_000
    tracemalloc.start()
    may_exceed(body, 1_000_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000 < len(body)


@pytest.mark.parametrize(
    "unit",
    [b"x", b"\\n", b"a\\n", b"\\u1234", b'","', b"x" * 900 + b'", "', b"x" * 9000 + b'",  "'],
)
def test_long_json_texts_are_scanned_in_short_pieces(unit: bytes) -> None:
    """Other threads cannot run while a piece is scanned."""
    body = b'["' + unit * (4_000_000 // len(unit)) + b'"]'
    assert max(map(len, _blocks(body))) < 1_500_000


def test_long_integers_are_parsed_and_exact_up_to_double_precision() -> None:
    assert parse(b"[123456789012345678]") == [123456789012345678]
    (number,) = parse(b"[" + b"1" * 40 + b"]")
    assert math.isclose(number, 1.1111111111111111e39)
