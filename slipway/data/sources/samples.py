"""One raw sample as it lies in the data set, and how its file is read.

What is wrong with a single sample travels with it as a fault; a folder that cannot be listed is a DataError.
Hidden files are no samples, and neither is the folder `__MACOSX` that macOS adds to archives.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slipway.system.errors import DataError

GIVEN_SPLIT = "slipway_split"  # as data.split_column: the names of folders or shards give the split
_MACOS = "__MACOSX"


class Fault(NamedTuple):
    """The rule under which a sample is refused, and what was found."""

    rule: str
    detail: str


class RawSample(NamedTuple):
    """One sample as it lies in the data set; a tuple, since a million of them go from process to process.

    `source` is the path inside a folder ("cat/1.png"), or the row number of a table, counted from 0, with the
    path that the row names, if any ("17:images/1.png"). It is unique within the data set.
    """

    source: str
    payload: bytes  # the encoded image; empty when a fault kept it from being read, or while it lies in `path`
    label: str | None  # for classes
    target: float | None  # for a number
    group: str | None
    fault: Fault | None
    time: float | None = None  # days since 1970 UTC, or the number that the user orders by
    weight: float | None = None
    given_split: str | None = None
    corrections: tuple[str, ...] = ()  # what was changed on the way, "label: Cat -> cat"
    path: str | None = None  # where the payload lies that is not read yet


def loaded(sample: RawSample) -> RawSample:
    """Return the sample with its payload, or with a fault if it cannot be read."""
    if sample.path is None:
        return sample
    payload, fault = read_file(sample.path)
    return sample._replace(payload=payload, fault=sample.fault or fault, path=None)


def spelled(label: str, label_map: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the label after `label_map`, and the correction if it changed."""
    meant = label_map.get(label, label)
    return meant, () if meant == label else (f"label: {label} -> {meant}",)


def visible_entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            visible = (
                entry
                for entry in entries
                if not entry.name.startswith(".") and entry.name != _MACOS
            )
            return sorted(visible, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"the folder {str(folder)!r} cannot be listed: {error.strerror}. Give this user the right to read it."
        ) from error


def read_file(path: Path | str) -> tuple[bytes, Fault | None]:
    """Return the bytes of a file, or a fault."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            return b"", Fault("unreadable", f"{path} is not a regular file")
        with open(path, "rb", buffering=0) as file:
            return file.readall(), None
    except (FileNotFoundError, NotADirectoryError):
        return b"", Fault("missing_file", f"{path} does not exist{_where_it_is(Path(path))}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return b"", Fault("unreadable", f"{str(path)!r} cannot be read: {error}")


def _where_it_is(path: Path) -> str:
    """Return a hint if the file is one folder deeper than the table says."""
    if not path.parent.is_dir():
        return ""
    deeper = next(
        (
            entry.name
            for entry in visible_entries(path.parent)
            if entry.is_dir() and Path(entry.path, path.name).exists()
        ),
        None,
    )
    return (
        f"; {deeper}/{path.name} does: write paths relative to the table's folder" if deeper else ""
    )
