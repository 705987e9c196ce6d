"""Samples class folders: counts the rows of each class and split, and lists some files."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from slipway.data.sources.folders import walk_files
from slipway.data.sources.raw_tables import RawTable, stored_column
from slipway.data.sources.samples import read_file, visible_entries
from slipway.data.sources.text_folders import read_text_file
from slipway.project.image_sample import MOST_IMAGES
from slipway.project.table_sample import encoding_of
from slipway.system.errors import DataError

_MOST_SECONDS = 12.0
_TEXT_ENDINGS = (".txt", ".md", ".html", ".htm", ".xml", ".json", ".eml")
_DOCUMENTS = (".pdf", ".doc", ".docx", ".odt", ".rtf")
IMAGE_NAME = re.compile(r"\.(jpe?g|png|bmp|gif|webp|tiff?|hei[cf]|avif)$", re.IGNORECASE)
_START_BYTES = 1 << 12
_USUAL_COLUMN = "text"


class FolderSample(NamedTuple):
    """Row counts of class folders; `is_exact` is False if there was no time to list all files."""

    classes: Counter[str]
    given: Counter[str]
    files: list[str]  # a sample, one class after the other
    is_exact: bool
    holds_texts: bool
    empty: list[str]  # names of folders without a file


def sample_class_folders(
    root: Path, splits: Mapping[str, str], counted: Callable[[Path, int], int]
) -> FolderSample:
    """Count the files of each class; raises DataError if they are documents such as PDF.

    Args:
        root: the data set.
        splits: the split of each split folder; empty if class folders are at the top.
        counted: the true number of files in a folder of which some were listed.
    """
    begin, is_exact = time.monotonic(), True
    classes: Counter[str] = Counter()
    given: Counter[str] = Counter()
    files: list[list[str]] = []
    empty: list[str] = []
    tops = [(root / name, split) for name, split in splits.items()] or [(root, "")]
    places = [
        (Path(entry.path), split)
        for top, split in tops
        for entry in visible_entries(top)
        if entry.is_dir()
    ]
    for folder, split in places:
        if time.monotonic() - begin > _MOST_SECONDS:
            is_exact = False
            break
        found = list(walk_files(folder))
        number = counted(folder, len(found))
        if not number:
            empty.append(folder.name)
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
            "its images or texts, or a table that names them."
        )
    if not is_exact:  # the rest has as many on average
        usual = round(sum(classes.values()) / len(classes))
        classes.update({folder.name: usual for folder, _ in places if folder.name not in classes})
    turns = itertools.chain.from_iterable(itertools.zip_longest(*files))
    sample = [name for name in turns if name is not None]
    documents = [name for name in sample if name.lower().endswith(_DOCUMENTS)]
    if 2 * len(documents) > len(sample):
        raise DataError(
            f"{str(root)!r} holds documents, such as {documents[0]!r}, expected images, texts or a "
            "table. Save the text of each as a .txt in its place, for example with pdftotext."
        )
    holds_texts = 2 * sum(map(_is_text, sample)) > len(sample)
    return FolderSample(classes, given, sample, is_exact, holds_texts, empty)


def _is_text(path: str) -> bool:
    """Return True for a text file: by its name if that is clear, else if it has no NUL bytes."""
    if path.lower().endswith(_TEXT_ENDINGS):
        return True
    if IMAGE_NAME.search(path):
        return False
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(_START_BYTES)
    except OSError:
        return False


def sample_texts(files: Sequence[str]) -> tuple[RawTable, str]:
    """Read text files as a table with one column; return it with their most likely encoding."""
    foreign = [payload for _, payload in payloads(files) if encoding_of(payload) != "utf-8"]
    # All of them together: one short text could be of several encodings.
    encoding = encoding_of(b"\n".join(foreign)) if 2 * len(foreign) > len(files) else "utf-8"
    read = [read_text_file(path, encoding) for path in files]
    texts = pa.array([text for text, fault in read if not fault], pa.string())
    column = stored_column(_USUAL_COLUMN, pa.chunked_array([texts]))
    return RawTable({_USUAL_COLUMN: column}, np.arange(len(texts)), []), encoding


def payloads(files: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of each file; skip files that cannot be read."""
    for name in files:
        payload, fault = read_file(name)
        if not fault:
            yield name, payload
