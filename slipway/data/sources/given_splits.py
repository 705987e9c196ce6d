"""Folders whose names say train, val or test: the split that comes with the data.

They count if at least two of them name different splits and hold the same classes, or tables.
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
    """The split folders at the top of `root`; none if its folders are classes.

    Raises DataError with every reason why folders that name splits cannot be read as splits.
    """
    if data.split_folders == "classes":
        return SplitFolders({})
    inside = [Path(entry.path) for entry in visible_entries(root) if entry.is_dir()]
    named = {
        folder: split
        for folder in inside
        if (split := named_split(folder.name)) and _has_files(folder)
    }
    named = dict(sorted(named.items(), key=lambda entry: SPLITS.index(entry[1])))
    if len(set(named.values())) < 2:
        return SplitFolders({})
    tabled = [folder for folder in named if _tables(folder)]
    classes = {folder: _classes(folder, data) for folder in named if folder not in tabled}
    others = [folder.name for folder in inside if folder not in named and _has_files(folder)]
    if not tabled and not _share_a_class(classes.values()):
        if others:
            return SplitFolders({})
        if all(classes.values()):
            return SplitFolders({}, _no_class_shared(list(named)))
    unlabelled = (
        [f"beside them are {listed(others)}, expected folders of splits only"] if others else []
    )
    unlabelled += _label_problems(tabled, classes)
    problems = unlabelled + (
        _split_problems(named, classes, data) if data.split_folders == "auto" else []
    )
    if problems:
        said = ", ".join(f"{folder.name}/ ({split})" for folder, split in named.items())
        raise DataError(
            f"data.path {str(root)!r} has folders that name splits: {said}. They cannot be read as such:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + ("" if unlabelled else _POOL)
            + _CLASSES
        )
    return SplitFolders({folder.name: split for folder, split in named.items()})


def _has_files(folder: Path) -> bool:
    return next(walk_files(folder), None) is not None


def _tables(folder: Path) -> list[str]:
    return [
        entry.name
        for entry in visible_entries(folder)
        if entry.is_file() and is_table_file(entry.name)
    ]


def _classes(folder: Path, data: DataParams) -> set[str]:
    inside = (Path(entry.path) for entry in visible_entries(folder) if entry.is_dir())
    return {spelled(entry.name, data.label_map)[0] for entry in inside if _has_files(entry)}


def _share_a_class(classes: Iterable[set[str]]) -> bool:
    seen: set[str] = set()
    for names in classes:
        if seen & names:
            return True
        seen |= names
    return False


def _no_class_shared(folders: Sequence[Path]) -> str:
    names = listed([f"{folder.name}/" for folder in folders])
    return (
        f"{names} have no class folder in common, so they are read as classes, not as a given split"
    )


def _label_problems(tabled: Sequence[Path], classes: Mapping[Path, set[str]]) -> list[str]:
    problems = []
    labelled = [folder for folder, found in classes.items() if found]
    if tabled and labelled:
        problems.append(
            f"{listed([folder.name for folder in tabled])} has a table ({_tables(tabled[0])[0]}), "
            f"{listed([folder.name for folder in labelled])} has class folders; expected one way for all"
        )
    whole = [*tabled, *labelled]
    for folder in (folder for folder, found in classes.items() if not found):
        first = Path(next(walk_files(folder))).name
        remedy = (
            f"Point data.path at {str(whole[0])!r}, and Slipway cuts val and test from it."
            if len(whole) == 1
            else f"Move {folder.name}/ out of data.path, or sort its images into class folders."
        )
        problems.append(
            f"{folder.name}/ has images ({first}) without class folders and no metadata.csv, so nothing says their classes. {remedy}"
        )
    return problems


def _split_problems(
    named: Mapping[Path, str], classes: Mapping[Path, set[str]], data: DataParams
) -> list[str]:
    problems = []
    for split in SPLITS:
        folders = [folder.name for folder, said in named.items() if said == split]
        if len(folders) > 1:
            problems.append(
                f"{listed(folders)} all say {split}, expected one folder for each split"
            )
        if split == "train" and not folders:
            problems.append("none of them is for training")
    known = set[str]().union(
        *(classes.get(folder, set()) for folder, split in named.items() if split == "train")
    )
    for folder, split in named.items():
        extra = classes.get(folder, set()) - known
        # Classes beyond data.classes are a matter of the rule unknown_label.
        extra &= extra if data.classes is None else set(data.classes)
        if known and split != "train" and extra:
            problems.append(
                f"{folder.name}/ has classes that the training folder lacks: {listed(sorted(extra))}. "
                "Add them there, remove them, or map other spellings with data.label_map"
            )
    return problems
