"""Who may call: keys, of which the service knows digests only, in a file that may change while it runs.

A key is 256 random bits, so one round of SHA-256 is as good as many: there is nothing to guess. `python -m serving.auth.keys NAME` makes
one, prints it once and adds its line to the file, `name:role:sha256[:requests per second]`. Several keys may have one name, so that a
new one is handed out before the old one is taken away. A file that cannot be read, or has a wrong line, changes nothing.
"""

import argparse
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

from serving.settings import PREFIX, ROOT
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.errors import SlipwayError

logger = logging.getLogger("bentoml.slipway")

Role = Literal["caller", "operator"]  # an operator may do whatever a caller may
ROLES: tuple[Role, ...] = get_args(Role)
MAX_KEYS = 1000  # in one file: a request is compared with all of them
MAX_FILE_BYTES = 1 << 20
LOOK_EVERY_S = 1.0  # whether the file has changed
MARK = "slipway_"  # how a key begins, so that scanners for secrets find one that got lost
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_RATE = 1e6


class KeysError(SlipwayError):
    """The file of keys cannot be read, or has wrong lines."""


@dataclass(frozen=True)
class Key:
    """One line of the file."""

    name: str
    role: Role
    digest: bytes  # SHA-256
    rate: float | None  # requests a second over all workers; None: no limit


def make_key() -> str:
    """A new key."""
    return MARK + secrets.token_urlsafe(32)


def digest_of(key: bytes) -> bytes:
    """What the file holds of a key."""
    return hashlib.sha256(key).digest()


def format_line(key: Key) -> str:
    """The line of the file for a key."""
    rate = "" if key.rate is None else f":{key.rate:g}"
    return f"{key.name}:{key.role}:{key.digest.hex()}{rate}\n"


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file; KeysError with every wrong line, which are named by their number and never repeated."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysError(
            f"the keys in {path} cannot be read: {os.strerror(error.errno or 0)}"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise KeysError(f"{path} has more than {MAX_FILE_BYTES} bytes, which is no file of keys")
    keys, problems = _parse(content.decode("utf-8", "replace"))
    if len(keys) > MAX_KEYS:
        problems.append(f"there are {len(keys)} keys, the limit is {MAX_KEYS}")
    if problems:
        raise KeysError(
            f"the keys in {path} are not taken: {'; '.join(problems)}. `python -m serving.auth.keys NAME` writes right lines"
        )
    return tuple(keys)


def _parse(text: str) -> tuple[list[Key], list[str]]:
    """The keys, and what is wrong with the other lines."""
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
    """The key of a line, or what is wrong with it. Nothing of the line is repeated: it may hold a key by mistake."""
    fields = line.split(":")
    if not 3 <= len(fields) <= 4:
        return "expected name:role:sha256[:requests per second]"
    name, role, digest = fields[:3]
    if not _NAME.fullmatch(name):
        return "a name has 1 to 64 of A-Z a-z 0-9 . _ -"
    if not _DIGEST.fullmatch(digest):
        return "expected the SHA-256 of a key, 64 of 0-9 a-f"
    rate = _rate(fields[3]) if len(fields) == 4 else None
    if rate is not None and not 0 < rate <= _MAX_RATE:
        return f"the rate is requests a second, above 0 and at most {_MAX_RATE:g}"
    for known in ROLES:
        if role == known:
            return Key(name, known, bytes.fromhex(digest), rate)
    return f"the role is one of {', '.join(ROLES)}"


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which is in no range


class Bucket:
    """Tokens that come back steadily: `rate` a second, and at most one second's, or one, at once."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._tokens = self._most
        self._filled = now

    def take(self, now: float) -> float:
        """Take a token and return 0, or the seconds until there is one."""
        self._tokens = min(self._most, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate


class KeyRing:
    """One worker's view of the file: who has a key, and how much of its rate is left.

    Each worker grants its share of a rate. `on_fault` is called whenever the file turns out to be wrong.
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
        self._seen: tuple[int, ...] | None = None  # of the file that was read
        self._fault = ""
        self._next_look = -math.inf
        self._look(clock())

    def find(self, presented: bytes) -> Key | None:
        """The key that was presented, if it is in the file. Takes the same time for every wrong one."""
        self._look(self._clock())
        digest, found = digest_of(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def take(self, key: Key) -> float:
        """Count a request of this key: 0 if it may go on, else the seconds until it may."""
        bucket = self._buckets.get(key)
        return bucket.take(self._clock()) if bucket else 0.0

    def _look(self, now: float) -> None:
        """Read the file again if it has changed. Until it can be read, the keys of before stay."""
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
                logger.error("%s; the %d keys of before stay", error, len(self._keys))
            return
        self._seen, self._fault = seen, ""
        self._put(keys, now)

    def _put(self, keys: tuple[Key, ...], now: float) -> None:
        before = self._buckets
        self._keys = keys
        self._buckets = {
            key: before.get(key) or Bucket(key.rate / self._num_workers, now)
            for key in keys
            if key.rate is not None
        }  # what a key has used up stays used up
        roles = Counter(key.role for key in keys)
        logger.info("keys: %s", ", ".join(f"{roles[role]} of role {role}" for role in ROLES))


class KeyFile:
    """Looks at the file now and then, whether anybody asks or not, so that it is known for how long it is wrong.

    A ring counts a fault once and looks only where a request comes. `show` is told each time.
    """

    def __init__(self, path: Path, show: Callable[[bool], None]) -> None:
        self._path = path
        self._show = show
        self._seen: tuple[int, ...] | None = None  # of the file when it was last right

    def sample(self) -> None:
        """Look once."""
        seen = _stamp(self._path)
        if seen is None or seen != self._seen:
            try:
                read_keys(self._path)
                self._seen = seen
            except KeysError:
                self._seen = None
        self._show(self._seen is None)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file does, also when another takes its place; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def add_key(path: Path, name: str, role: Role, rate: float | None) -> str:
    """Make a key, add its line to the file, and return the key, which is nowhere else; KeysError if the file or the line would be wrong."""
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
        raise KeysError(f"{path} cannot be written: {os.strerror(error.errno or 0)}") from None
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.auth.keys",
        description="Make a key, print it once, and add its digest to the file.",
    )
    parser.add_argument("name", help="whose key it is; several keys may have one name")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="caller",
        help="operators may also read /metrics and change what is served",
    )
    parser.add_argument(
        "--rate", type=float, help="most requests a second, over all workers (default: no limit)"
    )
    parser.add_argument(
        "--file", type=Path, help="the file of keys (default: SLIPWAY_KEYS, as for the service)"
    )
    return parser


def _named_file() -> Path | None:
    named = os.environ.get(f"{PREFIX}KEYS")
    return ROOT / named if named else None


@quiet_when_unread()
def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    given = _parser().parse_args(arguments)
    path = given.file or _named_file()
    if path is None:
        print(
            "no file of keys: give --file, or set SLIPWAY_KEYS as for the service", file=sys.stderr
        )
        return 1
    try:
        key = add_key(path, given.name, given.role, given.rate)
    except KeysError as error:
        print(error, file=sys.stderr)
        return 1
    print(key)
    print(
        f"{given.name} ({given.role}) is in {path} with the digest of this key. It is not shown again.",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
