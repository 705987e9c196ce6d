"""Defines a raw sample of the data set, and reads the file of a sample.

A problem with a single sample is stored in it as a fault; a folder that cannot be listed raises
DataError. Hidden files are not samples, nor is the folder `__MACOSX` that macOS adds to archives.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slipway.config.sections import DataParams
from slipway.data.engine.rows import ID_DIGITS
from slipway.system import files
from slipway.system.errors import DataError

GIVEN_SPLIT = "slipway_split"  # data.split_column if names of folders or shards give the split
_MACOS = "__MACOSX"
_SIGNATURES = {
    b"\xff\xd8\xff": "a JPEG whose header is damaged",
    b"\x89PNG": "a PNG whose header is damaged",
    b"RIFF": "a WebP whose header is damaged, or a sound file",
    b"II*\0": "a TIFF whose header is damaged",
    b"MM\0*": "a TIFF whose header is damaged",
    b"GIF8": "a GIF whose header is damaged",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x00\x00\x01\x00": "an icon",
    b"8BPS": "a Photoshop file",
}


class Fault(NamedTuple):
    """The rule under which a sample is refused, and a text on the cause."""

    rule: str
    detail: str


class RawSample(NamedTuple):
    """One sample of the data set; a tuple, because millions are sent between processes.

    `source` is unique within the data set: the path inside a folder ("cat/1.png"), or the row
    number of a table, from 0, with the path that the row names, if any ("17:images/1.png").
    """

    source: str
    payload: bytes  # the encoded image; empty after a fault, or if it is still to be read
    label: str | None  # the label, if the target is a class
    target: float | None  # the value, if the target is a number
    group: str | None
    fault: Fault | None
    time: float | None = None  # days since 1970 UTC, or the number that the user orders by
    weight: float | None = None
    given_split: str | None = None
    corrections: tuple[str, ...] = ()  # changes to the annotation, "label: Cat -> cat"
    path: str | None = None  # the file of a payload that is not read yet


def loaded(sample: RawSample) -> RawSample:
    """Return the sample with the bytes of its file, or with a fault if the file cannot be read."""
    if sample.path is None:
        return sample
    payload, fault = read_file(sample.path)
    return sample._replace(payload=payload, fault=sample.fault or fault, path=None)


def image_id(sample: RawSample) -> str | None:
    """Return the row id of an image, the beginning of its SHA-256; None for a faulty sample."""
    return None if sample.fault else files.sha256_bytes(sample.payload)[:ID_DIGITS]


def spelled(label: str, label_map: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Apply `label_map` to a label; return the result, and a text that describes a change."""
    meant = label_map.get(label, label)
    return meant, () if meant == label else (f"label: {label} -> {meant}",)


def is_skipped(name: str) -> bool:
    """Return True for a hidden file or folder, or one that macOS adds; neither is a sample."""
    return name.startswith(".") or name == _MACOS


def is_about_samples(path: str, data: DataParams) -> bool:
    """Return True for the files `data.checksums` and `data.split_file`, which are not samples."""
    return any(
        os.path.basename(path) == os.path.basename(name) and os.path.samefile(path, name)
        for name in (data.checksums, data.split_file)
        if name and os.path.exists(name)
    )


def visible_entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, ordered by name, without hidden entries."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not is_skipped(entry.name)]
    except OSError as error:
        raise DataError(
            f"the folder {str(folder)!r} cannot be listed: {error.strerror}. "
            "Give this user the right to read it."
        ) from error
    return sorted(visible, key=lambda entry: entry.name)


def is_inside(path: Path | str, folder: Path | str) -> bool:
    """Return True if a path is below `folder`, or is DVC's link into its cache."""
    target = Path(path).resolve()
    in_cache = re.search(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$", target.as_posix())
    return in_cache is not None or target.is_relative_to(Path(folder).resolve())


def link_fault(path: Path | str, folder: Path) -> Fault | None:
    """Return the fault of a link that leads out of `folder`; None for any other file."""
    if not os.path.islink(path) or is_inside(path, folder):
        return None
    target = os.path.realpath(path)
    detail = f"it is a link to {target}, which is not below {folder}. Copy the file there"
    return Fault("outside_folder", detail)


def read_file(path: Path | str) -> tuple[bytes, Fault | None]:
    """Return the bytes of a file, or a fault if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            return b"", Fault("unreadable", f"{path} is not a regular file")
        with open(path, "rb", buffering=0) as file:
            return file.readall(), None
    except (FileNotFoundError, NotADirectoryError):
        return b"", Fault("missing_file", f"{path} does not exist{_hint(Path(path))}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return b"", Fault("unreadable", f"{str(path)!r} cannot be read: {error}")


def _hint(path: Path) -> str:
    """Return a hint if the missing file lies one folder deeper than the table says."""
    if path.parent.is_dir():
        for entry in visible_entries(path.parent):
            if entry.is_dir() and Path(entry.path, path.name).exists():
                return (
                    f"; {entry.name}/{path.name} does: write paths relative to the table's folder"
                )
    return ""


def looks_like(payload: bytes) -> str:
    """Return a guess at the type of a file whose bytes are not a readable image."""
    for signature, name in _SIGNATURES.items():
        if payload.startswith(signature):
            return name
    if payload[257:262] == b"ustar":
        return "a tar archive"
    if payload[4:8] == b"ftyp":
        return "a damaged HEIC or AVIF, or a video"
    head = payload[:64]
    if not head.strip(b"\0"):
        return "zero bytes"
    text = head.decode(errors="ignore")
    is_whole = len(text.encode()) >= len(head) - 3  # the last character may be cut
    if is_whole and all(character.isprintable() or character.isspace() for character in text):
        return f"text: {text[:24]!r}"
    return "binary data"
