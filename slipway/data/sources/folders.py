"""Raw samples from a folder with one sub-folder per class: its name is the label of all that is below it.

Class folders may lie in split folders, whose names are the given split.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipway.config.sections import DataParams
from slipway.data.sources.samples import GIVEN_SPLIT, Fault, RawSample, spelled, visible_entries
from slipway.system.errors import DataError


def read_folder(
    root: Path,
    wanted: frozenset[str] | None,
    data: DataParams,
    splits: Mapping[str, str],
) -> Iterator[RawSample]:
    """Every image below `root`, or those whose `source` is in `wanted`, by name; the payloads are not read yet.

    `splits` has the split of each split folder at the top; empty if the class folders lie there. The file `data.checksums` is no sample.
    """
    _check_folder(root)
    begin = len(os.path.join(root, ""))
    beside = Path(data.checksums) if data.checksums else None
    for path in walk_files(root):
        # A name that is not UTF-8 is written with escapes: tables hold text.
        source = (
            path[begin:]
            if path.isascii()
            else os.fsencode(path[begin:]).decode(errors="backslashreplace")
        )
        if (wanted is not None and source not in wanted) or _is_same(path, beside):
            continue
        yield _sample(source, path, data, splits)


def _is_same(path: str, other: Path | None) -> bool:
    return (
        other is not None
        and os.path.basename(path) == other.name
        and Path(path).resolve() == other.resolve()
    )


def _sample(source: str, path: str, data: DataParams, splits: Mapping[str, str]) -> RawSample:
    top, _, rest = source.partition("/")
    found, _, rest = rest.partition("/") if rest and splits else (top, "", rest)
    if not rest:
        fault = Fault("missing_label", _beside(source, splits))
        return RawSample(source, b"", None, None, None, fault)
    label, corrections = spelled(found, data.label_map)
    given = splits.get(top) if data.split_column == GIVEN_SPLIT else None
    return RawSample(
        source, b"", label, None, None, None, given_split=given, corrections=corrections, path=path
    )


def _beside(source: str, splits: Mapping[str, str]) -> str:
    kind = "split" if splits and "/" not in source else "class"
    return f"{source} lies beside the {kind} folders, expected inside one of them"


def _check_folder(root: Path) -> None:
    entries = visible_entries(root)
    if not entries:
        raise DataError(
            f"data.path {str(root)!r} is an empty folder, expected one sub-folder per class with its images."
        )
    if not any(entry.is_dir() for entry in entries):
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} files ({names}{', ...' * (len(entries) > 3)}) and no sub-folder, "
            "expected one sub-folder per class. Sort the images into folders, or point data.path at one .csv or .parquet file."
        )
    if next(walk_files(root), None) is None:
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} sub-folders ({names}) without any file, expected images in them."
        )


def walk_files(folder: Path | str) -> Iterator[str]:
    """Yield every file below `folder`, by name."""
    for entry in visible_entries(folder):
        if entry.is_dir():
            if entry.is_symlink() and Path(folder).resolve().is_relative_to(
                Path(entry.path).resolve()
            ):
                raise DataError(
                    f"the link {entry.path!r} leads back to a folder above it, expected every folder once. Remove the link."
                )
            yield from walk_files(entry.path)
        else:
            yield entry.path
