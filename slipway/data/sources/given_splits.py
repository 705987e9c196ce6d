"""Finds a split that is given by folders named train, val or test.

The folders are used if at least two of them name different splits, and all hold the same classes,
or all hold tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.folders import walk_files
from slipway.data.sources.image_tables import is_table_file
from slipway.data.sources.samples import spelled, visible_entries
from slipway.data.sources.shards import listed, named_split
from slipway.system.errors import DataError

_POOL = "Set data.split_folders to pool to let Slipway split the rows of all these folders. "
_CLASSES = "If the names of these folders are classes, set data.split_folders to classes."


class SplitFolders(NamedTuple):
    """The split of each folder by name; `note` says why folders are read as classes instead."""

    splits: dict[str, str]
    note: str = ""


def split_folders(root: Path, data: DataParams) -> SplitFolders:
    """Return the split folders at the top of `root`, or none if its folders are classes.

    Raises DataError, with every reason, if folders that name splits cannot be read as splits.
    """
    if data.split_folders == "classes":
        return SplitFolders({})
    folders = _subfolders(root)
    named = _named_splits(folders)
    if len(set(named.values())) < 2:
        return SplitFolders({})

    others = [folder.name for folder in folders if folder not in named and _has_files(folder)]
    tabled = [folder for folder in named if _tables(folder)]
    classes = {folder: _classes(folder, data) for folder in named if folder not in tabled}
    if not tabled and not _share_a_class(classes.values()):
        if others:
            return SplitFolders({})
        if all(classes.values()):
            return SplitFolders({}, _no_class_shared(list(named)))
    _check_splits(root, data, named, others, tabled, classes)
    return SplitFolders({folder.name: split for folder, split in named.items()})


def _subfolders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in visible_entries(folder) if entry.is_dir()]


def _named_splits(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the folders that hold files and are named after splits, in the order of SPLITS."""
    splits = {folder: named_split(folder.name) for folder in folders}
    named = {folder: split for folder, split in splits.items() if split and _has_files(folder)}
    return dict(sorted(named.items(), key=lambda entry: SPLITS.index(entry[1])))


def _has_files(folder: Path) -> bool:
    return next(walk_files(folder), None) is not None


def _tables(folder: Path) -> list[str]:
    files = (entry.name for entry in visible_entries(folder) if entry.is_file())
    return [name for name in files if is_table_file(name)]


def _classes(folder: Path, data: DataParams) -> set[str]:
    inside = _subfolders(folder)
    return {spelled(entry.name, data.label_map)[0] for entry in inside if _has_files(entry)}


def _share_a_class(classes: Iterable[set[str]]) -> bool:
    names = [name for found in classes for name in found]
    return len(set(names)) < len(names)


def _no_class_shared(folders: Sequence[Path]) -> str:
    names = listed([f"{folder.name}/" for folder in folders])
    return (
        f"{names} have no class folder in common, so they are read as classes, not as a given split"
    )


def _check_splits(
    root: Path,
    data: DataParams,
    named: Mapping[Path, str],
    others: Sequence[str],
    tabled: Sequence[Path],
    classes: Mapping[Path, set[str]],
) -> None:
    problems = _label_problems(others, tabled, classes)
    remedy = _CLASSES if problems else _POOL + _CLASSES
    if data.split_folders == "auto":
        problems += _split_problems(named, classes, data)
    if problems:
        found = ", ".join(f"{folder.name}/ ({split})" for folder, split in named.items())
        raise DataError(
            f"data.path {str(root)!r} has folders that name splits: {found}. "
            "They cannot be read as such:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + remedy
        )


def _label_problems(
    others: Sequence[str], tabled: Sequence[Path], classes: Mapping[Path, set[str]]
) -> list[str]:
    problems = []
    if others:
        problems.append(f"beside them are {listed(others)}, expected folders of splits only")
    labelled = [folder for folder, found in classes.items() if found]
    if tabled and labelled:
        problems.append(
            f"{listed([folder.name for folder in tabled])} has a table ({_tables(tabled[0])[0]}), "
            f"{listed([folder.name for folder in labelled])} has class folders; "
            "expected one way for all"
        )
    complete = [*tabled, *labelled]
    for folder in (folder for folder, found in classes.items() if not found):
        first = Path(next(walk_files(folder))).name
        remedy = f"Move {folder.name}/ out of data.path, or sort its files into class folders."
        if len(complete) == 1:
            remedy = (
                f"Point data.path at {str(complete[0])!r}, and Slipway cuts val and test from it."
            )
        problems.append(
            f"{folder.name}/ has files ({first}) without class folders and no metadata.csv, "
            f"so their classes are unknown. {remedy}"
        )
    return problems


def _split_problems(
    named: Mapping[Path, str], classes: Mapping[Path, set[str]], data: DataParams
) -> list[str]:
    problems = []
    for split in SPLITS:
        folders = [folder.name for folder, name in named.items() if name == split]
        if len(folders) > 1:
            problems.append(
                f"{listed(folders)} are all for {split}, expected one folder for each split"
            )
    training = [folder for folder, split in named.items() if split == "train"]
    if not training:
        problems.append("none of them is for training")
    known = {name for folder in training for name in classes.get(folder, ())}
    for folder, split in named.items():
        extra = classes.get(folder, set()) - known
        if data.classes is not None:  # the rule unknown_label handles classes beyond these
            extra &= set(data.classes)
        if known and split != "train" and extra:
            problems.append(
                f"{folder.name}/ has classes that the training folder lacks: "
                f"{listed(sorted(extra))}. "
                "Add them there, remove them, or map other spellings with data.label_map"
            )
    return problems
