"""Archives: a .zip, .tar or .tar.gz of a data set is unpacked once into `.work/archives/SHA-256/`, and read from there.

Every member is judged by its name and kind first. An archive with one that could leave the folder, make a link, or mean different files on
different machines is refused as a whole, with all such members named in one pass; nothing of it stays. An archive inside is just a file.
"""

import errno
import json
import os
import re
import shutil
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slipway.config.sections import DataParams
from slipway.data.sources.archive_members import (
    CHUNK_BYTES,
    DAMAGE,
    Member,
    read_members,
    too_large,
)
from slipway.data.sources.samples import visible_entries
from slipway.system import files
from slipway.system.errors import DataError, UnavailableError

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
FOLDER = Path(".work/archives")
_MAX_SHOWN = 20
_MOST_NAME_BYTES = 255  # of one part of a path, on every common file system
_MOST_PATH_BYTES = 1024


class ArchiveLimits(NamedTuple):
    """The limits of an archive: `clean.max_archive_members` and `clean.max_archive_ratio`."""

    max_members: int
    max_ratio: int  # bytes out over the bytes of the archive


def unpacked(data: DataParams, limits: ArchiveLimits) -> DataParams:
    """`data` with the folder that its archive was unpacked to; the same where `data.path` is no archive.

    Raises DataError that names every member that is refused, and UnavailableError where the disk is too small.
    """
    path = Path(data.path)
    if not path.name.lower().endswith(ENDINGS) or not path.is_file():
        return data
    return data.model_copy(update={"path": str(unpack(path, FOLDER, limits))})


def unpack(path: Path, folder: Path, limits: ArchiveLimits) -> Path:
    """Unpack an archive below `folder` unless it was before; skip a single top folder."""
    target = folder / _digest(path)
    if not _is_complete(target):
        listing = folder / "refused.txt"
        _check_disk_space(path, folder, _judge(path, limits, listing).bytes)
        with files.new_directory(
            target, durable=False
        ) as partial:  # what a crash cost is unpacked again
            content = partial / "content"
            content.mkdir()
            _fill(path, content, limits, listing)
            files.write_json(partial / "archive.json", _measure(content))
    return _look_through(target / "content")


def name_problem(name: str) -> str | None:
    """Return the reason why a member's name is unsafe on some system, or None."""
    plain = name.replace("\\", "/")
    parts = plain.split("/")
    if plain.startswith("/"):
        return "an absolute path"
    if re.match(r"[A-Za-z]:", plain):
        return "a path with a drive letter"
    if ".." in parts:
        return "a path that leads out with '..'"
    if "\0" in plain:
        return "a name with a NUL character"
    sizes = [len(part.encode(errors="surrogateescape")) for part in parts]
    if sum(sizes) + len(parts) > _MOST_PATH_BYTES or max(sizes) > _MOST_NAME_BYTES:
        return f"a name of more than {_MOST_NAME_BYTES} bytes, or a path of more than {_MOST_PATH_BYTES}"
    return None


@dataclass
class _Names:
    """The paths taken so far, compared without case and in one Unicode form."""

    folders: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    _known: str = ""  # the folder that was last found to be free of collisions

    def problem(self, parts: list[str], is_folder: bool) -> str | None:
        """Take a path; return why it collides with an earlier one, or None."""
        problem = self._take_folders(parts if is_folder else parts[:-1])
        return problem if problem or is_folder else self._take_file("/".join(parts))

    def _take_folders(self, parts: list[str]) -> str | None:
        whole = "/".join(parts)
        if whole == self._known:
            return None
        for length in range(1, len(parts) + 1):
            path = "/".join(parts[:length])
            key = _folded(path)
            if key in self.files:
                return f"needs the folder {path!a}, where {self.files[key]!a} is a file"
            if self.folders.setdefault(key, path) != path:
                return f"its folder differs from {self.folders[key]!a} only in case or Unicode form"
        self._known = whole
        return None

    def _take_file(self, path: str) -> str | None:
        key = _folded(path)
        if key in self.folders:
            return f"a file where {self.folders[key]!a} is a folder"
        taken = self.files.setdefault(key, path)
        if taken is path:
            return None
        return (
            "there twice"
            if taken == path
            else f"differs from {taken!a} only in case or Unicode form"
        )


def _folded(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())


class _Content(NamedTuple):
    files: int
    bytes: int


def _judge(path: Path, limits: ArchiveLimits, listing: Path) -> _Content:
    """Check every member before anything is written; DataError names all unsafe ones."""
    max_bytes = limits.max_ratio * path.stat().st_size
    names, num_files, num_bytes = _Names(), 0, 0
    problems: list[str] = []
    for member in read_members(path, limits.max_members, max_bytes):
        problem = (
            member.problem
            or name_problem(member.name)
            or names.problem(_parts(member.name), member.is_folder)
        )
        if problem:
            problems.append(f"{member.name!r}: {problem}")
        elif _is_wanted(member):
            num_files, num_bytes = num_files + 1, num_bytes + member.declared_bytes
    if problems:
        raise _refused(path, problems, listing)
    if num_bytes > max_bytes:
        raise too_large(path, max_bytes)
    if not num_files:
        raise DataError(
            f"the archive {str(path)!r} holds no files, expected a folder of classes, or a table with its images."
        )
    return _Content(num_files, num_bytes)


def _fill(path: Path, content: Path, limits: ArchiveLimits, listing: Path) -> None:
    """Unpack the checked members and count their bytes again, because headers may lie."""
    max_bytes = bytes_left = limits.max_ratio * path.stat().st_size
    problems: list[str] = []
    for member in read_members(path, limits.max_members, max_bytes):
        if member.problem or name_problem(member.name):
            raise DataError(
                f"the archive {str(path)!r} changed while it was unpacked. Run again when it is complete."
            )
        if _is_wanted(member):
            # After the first problem nothing is written any more, but the rest is still looked at.
            written, problem = _copy(
                member, None if problems else content.joinpath(*_parts(member.name)), bytes_left
            )
            bytes_left -= written
            problems += [f"{member.name!r}: {problem}"] if problem else []
        if bytes_left < 0:
            raise too_large(path, max_bytes)
    if problems:
        raise _refused(path, problems, listing)


def _parts(name: str) -> list[str]:
    return [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]


def _is_wanted(member: Member) -> bool:
    parts = _parts(member.name)
    return not member.is_folder and bool(parts) and parts[0] != "__MACOSX"


def _copy(member: Member, target: Path | None, most_bytes: int) -> tuple[int, str | None]:
    """Unpack one file; return the bytes written and its problem, if any."""
    written = 0
    sink = _create(target) if target else None
    try:
        with member.open() as source:
            while written <= most_bytes and (chunk := source.read(CHUNK_BYTES)):
                written += len(chunk)
                if sink is not None:
                    _write(sink, chunk)
    except DAMAGE as error:
        return written, f"damaged: {error}"
    finally:
        if sink is not None:
            os.close(sink)
    return (
        written,
        None
        if written == member.declared_bytes or written > most_bytes
        else f"damaged: {written} of {member.declared_bytes} bytes",
    )


def _create(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _not_written(error) from error


def _write(sink: int, chunk: bytes) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[os.write(sink, view) :]
    except OSError as error:
        raise _not_written(error) from error


def _not_written(error: OSError) -> UnavailableError:
    remedy = (
        "Free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Unpack it elsewhere"
    )
    return UnavailableError(
        f"the archive cannot be unpacked into {FOLDER}: {error}. {remedy}, or point data.path at an unpacked folder."
    )


def _refused(path: Path, problems: list[str], listing: Path) -> DataError:
    files.write_text(listing, "".join(f"{problem}\n" for problem in problems))
    shown = "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN]) + "\n  ..." * (
        len(problems) > _MAX_SHOWN
    )
    return DataError(
        f"the archive {str(path)!r} has {len(problems)} member{'s' * (len(problems) > 1)} that may not be unpacked:\n{shown}\n"
        f"All of them are in {listing}. Pack it again without them; nothing was unpacked."
    )


def _digest(path: Path) -> str:
    try:
        return files.sha256_file(path)
    except OSError as error:
        raise DataError(
            f"data.path {str(path)!r} cannot be read: {error.strerror}. Give this user the right to read it."
        ) from error


def _check_disk_space(path: Path, folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UnavailableError(
            f"{str(path)!r} unpacks to {needed / 2**20:,.0f} MiB, {folder} has {free / 2**20:,.0f} MiB free. Free space, or unpack it "
            "elsewhere and point data.path at that folder."
        )


def _measure(folder: Path) -> dict[str, int]:
    """Count files and bytes: a cheap check that the folder is complete."""
    num_files = num_bytes = 0
    for directory, _, names in os.walk(folder):
        num_files += len(names)
        num_bytes += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
    return {"files": num_files, "bytes": num_bytes}


def _is_complete(target: Path) -> bool:
    try:
        written: dict[str, int] = json.loads((target / "archive.json").read_bytes())
    except (OSError, ValueError):
        return False
    return written == _measure(target / "content")


def _look_through(folder: Path) -> Path:
    entries = visible_entries(folder)
    return Path(entries[0].path) if len(entries) == 1 and entries[0].is_dir() else folder
