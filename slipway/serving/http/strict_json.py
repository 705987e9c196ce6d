"""A strict JSON parser (RFC 8259) with unambiguous results and bounded cost.

Refused: NaN and infinities, numbers beyond a double's range, repeated keys, anything after the
value, text that is not UTF-8, nesting beyond MAX_DEPTH. The number of values is limited before any
of them is created.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from slipway.serving.http.responses import Refusal

# {"rows": [{"column": value}]} has 3 levels. With a fourth, errors can name a column with a list.
MAX_DEPTH = 4
MAX_DIGITS = 400  # most digits of a number; a double has at most 309 before the decimal point
_EXACT_DIGITS = 18
# A string, even one that never ends. Possessive repeats keep the search linear.
_TEXT = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_STRING = re.compile(_TEXT, re.DOTALL)
# Matches are short, because no other thread runs during a search. A block is text with whole
# strings; a part is a piece of a long string.
_BLOCK = re.compile(rb'(?:[^"]{1,128}+|"(?:[^"\\]{1,64}+|\\.){0,16}+"){1,1000}+', re.DOTALL)
_PART = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){1,256}+', re.DOTALL)
_ONE_BLOCK = 1 << 20  # bytes; shorter texts are not divided
_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def may_exceed(body: bytes, most: int, max_depth: int = MAX_DEPTH) -> bool:
    """Estimate whether a JSON text holds more than `most` values, without parsing it.

    False is certain; True may be wrong. Raises Refusal if the values are nested deeper than
    `max_depth`. Long texts are scanned in blocks, so that no second copy is in memory.
    """
    num_strings = num_separators = depth = deepest = 0
    for block in _blocks(body):
        structure, found = _STRING.subn(b"", block, count=2 * most + 1)
        brackets = structure.translate(None, _NOT_BRACKETS)
        num_strings += found
        num_separators += structure.count(b",") + len(brackets)
        if num_strings > 2 * most or num_separators >= most:
            return True
        for bracket in brackets:
            depth += 1 if bracket in _OPENING else -1
            deepest = max(deepest, depth)
    if deepest > max_depth:
        raise _malformed(f"it is nested more than {max_depth} levels deep")
    return False


def _blocks(body: bytes) -> Iterator[bytes | memoryview]:
    """Yield the body in pieces, without the content of long strings; no piece splits a string."""
    if len(body) <= _ONE_BLOCK:
        yield body
        return
    position = 0
    while position < len(body):
        block = _BLOCK.match(body, position)
        if block:
            yield memoryview(body)[position : block.end()]
            position = block.end()
        else:
            yield b'""'
            position = _end_of_string(body, position)


def _end_of_string(body: bytes, begin: int) -> int:
    end = begin + 1
    while part := _PART.match(body, end):
        end = part.end()
    return end + 1 if body[end : end + 1] == b'"' else len(body)


def parse(body: bytes) -> Any:
    """Return the value of a JSON text. Raises Refusal with the position of the first fault."""
    try:
        content = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except JSONDecodeError as error:
        raise _malformed(str(error)) from None
    except RecursionError:
        raise _malformed(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if _LONE_SURROGATE.search(body):
        _require_text(content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        (repeated, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _malformed(f"the key {repeated[:80]!r} is repeated in one object")
    return content


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _EXACT_DIGITS else _float(text)


def _float(text: str) -> float:
    number = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(number):
        shown = text if len(text) <= 30 else f"{text[:30]}..."
        limits = "the range of a double, or has too many digits"
        raise _malformed(f"the number {shown} is beyond {limits}")
    return number


def _constant(text: str) -> NoReturn:
    raise _malformed(f"{text} is not JSON; for a missing value, send null or omit the key")


def _require_text(content: Any) -> None:
    """Raise Refusal for a string with half of a surrogate pair, such as "\\ud800"."""
    if isinstance(content, dict):
        for name, value in content.items():
            _require_text(name)
            _require_text(value)
    elif isinstance(content, list):
        for value in content:
            _require_text(value)
    elif isinstance(content, str) and not _is_text(content):
        raise _malformed(f"{content[:80]!r} has half of a surrogate pair")


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _malformed(reason: str) -> Refusal:
    return Refusal("malformed_json", f"the body is not valid JSON: {reason}")


_DECODER = JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant
)
