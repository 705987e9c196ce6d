"""Personal data in texts: which passages are found, which are not, and their masks."""

import random
import time

import pytest

from slipway.inputs.personal_data import mask, personal_data
from slipway.inputs.texts import PersonalData

pytestmark = pytest.mark.unit
ALL: tuple[PersonalData, ...] = ("email", "phone", "card")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail a.b+c@x-y.co.uk, now", "mail [email], now"),
        ("\u90ae\u7bb1a@b.com\u8c22\u8c22", "\u90ae\u7bb1[email]\u8c22\u8c22"),
        ("call 09061701461.", "call [phone]."),
        ("+44 (0)20 7946 0958 or 0049 30 123456", "[phone] or [phone]"),
        ("(212) 555-0199", "[phone]"),
        ("\u625313812345678\u627e\u6211", "\u6253[phone]\u627e\u6211"),
        ("card 4111 1111 1111 1111 ok", "card [card] ok"),
        ("5500-0000-0000-0004", "[card]"),
    ],
)
def test_personal_data_is_replaced_by_its_kind(text: str, masked: str) -> None:
    assert mask(text, ALL) == masked
    assert mask(masked, ALL) == masked


@pytest.mark.parametrize(
    "text",
    [
        "4111111111111112",  # a wrong check digit
        "on 2024-01-02 10:20 or 01/02/2024",
        "0.123456789 or 1,234,567,890",
        "order 12345678901234",
        "a@b or @name or name@",
        "version 1.2.3.4",
        "\u0661" * 12,
    ],
)
def test_dates_counts_and_names_are_not_masked_as_personal_data(text: str) -> None:
    assert mask(text, ALL) == text


def test_only_the_named_kinds_are_masked() -> None:
    text = "a@b.com 09061701461 4111111111111111"
    assert mask(text, ["card"]) == "a@b.com 09061701461 [card]"
    assert mask(text, []) == text
    assert [found.kind for found in personal_data(text)] == ["email", "phone", "card"]


def test_digits_in_an_email_address_are_not_masked_as_a_number() -> None:
    assert mask("write to 09061701461@b.com", ALL) == "write to [email]"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "piece", ["a", "1", "1 ", "a@", "a.", "+", "(", "\u0661", "a@a.", "a@b.cd 09061701461 "]
)
def test_a_long_hostile_text_takes_no_more_than_linear_time(piece: str) -> None:
    def seconds(size: int) -> float:
        begin = time.process_time()
        mask(piece * size, ALL)
        return time.process_time() - begin

    seconds(1000)
    assert seconds(100_000) < 25 * max(seconds(10_000), 0.002)


_PIECES = (
    *(
        "a@b.c",
        "x" * 63,
        "0301234567",
        "012",
        "+4912345678",
        "(",
        ")",
        " ",
        "-",
        ".",
        "\u6253",
        "]",
    ),
    *("4111111111111111", "13812345678", "[phone]", "[email]", "1", "@", "(212) 555-0199", "/"),
)


@pytest.mark.parametrize("kinds", [ALL, ("phone",), ("email",), ("card", "email")])
def test_masking_a_masked_text_changes_nothing(kinds: tuple[PersonalData, ...]) -> None:
    draw = random.Random(8)
    for _ in range(5_000):
        text = "".join(draw.choices(_PIECES, k=draw.randint(1, 9)))
        masked = mask(text, kinds)
        assert mask(masked, kinds) == masked, text


def test_a_number_after_an_email_address_is_masked_too() -> None:
    assert mask("a@b.co-012 0301234567", ALL) == "[email] [phone]"
