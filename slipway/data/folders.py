"""Raw samples from a folder with one sub-folder per class: its name is the label of all that is below it."""

import os
from collections.abc import Iterator
from pathlib import Path

from slipway.data.samples import Fault, RawSample, read_file, visible_entries
from slipway.errors import DataError


def read_folder(root: Path, wanted: frozenset[str] | None) -> Iterator[RawSample]:
    """Every image below `root`, or those whose `source` is in `wanted`, by name."""
    _check_folder(root)
    for path in walk_files(root):
        # A name that is not UTF-8 is written with escapes: tables hold text.
        source = os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace")
        if wanted is not None and source not in wanted:
            continue
        label, _, rest = source.partition("/")
        if not rest:
            beside = Fault("missing_label", f"{source} lies beside the class folders, expected inside one of them")
            yield RawSample(source, b"", None, None, None, beside)
            continue
        payload, fault = read_file(path)
        yield RawSample(source, payload, label, None, None, fault)


def _check_folder(root: Path) -> None:
    entries = visible_entries(root)
    if not entries:
        raise DataError(f"data.path {str(root)!r} is an empty folder, expected one sub-folder per class with its images.")
    if not any(entry.is_dir() for entry in entries):
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} files ({names}{', ...' * (len(entries) > 3)}) and no sub-folder, "
            "expected one sub-folder per class. Sort the images into folders, or point data.path at one .csv or .parquet file."
        )
    if next(walk_files(root), None) is None:
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(f"data.path {str(root)!r} has {len(entries)} sub-folders ({names}) without any file, expected images in them.")


def walk_files(folder: Path | str) -> Iterator[Path]:
    """Every file below `folder`, by name."""
    for entry in visible_entries(folder):
        if entry.is_dir():
            if entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry.path).resolve()):
                raise DataError(f"the link {entry.path!r} leads back to a folder above it, expected every folder once. Remove the link.")
            yield from walk_files(entry.path)
        else:
            yield Path(entry.path)
