"""Reads the members of a .zip or .tar, plain or compressed, without trusting their headers.

Archives are read forward, in pieces, so memory does not grow with their size (for a zip, only with
its table of contents). A damaged archive raises DataError. A member that must not be unpacked
carries the reason in `problem`.
"""

import bz2
import contextlib
import gzip
import lzma
import mmap
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slipway.data.sources.samples import looks_like
from slipway.system.errors import DataError

CHUNK_BYTES = 1 << 20
# Most bytes of an extended header of a tar, which tarfile reads at once.
_MOST_HEADER_BYTES = 4 * CHUNK_BYTES
_LOOKS = {
    **dict.fromkeys((".zip", ".xlsx"), "a ZIP archive"),
    ".tar": "a tar archive",
    **dict.fromkeys((".xz", ".txz"), "an xz archive"),
    **dict.fromkeys((".bz2", ".tbz2"), "a bzip2 archive"),
}
_BLOCK = 512  # block size of a tar
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000  # flags of a zip member
_UTF8_NAME = 0x0800  # flag of a zip member; without it zipfile reads its name as cp437
# Of the systems that write archives without UTF-8: DOS, Windows in several languages, Unix.
_NAME_ENCODINGS = ("cp437", "cp1252", "cp932", "gb18030", "big5", "cp949", "cp866", "cp1251")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    NotImplementedError,
    RuntimeError,
)


@dataclass(frozen=True)
class Member:
    """One member of an archive, before its content is read."""

    name: str
    is_folder: bool
    declared_bytes: int
    problem: str | None  # reason not to unpack it, independent of its path
    open: Callable[[], IO[bytes]]
    foreign_name: bytes | None = None  # its name is not UTF-8, and no encoding was given

    @property
    def parts(self) -> list[str]:
        """The parts of its path. A backslash separates folders, too, as in archives of Windows."""
        return [part for part in re.split(r"[/\\]", self.name) if part not in ("", ".")]


def read_members(
    path: Path, max_members: int, max_bytes: int, encoding: str | None = None
) -> Iterator[Member]:
    """Yield the members of the archive `path` in order; read each one before the next is requested.

    `encoding` is that of names that the archive does not declare to be UTF-8. Raises DataError if
    the archive is damaged, has more than `max_members` members, or is a compressed stream of more
    than `max_bytes`.
    """
    is_zip = path.suffix.lower() in (".zip", ".xlsx")
    members = (
        _zip_members(path, max_members, encoding)
        if is_zip
        else _tar_members(path, max_bytes, encoding)
    )
    last = ""
    try:
        for number, member in enumerate(members, start=1):
            if number > max_members:
                raise too_many(path, max_members)
            last = repr(member.name)
            yield member
    except DAMAGE as error:
        raise _damaged(path, last, error) from error


def _damaged(path: Path, last: str, error: Exception) -> DataError:
    """Return the error for a damaged archive; `last` is the member before the damage, or ""."""
    remedy = "Copy or pack it again"
    with path.open("rb") as file:
        head = file.read(_BLOCK)
    looks = looks_like(head) if head else ""
    if not last and looks not in ("", _LOOKS.get(path.suffix.lower(), "a gzip archive")):
        remedy = f"It looks like {looks}: give it the ending of what it is, or pack it again"
    return DataError(
        f"the archive {str(path)!r} is damaged or cut off after {last or 'its beginning'}: "
        f"{error}. {remedy}."
    )


def name_hint(path: Path, raw: bytes) -> str:
    """Say how a name that is not UTF-8 reads in some encodings, and which key chooses one."""
    read = {}
    for encoding in _NAME_ENCODINGS:
        with contextlib.suppress(UnicodeError):
            read[encoding] = raw.decode(encoding)
    likely = {
        encoding: name
        for encoding, name in read.items()
        if all(one.isascii() or one.isalpha() for one in name)
    }
    shown = ", ".join(f"{encoding} ({name!r})" for encoding, name in (likely or read).items())
    return (
        f"{path.name} has names that are not UTF-8. If they look wrong, set data.archive_encoding "
        f"to the encoding in which they read well: {shown}"
    )


def too_many(path: Path, max_members: int) -> DataError:
    return DataError(
        f"the archive {str(path)!r} has more than {max_members} members, which "
        "clean.max_archive_members does not allow. Raise it if you trust the archive."
    )


def _zip_members(path: Path, max_members: int, encoding: str | None) -> Iterator[Member]:
    if _count_members(path, max_members) > max_members:  # before ZipFile creates an object for each
        raise too_many(path, max_members)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():

            def read(info: zipfile.ZipInfo = info) -> IO[bytes]:
                return archive.open(info)

            name, foreign, problem = info.filename, None, None
            if not (name.isascii() or info.flag_bits & _UTF8_NAME):
                name, foreign, problem = _read_name(name, name.encode("cp437"), encoding)
            yield Member(
                name,
                info.filename.endswith(("/", "\\")),
                info.file_size,
                _zip_problem(info) or problem,
                read,
                foreign,
            )


def _read_name(name: str, raw: bytes, encoding: str | None) -> tuple[str, bytes | None, str | None]:
    """Return a name, its bytes if they are of no known encoding, and the reason to refuse it.

    `name` is returned if its bytes cannot be read. Without an `encoding` they may be UTF-8 that is
    not declared, as macOS writes it.
    """
    try:
        return raw.decode(encoding or "utf-8"), None, None
    except UnicodeError:
        if encoding is None:
            return name, raw, None
        return name, None, f"its name is not {encoding}, which data.archive_encoding says"


def _zip_problem(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "a symbolic link"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a device, pipe or socket"
    if info.flag_bits & _ENCRYPTED:
        return "encrypted"
    if info.compress_type not in _METHODS:
        return (
            f"compressed by method {info.compress_type}, "
            "which is none of stored, deflate, bzip2 and lzma"
        )
    return None


def _count_members(path: Path, most: int) -> int:
    """Count the entries of a zip's directory, at most `most` + 1; zipfile trusts its header."""
    if path.stat().st_size < 22:
        raise zipfile.BadZipFile("too short for a zip file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        end = view.rfind(b"PK\x05\x06", max(0, len(view) - 22 - 0xFFFF))
        if end < 0 or end + 22 > len(view):
            raise zipfile.BadZipFile("it is cut off: a zip file ends with its table of contents")
        declared, size = struct.unpack_from("<HI", view, end + 10)
        wraps = 1 << 16  # writers without zip64 let the number of members wrap
        if (
            end >= 76
            and view[end - 20 : end - 16] == b"PK\x06\x07"
            and view[end - 76 : end - 72] == b"PK\x06\x06"
        ):
            end, wraps = end - 76, 1 << 64
            declared, size = struct.unpack_from("<QQ", view, end + 32)
        place, count = end - size, 0
        while place >= 0 and place + 46 <= end and count <= most:
            name, extra, comment = struct.unpack_from("<HHH", view, place + 28)
            place += 46 + name + extra + comment
            count += 1
    if count <= most and (place != end or count % wraps != declared):
        raise zipfile.BadZipFile(f"its table of contents has {count} entries, expected {declared}")
    return count


def _tar_members(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Member]:
    with path.open("rb") as file:
        is_plain = path.suffix.lower() == ".tar"
        stream = file if is_plain else _decompressed(path, file)
        reader = _Forward(stream, path, None if is_plain else max_bytes)
        # TarFile needs only read, seek and tell.
        archive = tarfile.TarFile(
            fileobj=reader,  # type: ignore[arg-type]
            mode="r",
            errorlevel=2,
            encoding="utf-8",
        )
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # keeps every header

            def read(info: tarfile.TarInfo = info) -> IO[bytes]:
                content = archive.extractfile(info)
                assert content is not None
                return content

            name, foreign, problem = info.name, None, None
            if not _is_utf8(name):
                raw = name.encode("utf-8", "surrogateescape")
                name, foreign, problem = _read_name(name, raw, encoding)
            yield Member(
                name,
                info.isdir(),
                info.size,
                _tar_problem(info) or problem,
                read,
                foreign,
            )
        reader.check_end()


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeError:
        return False
    return True


def _decompressed(path: Path, file: Any) -> Any:
    if path.suffix.lower() in (".xz", ".txz"):
        return lzma.LZMAFile(file, "rb", format=lzma.FORMAT_XZ)
    if path.suffix.lower() in (".bz2", ".tbz2"):
        return bz2.BZ2File(file, "rb")
    return gzip.GzipFile(fileobj=file, mode="rb")


def _tar_problem(info: tarfile.TarInfo) -> str | None:
    if info.issym():
        return f"a symbolic link to {info.linkname!r}"
    if info.islnk():
        return f"a hard link to {info.linkname!r}"
    if not (info.isreg() or info.isdir()):
        return "a device, pipe or another special file"
    return None


class _Forward:
    """A file for tarfile, read forward only, in pieces, and for at most `max_bytes` in total."""

    def __init__(self, stream: IO[bytes], path: Path, max_bytes: int | None) -> None:
        self._stream, self._path, self._max_bytes = stream, path, max_bytes
        self._place = 0
        self._last = b""

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self._last = self._stream.read(size)
        self._place += len(self._last)
        if self._max_bytes is not None and self._place > self._max_bytes:
            raise too_large(self._path, self._max_bytes)
        return self._last

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = 0) -> int:
        if whence or place < self._place:
            raise tarfile.ReadError("a header that points backwards")
        if self._max_bytes is None:  # an uncompressed file needs no counting
            self._place = self._stream.seek(place)
        while self._place < place and self.read(min(CHUNK_BYTES, place - self._place)):
            pass
        return self._place

    def check_end(self) -> None:
        """Raise an error unless a block of zeros ends the tar.

        Without this check, tarfile takes a damaged header for the end.
        """
        if self._last != bytes(_BLOCK):
            raise tarfile.ReadError("no end marker")
        while block := self.read(CHUNK_BYTES):
            if block.strip(b"\0"):
                raise tarfile.ReadError("data after its end marker")


def too_large(path: Path, max_bytes: int) -> DataError:
    return DataError(
        f"the archive {str(path)!r} of {path.stat().st_size} bytes unpacks to more than "
        f"{max_bytes} bytes, which clean.max_archive_ratio does not allow. "
        "Raise it if you trust the archive."
    )
