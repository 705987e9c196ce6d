"""Atomic writes, digests and locks: the only place that renames, syncs or hashes a file.

A reader never sees half a file or half a directory. Leftovers of a killed process have names ending
in `.partial`; the next writer of the same path removes them. Replacing a directory takes two
renames. A kill between them loses the old directory, but never leaves half of one.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from slipway.system.errors import IntegrityError, LockedError

_DEFAULT_MODE = 0o666  # mode before the umask
PRIVATE = 0o600


def sha256_bytes(payload: bytes | memoryview) -> str:
    """Return the hex SHA-256 of `payload`."""
    return hashlib.sha256(payload).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's content, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def md5_file(path: Path) -> str:
    """Return the hex MD5 of a file's content, as DVC names it; read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def read_verified(path: Path, sha256: str) -> bytes:
    """Read a file. Raises IntegrityError if the digest of its content is not `sha256`."""
    payload = path.read_bytes()
    found = sha256_bytes(payload)
    if found != sha256:
        raise IntegrityError(
            f"{path} was altered: its SHA-256 is {found}, expected {sha256}. "
            "Run the stage that writes it again: `slipway run`."
        )
    return payload


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end with a line break; none if the file is missing."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and fixed spacing: equal values give equal text. Refuses NaN."""
    return json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def digest_json(value: Any) -> str:
    """Return the hex SHA-256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value).encode())


@contextmanager
def new_file(path: Path, mode: int = _DEFAULT_MODE) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends.

    If the block raises, the new file is removed and `path` stays as it was. The new file has the
    permissions `mode`, less the umask, from its first byte on; those of an old file do not matter.
    """
    _prepare(path)
    partial = _partial(path)

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with _named(path), open(partial, "wb", opener=create) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.parent)


def write_bytes(path: Path, payload: bytes | memoryview, mode: int = _DEFAULT_MODE) -> None:
    """Write `payload` to `path` atomically. Creates the parent directory if necessary."""
    with new_file(path, mode) as file:
        file.write(payload)


def claim_space(path: Path) -> None:
    """Allocate all disk blocks of a sparse file. Raises OSError if the disk is full.

    Without them, a write through a memory map to a full disk ends the process with SIGBUS.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with _named(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def write_text(path: Path, text: str, mode: int = _DEFAULT_MODE) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, value: Any) -> None:
    """Write canonical JSON to `path` atomically."""
    write_text(path, canonical_json(value))


@contextmanager
def new_directory(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Create a new directory that replaces `path` when the block ends.

    If the block raises, the new directory is removed and `path` stays as it was. `durable=False`
    does not sync every file to disk, for many files whose reader checks their digests.
    """
    _prepare(path)
    partial, replaced = _partial(path), _partial(path, ".replaced")
    partial.mkdir()
    try:
        with _named(path):
            yield partial
            if durable:
                sync_tree(partial)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists():
            replaced.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def make_private_directory(path: Path) -> None:
    """Create a directory that only its owner may enter; an existing one keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def move_directory(source: Path, path: Path) -> None:
    """Move the finished directory `source` to `path`, and replace what is there.

    If `path` is on another file system, the files are copied.
    """
    _prepare(path)
    sync_tree(source)
    replaced = _partial(path, ".replaced")
    if path.exists():
        path.rename(replaced)
    try:
        source.rename(path)
    except OSError as error:
        if replaced.exists():
            replaced.rename(path)
        if error.errno != errno.EXDEV:
            raise
        with new_directory(path) as partial:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        shutil.rmtree(source)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory atomically: a reader finds all of it or nothing, even after a kill."""
    removed = _partial(path, ".removed")
    path.rename(removed)
    shutil.rmtree(removed)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that the block raises, because a failed write names no path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _partial(path: Path, kind: str = "") -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{kind}.partial")


def _prepare(path: Path) -> None:
    """Create the parent directory of `path`, and remove leftovers of killed writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"{re.escape(path.name)}\.(\d+)(\.replaced|\.removed)?\.partial")
    for leftover in path.parent.iterdir():
        match = pattern.fullmatch(leftover.name)
        if not match or (int(match[1]) != os.getpid() and is_alive(int(match[1]))):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Return True if a process with this id is running."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync_tree(root: Path) -> None:
    """Sync every file and directory below `root` to disk with fsync."""
    for directory, _, names in os.walk(root):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, purpose: str, *, is_shared: bool = False) -> Iterator[None]:
    """Hold a lock on the file `path` during the block. `purpose` is a name for messages.

    Raises LockedError if another process holds the lock, unless both locks have `is_shared`.

    The kernel releases the lock when the process ends in any way. Forked children do not hold it,
    because loader workers outlive a killed trainer by seconds. Threads of one process do not
    exclude each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # depends on the system
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(
                f"{purpose} is already running as process {holder} (lock file {path}). "
                "Wait for it, or end that process, then try again."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
