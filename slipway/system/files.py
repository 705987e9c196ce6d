"""Atomic writes, digests and locks: the only place that renames, syncs or hashes a file.

A reader never sees half a file or half a directory. What a killed process leaves behind has a
name ending in `.partial` and is removed by the next writer of the same path. Replacing a directory takes two
renames: between them there is none, so that a kill may cost the old one, but never leaves half of it.
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

_USUAL = 0o666  # a mode, less what the umask takes
PRIVATE = 0o600  # a mode: for its owner alone


def sha256_bytes(payload: bytes | memoryview) -> str:
    """Hex SHA-256 of `payload`."""
    return hashlib.sha256(payload).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def md5_file(path: Path) -> str:
    """Hex MD5 of a file's content, which is how DVC names it; read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of `path`, which are the very bytes that were digested; IntegrityError if they differ."""
    payload = path.read_bytes()
    found = sha256_bytes(payload)
    if found != sha256:
        raise IntegrityError(
            f"{path} was altered: its SHA-256 is {found}, expected {sha256}. Run the stage that writes it again (dvc repro)."
        )
    return payload


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and fixed spacing: equal values give equal text. NaN and infinities are refused."""
    return json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def digest_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value).encode())


@contextmanager
def new_file(path: Path, mode: int = _USUAL) -> Iterator[IO[bytes]]:
    """A fresh file to write; it takes the place of `path` when the block ends, and vanishes when it raises.

    It has `mode` from its first byte on, less what the umask takes, whatever the one before had.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    partial = _partial(path)
    try:
        with (
            _named(path),
            open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)


def write_bytes(path: Path, payload: bytes | memoryview, mode: int = _USUAL) -> None:
    """Write `payload` to `path` atomically, making its directory where needed."""
    with new_file(path, mode) as file:
        file.write(payload)


def claim_space(path: Path) -> None:
    """Give the file all the blocks of its length: where there are none, an OSError here.

    Written through a memory map, a sparse file on a full disk would end the process with SIGBUS.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with _named(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def write_text(path: Path, text: str, mode: int = _USUAL) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, value: Any) -> None:
    """Write canonical JSON to `path` atomically."""
    write_text(path, canonical_json(value))


@contextmanager
def new_directory(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A fresh directory to fill; it takes the place of `path` when the block ends, and vanishes when it raises.

    `durable=False` leaves out the sync of every file, for many files whose reader checks that they are there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
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
    _sync_directory(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def make_private_directory(path: Path) -> None:
    """A directory that its owner alone may enter; one that is there keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def move_directory(source: Path, path: Path) -> None:
    """Let the finished directory `source` take the place of `path`; to another file system it is copied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
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
    _sync_directory(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory, which is there as a whole or not at all, even for one who looks while it happens or after a kill."""
    removed = _partial(path, ".removed")
    path.rename(removed)
    shutil.rmtree(removed)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError of the block has a path: a write that fails does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _partial(path: Path, kind: str = "") -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{kind}.partial")


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` left; what a living process writes is its own."""
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
    """Whether a process of that number is running."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_tree(root: Path) -> None:
    """fsync every file and directory below `root`."""
    for directory, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_directory(Path(directory))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, purpose: str) -> Iterator[None]:
    """Hold an exclusive lock on `path` for the block; LockedError at once if another process has it.

    The kernel gives the lock back when the process ends, however it ends. It is the process's own: children that it forked
    (loader workers outlive a killed trainer by seconds) do not hold it, and within the process it keeps nobody out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # which of them is the system's choice
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(
                f"{purpose} is already running as process {holder} (lock file {path}). Wait for it, or end that process, then try again."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
