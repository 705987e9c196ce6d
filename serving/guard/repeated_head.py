"""A head that comes again: who keeps a connection sends the same path and headers with each request, but for the body's length.

To parse them once more and to look through them would find the same, and is a twelfth of what a small prediction takes. So they are
compared with the last ones, byte for byte; only the digits of the content-length may differ, and what was received has to end with
the body. All else is for the parser, from its first byte.
"""

from collections.abc import Mapping
from typing import NamedTuple

_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length: "
_MAX_HEAD_BYTES = 2 << 10  # is kept for each connection; others are rare
_MAX_DIGITS = 8  # of a length; no such body is received at once


class Head(NamedTuple):
    """What a request says before its body."""

    method: str
    path: str  # decoded, without its query
    query: bytes
    headers: Mapping[bytes, bytes]  # by their names in lower case


class RepeatedHead:
    """The last head of a connection, and what the parser made of it."""

    __slots__ = ("_after", "_before", "_body_begin", "_size", "_whole", "head")

    def __init__(self, head: Head, before: bytes, digits: bytes, after: bytes) -> None:
        """`before` and `after` are what is around the `digits` of its length."""
        self.head = head  # with the length that came last
        self._before, self._after = before, after
        self._expect(digits)

    def body_in(self, data: bytes) -> bytes | None:
        """The body, where `data` is this head with a length and a body of that length; else None."""
        if len(data) == self._size and data.startswith(self._whole):
            return data[self._body_begin :]
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        begin = len(before)
        end = data.find(after, begin, begin + _MAX_DIGITS + len(after))
        digits = data[begin:end] if end > 0 else b""
        if not digits.isdigit() or len(data) != end + len(after) + int(digits):
            return None
        self.head = self.head._replace(headers={**self.head.headers, b"content-length": digits})
        self._expect(digits)
        return data[self._body_begin :]

    def _expect(self, digits: bytes) -> None:
        """Most bodies have the length of the one before."""
        self._whole = self._before + digits + self._after
        self._body_begin = len(self._whole)
        self._size = self._body_begin + int(digits)


def repeated_head(head: Head, data: bytes) -> RepeatedHead | None:
    """To know the head by when it comes again; None where it had better be parsed each time.

    `data` began with a request and ended with one, which was the last that the parser found, and `head` is what it says.
    """
    length = head.headers.get(b"content-length", b"")
    text = data[: data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)]
    # That many bytes behind the first empty line: so there was one request, and this is its head.
    if (
        not length.isdigit()
        or len(length) > _MAX_DIGITS
        or len(text) <= len(_END)
        or len(data) != len(text) + int(length)
    ):
        return None
    begin = text.lower().find(_LENGTH) + len(_LENGTH)
    after = text[begin + len(length) :]
    is_plain = (
        text[begin : begin + len(length)] == length
        and after.startswith(b"\r\n")
        and text.count(b"\n") == text.count(b"\r\n")
    )
    if begin < len(_LENGTH) or not is_plain or b"expect" in head.headers:
        return None
    return RepeatedHead(head, text[:begin], length, after)
