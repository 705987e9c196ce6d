"""JSON as RFC 8259 has it, and no more: every body means one thing only, and costs no more than it may.

Refused: NaN and infinities, numbers beyond a double's range, a key that is there twice, anything after the value, text that is not
UTF-8, nesting beyond MAX_DEPTH. How many values there are is known, and limited, before any of them is made.
"""

import math
import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from serving.http.responses import Refusal

MAX_DEPTH = 4  # {"rows": [{"column": value}]} has 3; one more, so that a list in place of a value is named by its column
MAX_DIGITS = 400  # of a number; a double has at most 309 before the point
_EXACT_DIGITS = 18
# A string, also one that never ends: the possessive repeats keep any text at one pass.
_TEXT = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_STRING = re.compile(_TEXT, re.DOTALL)
# No search takes long: no other thread has the interpreter meanwhile.
_BLOCK = re.compile(
    rb'(?:[^"]{1,128}+|"(?:[^"\\]{1,64}+|\\.){0,16}+"){1,1000}+', re.DOTALL
)  # whole strings, and not much between them
_PART = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){1,256}+', re.DOTALL)  # of a string
_ONE_BLOCK = 1 << 20  # bytes; up to here it is not worth it
_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def may_exceed(body: bytes, most: int, max_depth: int = MAX_DEPTH) -> bool:
    """Whether a JSON text may hold more than `most` values, told before any is made. Refusal if they are nested too deeply.

    A long text is looked at in blocks, so that it is never in memory twice.
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
        raise _malformed(f"it is nested more than {max_depth} deep")
    return False


def _blocks(body: bytes) -> Iterator[bytes | memoryview]:
    """The body in pieces that cut no string; a long one is told by an empty one."""
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
    """Behind the string that begins there, or the end of a body in which it never ends."""
    end = begin + 1
    while part := _PART.match(body, end):
        end = part.end()
    return end + 1 if body[end : end + 1] == b'"' else len(body)


def parse(body: bytes) -> Any:
    """The value of a JSON text; Refusal with the place of the first fault."""
    try:
        content = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except JSONDecodeError as error:
        raise _malformed(str(error)) from None
    except RecursionError:
        raise _malformed(f"it is nested more than {MAX_DEPTH} deep") from None
    if _LONE_SURROGATE.search(body):
        _require_text(content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _malformed(f"the key {repeated[:80]!r} is there twice in one object")
    return content


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _EXACT_DIGITS else _float(text)


def _float(text: str) -> float:
    number = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(number):
        raise _malformed(
            f"the number {text[:30]}{'...' * (len(text) > 30)} is beyond the range of a double, or has too many digits"
        )
    return number


def _constant(text: str) -> NoReturn:
    raise _malformed(
        f"{text} is no JSON; send null, or leave the key out, where a value is missing"
    )


def _require_text(content: Any) -> None:
    """Escapes can spell half a character, which no answer could repeat."""
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
