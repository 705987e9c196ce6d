"""API keys, stored as digests in a file that may change while the service runs.

A key has 256 random bits, so it cannot be guessed from one round of SHA-256. `python -m
slipway.serving.auth.keys NAME` makes a key, prints it once, and adds a line to the file,
`name:role:sha256[:requests per second]`. Several keys may share a name, so a new key can be handed
out before the old one is removed. If the file becomes unreadable or invalid, the loaded keys stay.
"""

import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slipway.serving.settings import PREFIX, ROOT
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.errors import SlipwayError

logger = logging.getLogger("bentoml.slipway")

Role = Literal["caller", "operator"]  # an operator may also do everything that a caller may
ROLES: tuple[Role, ...] = get_args(Role)
MAX_KEYS = 1000  # most keys in one file: every request is compared with all of them
MAX_FILE_BYTES = 1 << 20
LOOK_EVERY_S = 1.0  # between two checks for a change of the file
MARK = "slipway_"  # prefix of every key, so that secret scanners find leaked keys
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_RATE = 1e6


class KeysError(SlipwayError):
    """The key file cannot be read, or has invalid lines."""


@dataclass(frozen=True)
class Key:
    """An API key as the key file stores it: name, role, digest and rate limit."""

    name: str
    role: Role
    digest: bytes  # SHA-256
    rate: float | None  # requests per second over all workers; None: no limit


def make_key() -> str:
    """Return a new random API key of 256 bits."""
    return MARK + secrets.token_urlsafe(32)


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key, 32 bytes. The key file stores it in hex in place of the key."""
    return hashlib.sha256(key).digest()


def format_line(key: Key) -> str:
    """Format a key as a line of the key file."""
    rate = "" if key.rate is None else f":{key.rate:g}"
    return f"{key.name}:{key.role}:{key.digest.hex()}{rate}\n"


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read a key file. Raises KeysError with the numbers of all invalid lines, never their text."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise KeysError(f"cannot read the key file {path}: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise KeysError(f"{path} has more than {MAX_FILE_BYTES} bytes, so it is not a key file")
    keys, problems = _parse(content.decode("utf-8", "replace"))
    if len(keys) > MAX_KEYS:
        problems.append(f"there are {len(keys)} keys, the limit is {MAX_KEYS}")
    if problems:
        raise KeysError(
            f"the key file {path} is invalid: {'; '.join(problems)}. "
            "`python -m slipway.serving.auth.keys NAME` writes valid lines"
        )
    return tuple(keys)


def _parse(text: str) -> tuple[list[Key], list[str]]:
    """Parse the text of a key file. Returns the valid keys, and a message for each invalid line."""
    keys: dict[bytes, Key] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        key = _parse_line(content)
        if isinstance(key, str):
            problems.append(f"line {number}: {key}")
        elif key.digest in keys:
            problems.append(f"line {number}: the same key as an earlier line's")
        else:
            keys[key.digest] = key
    return list(keys.values()), problems


def _parse_line(line: str) -> Key | str:
    """Parse a line of the key file. Returns the key, or a message if the line is invalid.

    The message never quotes the line, because it may contain a secret by mistake.
    """
    fields = line.split(":")
    if not 3 <= len(fields) <= 4:
        return "expected name:role:sha256[:requests per second]"
    name, role, digest = fields[:3]
    if not _NAME.fullmatch(name):
        return "a name has 1 to 64 of A-Z a-z 0-9 . _ -"
    if not _DIGEST.fullmatch(digest):
        return "expected the SHA-256 of a key, 64 of 0-9 a-f"
    rate = None
    if len(fields) == 4:
        with contextlib.suppress(ValueError):
            rate = float(fields[3])
        if rate is None or not 0 < rate <= _MAX_RATE:
            return f"the rate is requests per second, above 0 and at most {_MAX_RATE:g}"
    for known in ROLES:
        if role == known:
            return Key(name, known, bytes.fromhex(digest), rate)
    return f"the role is one of {', '.join(ROLES)}"


class Bucket:
    """A token bucket. It gains `rate` tokens per second and holds at most max(rate, 1) of them."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._tokens = self._most
        self._filled = now

    def take(self, now: float) -> float:
        """Remove one token from the bucket.

        Returns 0, or the seconds until the next one is available.
        """
        self._tokens = min(self._most, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate


class KeyRing:
    """The API keys and rate limits of one worker.

    The workers divide each key's rate equally. `on_fault` is called if the key file becomes
    invalid.
    """

    def __init__(
        self,
        path: Path,
        num_workers: int,
        on_fault: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._num_workers = num_workers
        self._on_fault = on_fault
        self._clock = clock
        self._keys: tuple[Key, ...] = ()
        self._buckets: dict[Key, Bucket] = {}
        self._seen: tuple[int, ...] | None = None  # stamp of the file that was read
        self._fault = ""
        self._next_look = -math.inf
        self._look(clock())

    def find(self, presented: bytes) -> Key | None:
        """Return the key in the file that equals `presented`; None for an unknown one.

        The time is the same for every unknown key.
        """
        self._look(self._clock())
        digest, found = digest_of(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def take(self, key: Key) -> float:
        """Spend one token of the key's rate limit on a request.

        Returns 0 if the request may proceed, else the seconds until a retry can succeed.
        """
        bucket = self._buckets.get(key)
        return bucket.take(self._clock()) if bucket else 0.0

    def _look(self, now: float) -> None:
        """Reload the file if it changed. Keeps the loaded keys until the new ones are valid."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        seen = _stamp(self._path)
        if seen is not None and seen == self._seen:
            return
        try:
            keys = read_keys(self._path)
        except KeysError as error:
            self._seen = None
            if str(error) != self._fault:
                self._fault = str(error)
                self._on_fault()
                logger.error(
                    "cannot reload keys: %s; keeping the %d keys already loaded",
                    error,
                    len(self._keys),
                )
            return
        self._seen, self._fault, self._keys = seen, "", keys
        # A key that stays keeps its bucket, and with it the tokens it has used.
        self._buckets = {
            key: self._buckets.get(key) or Bucket(key.rate / self._num_workers, now)
            for key in keys
            if key.rate is not None
        }
        roles = Counter(key.role for key in keys)
        counts = ", ".join(f"{roles[role]} of role {role}" for role in ROLES)
        logger.info("loaded keys: %s", counts)


class KeyFile:
    """Checks the key file at regular intervals, and passes its state to `show`, which sets a gauge.

    KeyRing is not enough: it reads the file only when a request arrives, and counts a fault once,
    so its counter does not show for how long the file is invalid.
    """

    def __init__(self, path: Path, show: Callable[[bool], None]) -> None:
        self._path = path
        self._show = show
        self._seen: tuple[int, ...] | None = None  # stamp of the last valid file

    def sample(self) -> None:
        """Check the key file once, and report the result to `show`."""
        seen = _stamp(self._path)
        if seen is None or seen != self._seen:
            try:
                read_keys(self._path)
                self._seen = seen
            except KeysError:
                self._seen = None
        self._show(self._seen is None)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return a fingerprint of the file's metadata, which differs after every change.

    None if the file does not exist.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def add_key(path: Path, name: str, role: Role, rate: float | None) -> str:
    """Make a key and add its line to the file. Returns the key, which is stored nowhere.

    Raises KeysError if the file or the new line is invalid.
    """
    if path.exists():
        read_keys(path)
    key = make_key()
    line = format_line(Key(name, role, digest_of(key.encode()), rate))
    problem = _parse_line(line.strip())
    if isinstance(problem, str):
        raise KeysError(f"no key was made: {problem}")
    try:
        with open(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0
        ) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_whole = size == 0 or file.read(1) == b"\n"
            file.write(line.encode() if is_whole else b"\n" + line.encode())
    except OSError as error:
        raise KeysError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from None
    return key


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway keys",
        description="Make a key, print it once, and add its digest to the file.",
    )
    parser.add_argument("name", help="name of the caller; several keys may share it")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="caller",
        help="operators may also read /metrics and change the served model",
    )
    parser.add_argument(
        "--rate", type=float, help="most requests per second over all workers (default: no limit)"
    )
    parser.add_argument(
        "--file", type=Path, help="the key file (default: SLIPWAY_KEYS, as for the service)"
    )
    return parser


@quiet_when_unread()
def main(arguments: list[str] | None = None) -> int:
    """Make a key and print it, as `python -m slipway.serving.auth.keys`. Returns the exit code."""
    given = _parser().parse_args(arguments)
    default = os.environ.get(f"{PREFIX}KEYS")
    path = given.file or (ROOT / default if default else None)
    if path is None:
        print(
            "no key file is given, expected --file or SLIPWAY_KEYS. Add `--file keys`, and start "
            "the service with SLIPWAY_KEYS=keys.",
            file=sys.stderr,
        )
        return 1
    try:
        key = add_key(path, given.name, given.role, given.rate)
    except KeysError as error:
        print(error, file=sys.stderr)
        return 1
    print(key)
    print(
        f"added {given.name} ({given.role}) to {path}. The key is not shown again.",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
