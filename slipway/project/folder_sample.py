"""Class folders: the rows of each class and split, and some of their files."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipway.data.sources.folders import walk_files
from slipway.data.sources.samples import read_file, visible_entries
from slipway.project.image_sample import MOST_IMAGES
from slipway.system.errors import DataError

_MOST_SECONDS = 12.0
_TEXT_ENDINGS = (".txt", ".md", ".html", ".htm", ".xml", ".json", ".pdf", ".doc", ".docx", ".eml")


class FolderSample(NamedTuple):
    """Counts of class folders; `is_exact` is False if there was no time to list all."""

    classes: Counter[str]
    given: Counter[str]
    files: list[str]  # a sample, one class after the other
    is_exact: bool


def sample_class_folders(
    root: Path, splits: Mapping[str, str], counted: Callable[[Path, int], int]
) -> FolderSample:
    """Count the files of each class; DataError if they are texts.

    Args:
        root: the data set.
        splits: the split of each split folder; empty if class folders are at the top.
        counted: the true number of files in a folder of which some were listed.
    """
    begin, is_exact = time.monotonic(), True
    classes: Counter[str] = Counter()
    given: Counter[str] = Counter()
    files: list[list[str]] = []
    tops = [(root / name, split) for name, split in splits.items()] or [(root, "")]
    places = [(folder, split) for top, split in tops for folder in _subfolders(top)]
    for folder, split in places:
        if time.monotonic() - begin > _MOST_SECONDS:
            is_exact = False
            break
        found = list(walk_files(folder))
        number = counted(folder, len(found))
        if not number:
            continue
        classes[folder.name] += number
        if split:
            given[split] += number
        wanted = max(1, MOST_IMAGES // len(places))
        chosen = np.unique(np.linspace(0, len(found) - 1, min(wanted, len(found))).astype(int))
        files.append([found[place] for place in chosen])
    if not classes:
        raise DataError(
            f"{str(root)!r} has no sub-folders with files, expected one sub-folder per class with "
            "its images, or a table that names them."
        )
    if not is_exact:  # the rest has as many on average
        usual = round(sum(classes.values()) / len(classes))
        classes.update({folder.name: usual for folder, _ in places if folder.name not in classes})
    turns = itertools.chain.from_iterable(itertools.zip_longest(*files))
    sample = [name for name in turns if name is not None]
    texts = [name for name in sample if name.lower().endswith(_TEXT_ENDINGS)]
    if 2 * len(texts) > len(sample):
        raise DataError(
            f"{str(root)!r} holds texts, such as {texts[0]!r}, expected images or a table. "
            "Save the texts and their classes as a .csv, .parquet or .jsonl with two columns."
        )
    return FolderSample(classes, given, sample, is_exact)


def payloads(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of each file that can be read."""
    for name in files:
        payload, fault = read_file(name)
        if not fault:
            yield name, payload


def _subfolders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in visible_entries(folder) if entry.is_dir()]
