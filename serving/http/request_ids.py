"""What an answer, an error and a truth told later are known by: the caller's own `x-request-id` if it is sane, else a new one."""

import os
import re
import secrets

from serving.http.routes import Headers

_SANE = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_NUM_BYTES = 8  # of randomness in each
_AT_ONCE = 256  # are made: to ask the system for each costs more than all else about it
_unused: list[str] = []
os.register_at_fork(after_in_child=_unused.clear)


def request_id_of(headers: Headers) -> str:
    """The caller's if it is sane, else a new one."""
    given = headers.get(b"x-request-id")
    return given.decode() if given and _SANE.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """16 hex digits that nobody can foresee. Belongs to the event loop's thread."""
    if not _unused:
        digits = secrets.token_hex(_NUM_BYTES * _AT_ONCE)
        _unused.extend(
            digits[begin : begin + 2 * _NUM_BYTES]
            for begin in range(0, len(digits), 2 * _NUM_BYTES)
        )
    return _unused.pop()
