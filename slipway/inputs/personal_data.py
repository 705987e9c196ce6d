"""Finds personal data in texts by their form: e-mail addresses, phone numbers, payment cards.

Cleaning flags them; training and the service mask them with the same function. Masking a masked
text changes nothing, so the replay of a masked, logged request gives the original answer. Names and
postal addresses have no recognisable form and are not found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # exported scripts carry this module without the others
    from slipway.inputs.texts import PersonalData

IN_WORDS: dict[PersonalData, str] = {
    "email": "an e-mail address",
    "phone": "a phone number",
    "card": "the number of a payment card",
}
# The rest of a word that was masked in part is not looked at again.
_NOT_MASKED = r"(?<!\[email\])(?<!\[phone\])(?<!\[card\])"
# Letters of ASCII only, since words of some languages stand beside each other without a space.
EMAIL = re.compile(
    rf"(?<![\w.+-]){_NOT_MASKED}[\w.+-]{{1,64}}@[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{1,8}}", re.ASCII
)
NUMBER = re.compile(
    rf"(?<![\dA-Za-z_.,+]){_NOT_MASKED}\+?\(?\d(?:[ ()/-]{{0,2}}\d){{6,18}}(?![\dA-Za-z_])"
)
# Numbers of North America, and of mobile phones in China.
NATIONAL_FORMS = (re.compile(r"\(?\d{3}\)?[ -]\d{3}[ -]\d{4}"), re.compile(r"1[3-9]\d{9}"))
_CARD_DIGITS = range(13, 20)
_PHONE_DIGITS = range(8, 16)  # digits with the code of the country; ITU-T E.164 has at most 15
_NATIONAL_DIGITS = range(9, 12)  # digits of a number that begins with the 0 of trunk calls


class Found(NamedTuple):
    """A passage of a text with personal data: its kind, and its position in characters."""

    kind: PersonalData
    begin: int
    end: int


def personal_data(text: str) -> list[Found]:
    """Return all passages with personal data, in order; none overlap."""
    found: list[Found] = []
    end = 0
    for match in EMAIL.finditer(text):
        email = Found("email", *match.span())
        found += [*_numbers(text, end, email.begin), email]
        end = email.end
    return [*found, *_numbers(text, end, len(text))]


def mask(text: str, kinds: Collection[PersonalData]) -> str:
    """Replace each passage with personal data of `kinds` by its kind, such as "[email]"."""
    if not kinds:
        return text
    parts, end = [], 0
    for found in personal_data(text):
        if found.kind in kinds:
            parts += [text[end : found.begin], f"[{found.kind}]"]
            end = found.end
    return "".join([*parts, text[end:]])


def _numbers(text: str, begin: int, end: int) -> Iterator[Found]:
    """Yield the payment cards and phone numbers between two positions of a text."""
    for match in NUMBER.finditer(text, begin, end):
        written = match.group()
        digits = [int(character) for character in written if character.isdecimal()]
        if _is_card(written, digits):
            yield Found("card", *match.span())
        elif _is_phone(written, digits):
            yield Found("phone", *match.span())


def _is_card(written: str, digits: list[int]) -> bool:
    """Return True if digits have the length, first digit and Luhn check digit of a payment card.

    Source: ISO/IEC 7812-1.
    """
    if len(digits) not in _CARD_DIGITS or written[0] == "+" or digits[0] not in range(2, 7):
        return False
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _is_phone(written: str, digits: list[int]) -> bool:
    """Return True if text has the form of a phone number, unlike dates, prices and counts."""
    if written[0] == "+" or digits[:2] == [0, 0]:
        return len(digits) in _PHONE_DIGITS
    if digits[0] == 0:
        return len(digits) in _NATIONAL_DIGITS
    return any(form.fullmatch(written) for form in NATIONAL_FORMS)
