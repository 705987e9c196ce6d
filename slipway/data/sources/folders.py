"""Reads raw samples from class folders: a folder's name is the label of every file below it.

Class folders may lie in split folders, whose names give the split.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipway.config.sections import DataParams
from slipway.data.sources.samples import (
    GIVEN_SPLIT,
    Fault,
    RawSample,
    is_about_samples,
    is_inside,
    is_skipped,
    link_fault,
    spelled,
    visible_entries,
)
from slipway.system.errors import DataError


def read_folder(
    root: Path,
    wanted: frozenset[str] | None,
    data: DataParams,
    splits: Mapping[str, str],
) -> Iterator[RawSample]:
    """Yield a sample, without its payload, for every file below `root`, ordered by name.

    The files `data.checksums` and `data.split_file` are not samples.

    Args:
        root: the data set.
        wanted: sources, or None for all.
        data: the params.
        splits: the split of each split folder; empty if class folders are at the top.
    """
    _check_folder(root)
    begin = len(os.path.join(root, ""))
    for path in walk_files(root, root):
        source = path[begin:]
        if not source.isascii():  # tables hold text: escape what is not UTF-8
            source = os.fsencode(source).decode(errors="backslashreplace")
        if (wanted is None or source in wanted) and not is_about_samples(path, data):
            yield _sample(root, source, path, data, splits)


def _sample(
    root: Path, source: str, path: str, data: DataParams, splits: Mapping[str, str]
) -> RawSample:
    top, _, rest = source.partition("/")
    folder = top
    if splits and rest:
        folder, _, rest = rest.partition("/")
    if not rest:
        kind = "split" if splits and "/" not in source else "class"
        detail = f"{source} lies beside the {kind} folders, expected inside one of them"
        return RawSample(source, b"", None, None, None, Fault("missing_label", detail))
    if fault := link_fault(path, root):
        return RawSample(source, b"", None, None, None, fault)
    label, corrections = spelled(folder, data.label_map)
    given = splits.get(top) if data.split_column == GIVEN_SPLIT else None
    return RawSample(
        source, b"", label, None, None, None, given_split=given, corrections=corrections, path=path
    )


def _check_folder(root: Path) -> None:
    entries = visible_entries(root)
    if not entries:
        raise DataError(
            f"data.path {str(root)!r} is an empty folder, "
            "expected one sub-folder per class with its files."
        )
    names = ", ".join(entry.name for entry in entries[:3])
    if not any(entry.is_dir() for entry in entries):
        more = ", ..." if len(entries) > 3 else ""
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} files ({names}{more}) and no sub-folder, "
            "expected one sub-folder per class. Sort the files into folders, "
            "or point data.path at one .csv or .parquet file."
        )
    if next(walk_files(root), None) is None:
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} sub-folders ({names}) without any file, "
            "expected files in them."
        )


def walk_files(folder: Path | str, root: Path | None = None) -> Iterator[str]:
    """Yield every file below `folder`, ordered by name.

    Raises DataError if a linked folder lies outside `root`.
    """
    for entry in visible_entries(folder):
        if not entry.is_dir():
            yield entry.path
            continue
        if entry.is_symlink() and is_inside(folder, entry.path):
            raise DataError(
                f"the link {entry.path!r} leads back to a folder above it, "
                "expected every folder once. Remove the link."
            )
        if root and entry.is_symlink() and not is_inside(entry.path, root):
            raise DataError(
                f"the link {entry.path!r} leads to {os.path.realpath(entry.path)!r}, which is not "
                f"below {str(root)!r}. Copy the folder there in place of the link."
            )
        yield from walk_files(entry.path, root)


def skipped_files(folder: Path) -> list[str]:
    """List the files below `folder` that are no samples: hidden ones and those added by macOS."""
    return [
        os.path.join(inside, name)
        for inside, _, names in os.walk(folder)
        for name in sorted(names)
        if is_skipped(name) or any(map(is_skipped, Path(inside).relative_to(folder).parts))
    ]
