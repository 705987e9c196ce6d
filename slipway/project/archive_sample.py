"""Samples an archive: unpacks some files of each folder, and counts the files of all folders.

The whole archive is unpacked and checked by the stages only.
"""

import time
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from slipway.data.sources.archive_members import CHUNK_BYTES, DAMAGE, Member, read_members
from slipway.data.sources.archives import name_problem
from slipway.data.sources.formats import excel
from slipway.data.sources.image_tables import is_table_file
from slipway.data.sources.samples import is_skipped, visible_entries
from slipway.data.sources.shards import is_parquet
from slipway.system.errors import DataError

_MOST_MEMBERS, _MOST_RATIO = 1_000_000, 200
_MOST_SECONDS = 15.0
_FILES_PER_FOLDER = 40
_MOST_BYTES = 1 << 28
_MOST_TABLE_BYTES = 1 << 27


class ArchiveSample(NamedTuple):
    """The root of the unpacked files, the number of files in each folder below it, and remarks."""

    root: Path
    num_files: Counter[str]  # files by the folder's path relative to `root`; "." for the top
    notes: tuple[str, ...]


def sample_archive(path: Path, folder: Path) -> ArchiveSample:
    """Unpack a sample into the empty `folder`; DataError if the archive is damaged or unsafe."""
    if path.suffix.lower() == excel.ENDING:
        excel.write_sheet(path, folder / "sheet.jsonl", _MOST_RATIO * path.stat().st_size)
        return ArchiveSample(folder, Counter({".": 1}), ())
    num_files, notes = _unpack_some(path, folder)
    entries = visible_entries(folder)
    # The stages do the same.
    root = Path(entries[0].path) if len(entries) == 1 and entries[0].is_dir() else folder
    top = str(root.relative_to(folder))
    below = Counter(
        {
            str(PurePosixPath(place).relative_to(top)): count
            for place, count in num_files.items()
            if PurePosixPath(place).is_relative_to(top)
        }
    )
    return ArchiveSample(root, below, notes)


def _unpack_some(path: Path, folder: Path) -> tuple[Counter[str], tuple[str, ...]]:
    """Unpack all tables and some files of each folder; return the files by folder, and remarks."""
    begin, num_bytes = time.monotonic(), 0
    num_files: Counter[str] = Counter()
    for member in read_members(path, _MOST_MEMBERS, _MOST_RATIO * path.stat().st_size):
        if time.monotonic() - begin > _MOST_SECONDS:
            return num_files, (f"looked at the first {num_files.total():,} files of the archive",)
        inside = PurePosixPath(member.name)
        if member.is_folder or any(map(is_skipped, inside.parts)):
            continue
        if problem := member.problem or name_problem(member.name):
            raise DataError(
                f"the archive {str(path)!r} has {member.name!r}, {problem}. Pack it without it."
            )
        place = str(inside.parent)
        num_files[place] += 1
        is_table = is_table_file(inside.name)
        if is_table or (num_files[place] <= _FILES_PER_FOLDER and num_bytes < _MOST_BYTES):
            num_bytes += _write(member, folder / inside)
    return num_files, ()


def _write(member: Member, target: Path) -> int:
    """Unpack one file and return its size in bytes; a large text table is cut after a line."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        with member.open() as source, target.open("wb") as sink:
            while written < _MOST_TABLE_BYTES and (chunk := source.read(CHUNK_BYTES)):
                written += sink.write(chunk)
            is_cut = written >= _MOST_TABLE_BYTES and bool(source.read(1))
    except DAMAGE as error:
        raise DataError(
            f"{member.name!r} in the archive is damaged: {error}. Pack it again."
        ) from error
    if is_cut and is_parquet(target):
        raise DataError(f"{member.name!r} is too large to inspect: unpack the archive first.")
    if is_cut and is_table_file(target.name):
        with target.open("r+b") as file:
            _drop_last_line(file, written)
    return written


def _drop_last_line(file: IO[bytes], size: int) -> None:
    file.seek(size - CHUNK_BYTES)
    file.truncate(size - CHUNK_BYTES + file.read().rfind(b"\n") + 1)
