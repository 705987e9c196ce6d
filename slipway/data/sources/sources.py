"""The raw samples of folders, Parquet files, CSVs and metadata.jsonl, as one kind of record.

A folder with one table at its top, or several Parquet shards of one schema, is read as that table, and its images are what the table
names. Errors that concern the whole (no such path, no such column) are a DataError.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.folders import read_folder, walk_files
from slipway.data.sources.given_splits import split_folders
from slipway.data.sources.image_tables import (
    TablePart,
    count_rows,
    is_metadata,
    is_table_file,
    read_rows,
)
from slipway.data.sources.samples import GIVEN_SPLIT, RawSample, loaded, visible_entries
from slipway.data.sources.shards import (
    check_shard_splits,
    check_shards,
    is_parquet,
    named_split,
    shard_splits,
    table_files,
)
from slipway.system.errors import DataError

_MAX_SHOWN = 3


class Layout(NamedTuple):
    """The layout of a data set on disk, and the split that comes with it."""

    root: Path
    tables: tuple[TablePart, ...] = ()  # in the order of their rows; none for class folders
    folders: Mapping[str, str] = {}  # the split of each split folder at the top
    given: Mapping[
        str, list[str]
    ] = {}  # the folders or shards of each split; empty if the data gives none
    note: str = ""  # for the user: how names that could be splits were read

    def described(self, rows: pa.Table) -> str:
        """Describe for the console which folders or files became which split."""
        if not self.given:
            return f"{self.note}\n" if self.note else ""
        counts = {
            split: int(pc.sum(pc.equal(rows["given_split"], split)).as_py() or 0)
            for split in self.given
        }
        said = ", ".join(
            f"{_shown(names)} -> {split} ({counts[split]} rows)"
            for split, names in self.given.items()
        )
        cut = [split for split in SPLITS if split not in self.given]
        by_time = " by time" if cut == ["val"] and rows["time"].null_count < rows.num_rows else ""
        rest = f"; `split` cuts {' and '.join(cut)} from train{by_time}" if cut else ""
        return f"given split: {said}{rest}. To let Slipway split, set data.split_folders to pool\n"


def _shown(names: list[str]) -> str:
    return " + ".join(names[:_MAX_SHOWN]) + (
        f" + {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    )


def read_samples(
    data: DataParams, wanted: Collection[str] | None = None, read_files: bool = True
) -> Iterator[RawSample]:
    """Every sample of `data.path`, or those whose `source` is in `wanted`, in the order of the data set.

    The order is by name in a folder and by row in a table. Without `read_files`, images that are files of their own come with their
    `path`, for `samples.loaded` in the process that needs them. Raises DataError when the data as a whole cannot be read.
    """
    found = _samples(data, wanted)
    return map(loaded, found) if read_files else found


def _samples(data: DataParams, wanted: Collection[str] | None) -> Iterator[RawSample]:
    layout = find_layout(data)
    sources = None if wanted is None else frozenset(wanted)
    if not layout.tables:
        _check_folder_has_no_columns(data)
        return read_folder(layout.root, sources, data, layout.folders)
    rows = (
        None if sources is None else frozenset(int(source.partition(":")[0]) for source in sources)
    )
    return read_rows(layout.tables, data, rows)


def count_samples(data: DataParams) -> int | None:
    """Count the samples, for a progress bar; None if counting means reading (CSV)."""
    layout = find_layout(data)
    return count_rows(layout.tables) if layout.tables else sum(1 for _ in walk_files(layout.root))


def with_given_split(data: DataParams) -> tuple[DataParams, Layout]:
    """Return `data` with the given split as its split column, if there is one; and the layout."""
    layout = find_layout(data)
    return data.model_copy(update={"split_column": GIVEN_SPLIT}) if layout.given else data, layout


def find_layout(data: DataParams) -> Layout:
    """Return the layout of `data.path`; DataError if it has none."""
    root = existing_path(
        data,
        "a folder with one sub-folder per class, a .csv or .parquet file, or a .zip, .tar or .tar.gz of these",
    )
    if not root.is_dir():
        _check_ending(root, data)
        return Layout(root, (TablePart(root),))
    table = table_in(root)
    layout = _class_folders(root, data) if table is None else _tables(root, table, data)
    is_ignored = data.split_folders != "auto" or data.split_column not in (None, GIVEN_SPLIT)
    return layout._replace(given={}) if is_ignored else layout


def _class_folders(root: Path, data: DataParams) -> Layout:
    folders, note = split_folders(root, data)
    parts = [
        TablePart(path, f"{name}/", split)
        for name, split in sorted(folders.items())
        if (table := table_in(root / name)) is not None
        for path in table_files(table)
    ]
    if not parts and data.task == "image_regression":
        raise DataError(
            f"data.path {data.path!r} is a folder, whose sub-folders are classes, but data.task is 'image_regression'. "
            "Point data.path at a .csv or .parquet file with a column of numbers, or at the one folder that holds it."
        )
    given = {
        split: [f"{name}/" for name, said in folders.items() if said == split] for split in SPLITS
    }
    return Layout(
        root, tuple(parts), folders, {split: names for split, names in given.items() if names}, note
    )


def _tables(root: Path, table: Path, data: DataParams) -> Layout:
    paths = table_files(table)
    splits = shard_splits(paths)
    if splits and data.split_folders == "auto":
        check_shard_splits(paths, splits)
    folders = _folders_of_images(root) if is_metadata(table) else {}
    parts = tuple(TablePart(path, split=splits.get(path), folders=folders) for path in paths)
    said = {path.name: split for path, split in splits.items()} or {
        f"{name}/": split for name, split in folders.items()
    }
    given = {split: [name for name, other in said.items() if other == split] for split in SPLITS}
    return Layout(root, parts, given={split: names for split, names in given.items() if names})


def _folders_of_images(root: Path) -> dict[str, str]:
    """Return the split of each folder beside a metadata file, if at least two splits are named."""
    folders = {
        entry.name: split
        for entry in visible_entries(root)
        if entry.is_dir() and (split := named_split(entry.name))
    }
    return folders if len(set(folders.values())) > 1 else {}


def _check_folder_has_no_columns(data: DataParams) -> None:
    """DataError if the params name columns, which class folders do not have."""
    keys = ("group_column", "time_column", "weight_column", "split_column")
    asked = [
        f"data.{key} is {name!r}"
        for key in keys
        if (name := getattr(data, key)) not in (None, GIVEN_SPLIT)
    ]
    if asked:
        raise DataError(
            f"data.path {data.path!r} is a folder of class folders, which has no columns, but {', '.join(asked)}. "
            "Set them to null, or point data.path at a .csv or .parquet file that names the images."
        )


def _check_ending(root: Path, data: DataParams) -> None:
    if not is_table_file(root.name):
        raise DataError(
            f"data.path {data.path!r} ends in {root.suffix!r}, expected a folder, a .csv or .parquet file, or a .zip, .tar or .tar.gz."
        )


def existing_path(data: DataParams, expected: str) -> Path:
    """Return `data.path`; DataError if it does not exist or is a URL."""
    root = Path(data.path)
    if root.exists():
        return root
    if "://" in data.path:
        raise DataError(
            f"data.path {data.path!r} is an address, expected {expected} on this machine. "
            f"Fetch it with `dvc import-url {data.path} data/NAME`, and point data.path at that; docs/remote_data.md tells more."
        )
    raise DataError(
        f"data.path {data.path!r} does not exist (looked in {Path.cwd()}). Point it at {expected}."
    )


def table_in(folder: Path) -> Path | None:
    """The table at the top of a folder, if there is one; the folder itself if it holds several Parquet shards of one schema.

    The only sub-folder counts as the top if it holds nothing but tables: a clone of a Hugging Face
    data set has its shards in `data/`, beside a README.md.
    DVC watches the images that a table names if they lie in the same folder.
    """
    entries = visible_entries(folder)
    tables = [
        Path(entry.path) for entry in entries if entry.is_file() and is_table_file(entry.name)
    ]
    if not tables:
        inside = [Path(entry.path) for entry in entries if entry.is_dir()]
        return table_in(inside[0]) if len(inside) == 1 and _has_only_tables(inside[0]) else None
    if len(tables) == 1:
        return tables[0]
    if all(is_parquet(table) for table in tables):
        check_shards(tables)
        return folder
    names = ", ".join(table.name for table in tables)
    raise DataError(
        f"data.path {str(folder)!r} holds {len(tables)} tables ({names}), expected one, or Parquet shards of one schema. "
        "Point data.path at the one that is meant."
    )


def _has_only_tables(folder: Path) -> bool:
    entries = visible_entries(folder)
    return bool(entries) and all(entry.is_file() and is_table_file(entry.name) for entry in entries)
