"""Unpacks a .zip or .tar (plain, gzip, bzip2 or xz) once, into `.work/archives/SHA-256/`.

Names and types of all members are checked first. An archive is refused as a whole if any member
would be written outside the folder, is a link, or has a name that systems read differently. The
error names all such members, and nothing is written. An archive inside an archive is an ordinary
file, but an archive of nothing else is refused. An Excel workbook, which is a zip, is unpacked to
the table in one sheet.
"""

import errno
import json
import os
import re
import shlex
import shutil
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from slipway.config.sections import ARCHIVES, WORKBOOK, CleanParams, DataParams
from slipway.data.sources.archive_members import (
    CHUNK_BYTES,
    DAMAGE,
    Member,
    name_hint,
    read_members,
    too_large,
)
from slipway.data.sources.formats import excel
from slipway.data.sources.joined import source_names
from slipway.data.sources.samples import visible_entries
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import DataError, SlipwayError, UnavailableError

ENDINGS = (*ARCHIVES, WORKBOOK)
FOLDER = Path(".work/archives")
_MAX_SHOWN = 20
_MAX_INNER = 3
_SHEET_DIGITS = 12
_MOST_NAME_BYTES = 255  # longest part of a path on every common file system
_MOST_PATH_BYTES = 1024


class ArchiveLimits(NamedTuple):
    """The limits of an archive: `clean.max_archive_members` and `clean.max_archive_ratio`."""

    max_members: int
    max_ratio: int  # largest ratio of unpacked bytes to the archive's bytes

    @classmethod
    def of(cls, clean: CleanParams) -> "ArchiveLimits":
        """Return the limits that params.yaml sets."""
        return cls(clean.max_archive_members, clean.max_archive_ratio)


def unpacked(data: DataParams, limits: ArchiveLimits) -> DataParams:
    """Unpack the archive at `data.path`; return `data` with the path of the unpacked folder.

    Returns `data` itself if the path is not an archive. Archives among `data.sources` are unpacked,
    too. Raises DataError naming every refused member, and UnavailableError if the disk is too
    small.
    """
    path = Path(data.path)
    if is_archive(path):
        path = _unpack_for(data, path, limits)
        data = data.model_copy(update={"path": str(path)})
    if data.sources is not None and path.is_dir():
        for name in source_names(data):
            if is_archive(path / name):
                _unpack_for(data, path / name, limits)
    return data


def is_archive(path: Path) -> bool:
    """Return True if the file's name ends like that of an archive."""
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def content_of(path: Path, data: DataParams) -> Path:
    """Return the folder with the content of an unpacked archive; return other paths unchanged."""
    if not is_archive(path):
        return path
    target = _target(path, FOLDER, data.archive_encoding, data.sheet)
    return _top(target) if _is_complete(target) else path


@contextmanager
def shown_as(given: Mapping[Path, Path]) -> Iterator[None]:
    """Let errors name the files that the user gave, in place of the paths of unpacked copies."""
    try:
        yield
    except SlipwayError as error:
        if error.args and isinstance(text := error.args[0], str):
            for copy in sorted(given, key=lambda path: -len(str(path))):
                text = text.replace(str(copy), str(given[copy]))
            error.args = (text, *error.args[1:])
        raise


def archives_of(data: DataParams) -> dict[Path, Path]:
    """Return the archives that `data` names, by the folder of the content of each."""
    path = Path(data.path)
    paths = [path]
    if data.sources is not None and path.is_dir():
        paths += [path / name for name in source_names(data)]
    return {content_of(one, data): one for one in paths if is_archive(one)}


def _unpack_for(data: DataParams, path: Path, limits: ArchiveLimits) -> Path:
    if path.suffix.lower() == WORKBOOK and kind_of(data.task).input.has_pixels:
        raise DataError(
            f"data.path {str(path)!r} is an Excel workbook, which is read for the tasks of tables. "
            "Save it as .csv in the folder of its images."
        )
    of_sources = data.sources is not None  # which may be archives in this one
    encoding, sheet = data.archive_encoding, data.sheet
    return unpack(path, FOLDER, limits, encoding, sheet, may_hold_archives=of_sources)


def unpack(
    path: Path,
    folder: Path,
    limits: ArchiveLimits,
    encoding: str | None = None,
    sheet: str | None = None,
    *,
    may_hold_archives: bool = False,
) -> Path:
    """Unpack an archive below `folder`, unless that has been done before.

    `encoding` is that of names that are not declared to be UTF-8; without it, a hint is printed if
    they are not. `sheet` is that of a workbook, by default the first. An archive of
    nothing but archives is refused, unless it `may_hold_archives`. Returns the folder of its
    content, without a single enclosing folder.
    """
    target = _target(path, folder, encoding, sheet)
    if not _is_complete(target):
        listing = folder / "refused.txt"
        checked = _check_members(path, limits, encoding, listing)
        if checked.inner and not may_hold_archives:
            raise only_archives(path, checked.inner)
        _check_disk_space(path, folder, checked.num_bytes)
        # Not flushed to disk: what a crash loses is unpacked again.
        with files.new_directory(target, durable=False) as partial:
            content = partial / "content"
            content.mkdir()
            if target.suffix == WORKBOOK:
                max_bytes = limits.max_ratio * path.stat().st_size
                for remark in excel.write_sheet(path, content / excel.SHEET, max_bytes, sheet):
                    print(remark)
            else:
                _fill(path, content, limits, encoding, listing)
            files.write_json(partial / "archive.json", _measure(content))
    return _top(target)


def _target(path: Path, folder: Path, encoding: str | None, sheet: str | None) -> Path:
    if path.suffix.lower() == WORKBOOK:
        chosen = "" if sheet is None else f"-{files.sha256_bytes(sheet.encode())[:_SHEET_DIGITS]}"
        return folder / (_digest(path) + chosen + WORKBOOK)
    return folder / (_digest(path) + (f"-{encoding}" if encoding else ""))


def _top(target: Path) -> Path:
    entries = visible_entries(target / "content")
    has_one_folder = len(entries) == 1 and entries[0].is_dir()
    return Path(entries[0].path) if has_one_folder else target / "content"


def name_problem(name: str) -> str | None:
    """Return the reason why a member's name is unsafe on some operating system, or None."""
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
        return (
            f"a name of more than {_MOST_NAME_BYTES} bytes, "
            f"or a path of more than {_MOST_PATH_BYTES}"
        )
    return None


@dataclass
class MemberNames:
    """The paths of earlier members, compared without case and in one Unicode form."""

    folders: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    _checked: str = ""  # the folder checked last, free of collisions

    def problem(self, parts: list[str], is_folder: bool) -> str | None:
        """Add a path; return the reason why it collides with an earlier path, or None."""
        problem = self._take_folders(parts if is_folder else parts[:-1])
        return problem if problem or is_folder else self._take_file("/".join(parts))

    def _take_folders(self, parts: list[str]) -> str | None:
        whole = "/".join(parts)
        if whole == self._checked:
            return None
        for length in range(1, len(parts) + 1):
            path = "/".join(parts[:length])
            key = _folded(path)
            if key in self.files:
                return f"needs the folder {path!a}, where {self.files[key]!a} is a file"
            if self.folders.setdefault(key, path) != path:
                return f"its folder differs from {self.folders[key]!a} only in case or Unicode form"
        self._checked = whole
        return None

    def _take_file(self, path: str) -> str | None:
        key = _folded(path)
        if key in self.folders:
            return f"a file where {self.folders[key]!a} is a folder"
        taken = self.files.setdefault(key, path)
        if taken is path:
            return None
        if taken == path:
            return "there twice"
        return f"differs from {taken!a} only in case or Unicode form"


def _folded(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())


def only_archives(path: Path, inner: Sequence[str]) -> DataError:
    """Return the error for an archive that holds only archives, which are not unpacked."""
    unpack_it = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
    shown = ", ".join(map(repr, inner[:_MAX_INNER])) + ", ..." * (len(inner) > _MAX_INNER)
    return DataError(
        f"the archive {str(path)!r} holds nothing but {shown}, expected a folder of classes or a "
        "table: an archive or a workbook in an archive is not opened. Unpack the outer one, and "
        f"give what is in it: {unpack_it} {shlex.quote(str(path))}"
    )


class _CheckedMembers(NamedTuple):
    num_bytes: int  # the declared sizes of all files
    inner: list[str]  # the names of the files, if all of them are archives


def _check_members(
    path: Path, limits: ArchiveLimits, encoding: str | None, listing: Path
) -> _CheckedMembers:
    """Check every member before anything is written.

    Raises DataError naming all unsafe members.
    """
    max_bytes = limits.max_ratio * path.stat().st_size
    names = MemberNames()
    num_files = num_bytes = 0
    inner, foreign = list[str](), None
    problems: list[str] = []
    for member in read_members(path, limits.max_members, max_bytes, encoding):
        foreign = foreign or member.foreign_name
        problem = (
            member.problem
            or name_problem(member.name)
            or names.problem(member.parts, member.is_folder)
        )
        if problem:
            problems.append(f"{member.name!r}: {problem}")
        elif _is_wanted(member):
            num_files += 1
            num_bytes += member.declared_bytes
            inner += [member.name] if member.name.lower().endswith(ENDINGS) else []
    if problems:
        raise _refused(path, problems, listing)
    if num_bytes > max_bytes:
        raise too_large(path, max_bytes)
    if not num_files:
        raise DataError(
            f"the archive {str(path)!r} holds no files, "
            "expected a folder of classes, or a table with its images."
        )
    if foreign is not None:
        print(name_hint(path, foreign))
    return _CheckedMembers(num_bytes, inner if len(inner) == num_files else [])


def _fill(
    path: Path, content: Path, limits: ArchiveLimits, encoding: str | None, listing: Path
) -> None:
    """Unpack the checked members, counting their bytes again because headers may lie."""
    max_bytes = bytes_left = limits.max_ratio * path.stat().st_size
    problems: list[str] = []
    for member in read_members(path, limits.max_members, max_bytes, encoding):
        if member.problem or name_problem(member.name):
            raise DataError(
                f"the archive {str(path)!r} changed while it was unpacked. "
                "Run again when it is complete."
            )
        if _is_wanted(member):
            # After the first problem nothing is written, but the other members are still checked.
            target = None if problems else content.joinpath(*member.parts)
            written, problem = _copy(member, target, bytes_left)
            bytes_left -= written
            if problem:
                problems.append(f"{member.name!r}: {problem}")
        if bytes_left < 0:
            raise too_large(path, max_bytes)
    if problems:
        raise _refused(path, problems, listing)


def _is_wanted(member: Member) -> bool:
    parts = member.parts
    return not member.is_folder and bool(parts) and parts[0] != "__MACOSX"


def _copy(member: Member, target: Path | None, most_bytes: int) -> tuple[int, str | None]:
    """Unpack one file, or only read it if `target` is None.

    Returns the number of bytes, and the problem or None.
    """
    written = 0
    try:
        with member.open() as source, _create(target) as sink:
            while written <= most_bytes and (chunk := source.read(CHUNK_BYTES)):
                written += len(chunk)
                with _disk_errors():
                    sink.write(chunk)
                    sink.flush()
    except DAMAGE as error:
        return written, f"damaged: {error}"
    if written == member.declared_bytes or written > most_bytes:
        return written, None
    return written, f"damaged: {written} of {member.declared_bytes} bytes"


@contextmanager
def _create(target: Path | None) -> Iterator[IO[bytes]]:
    with _disk_errors():
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive creation follows no link.
        path, mode = (target, "xb") if target else (Path(os.devnull), "wb")
        sink = open(path, mode, opener=_open_private)  # noqa: SIM115 - closed below
    try:
        yield sink
    finally:
        with _disk_errors():  # closing writes what is left in the buffer
            sink.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may write, regardless of the umask."""
    return os.open(path, flags, 0o644)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Convert a disk failure to an UnavailableError, because the archive itself is not damaged."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space there" if is_full else "Unpack it elsewhere"
        raise UnavailableError(
            f"the archive cannot be unpacked into {FOLDER}: {error}. {remedy}, "
            "or point data.path at an unpacked folder."
        ) from error


def _refused(path: Path, problems: list[str], listing: Path) -> DataError:
    files.write_text(listing, "".join(f"{problem}\n" for problem in problems))
    shown = [f"  {problem}\n" for problem in problems[:_MAX_SHOWN]]
    if len(problems) > _MAX_SHOWN:
        shown.append("  ...\n")
    members = "member" if len(problems) == 1 else "members"
    return DataError(
        f"the archive {str(path)!r} has {len(problems)} {members} that may not be unpacked:\n"
        + "".join(shown)
        + f"All of them are in {listing}. Pack it again without them; nothing was unpacked."
    )


def _digest(path: Path) -> str:
    try:
        return files.sha256_file(path)
    except OSError as error:
        raise DataError(
            f"data.path {str(path)!r} cannot be read: {error.strerror}. "
            "Give this user the right to read it."
        ) from error


def _check_disk_space(path: Path, folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UnavailableError(
            f"{str(path)!r} unpacks to {needed / 2**20:,.0f} MiB, {folder} has "
            f"{free / 2**20:,.0f} MiB free. Free space, or unpack it elsewhere and point "
            "data.path at that folder."
        )


def _measure(folder: Path) -> dict[str, int]:
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
