"""Reads raw samples from folders, Parquet files, CSVs and metadata.jsonl, as one type of record.

A folder with one table at its top level, or with Parquet or CSV shards of the same columns, is read
as that table, whose rows name the images. A problem of the data set as a whole, such as a missing
path or column, raises DataError.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from os import DirEntry
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.archives import content_of
from slipway.data.sources.folders import read_folder, skipped_files, walk_files
from slipway.data.sources.given_splits import split_folders
from slipway.data.sources.image_tables import (
    TABLE_ENDINGS,
    TablePart,
    count_rows,
    is_metadata,
    is_table_file,
    read_rows,
    special_columns,
)
from slipway.data.sources.joined import source_names
from slipway.data.sources.raw_tables import shard_note
from slipway.data.sources.samples import (
    GIVEN_SPLIT,
    RawSample,
    image_id,
    is_about_samples,
    loaded,
    visible_entries,
)
from slipway.data.sources.shards import (
    check_shard_splits,
    check_shards,
    is_csv,
    is_parquet,
    listed,
    named_split,
    shard_splits,
    table_files,
)
from slipway.data.sources.text_format import TextFormat
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError

_MAX_SHOWN = 3


class Layout(NamedTuple):
    """The layout of a data set on disk, and the split that comes with the data set."""

    root: Path
    tables: tuple[TablePart, ...] = ()  # tables in the order of their rows; none for class folders
    folders: Mapping[str, str] = {}  # the split of each split folder at the top
    given: Mapping[str, list[str]] = {}  # folders or shards of each split; empty without a split
    joined: Mapping[str, "Layout"] = {}  # the folders of classes that are joined, by name
    note: str = ""  # tells the user why names that could be splits are not read as such

    def class_roots(self) -> list[Path]:
        """Return the folders with one sub-folder per class: `root`, or one per joined source."""
        return [layout.root for layout in self.joined.values()] or [self.root]

    def described(self, rows: pa.Table, written: TextFormat) -> str:
        """Return lines for the console: how types that differ are read, and what forms a split."""
        notes = "".join(f"{note}\n" for note in self.type_notes(written))
        if not self.given:
            return notes + (f"{self.note}\n" if self.note else "")
        found = []
        for split, names in self.given.items():
            num_rows = pc.sum(pc.equal(rows["given_split"], split)).as_py() or 0
            found.append(f"{_shown(names)} -> {split} ({num_rows} rows)")
        rest = ""
        if "train" in self.given and ("val" in self.given) != ("test" in self.given):
            by_time = rows["time"].null_count < rows.num_rows
            rest = f"; `split` cuts val from train{' by time' if by_time else ''}"
            if "val" in self.given:
                rest = f"; this val is test{rest}"
        return (
            f"{notes}given split: {', '.join(found)}{rest}. "
            "To let Slipway split, set data.split_folders to pool\n"
        )

    def type_notes(self, written: TextFormat) -> list[str]:
        """Say for each folder of shards which columns differ in type, and how they are read."""
        folders: dict[Path, list[Path]] = {}
        for part in self.tables:
            folders.setdefault(part.path.parent, []).append(part.path)
        return [note for paths in folders.values() if (note := shard_note(paths, written))]


def _shown(names: list[str]) -> str:
    shown = " + ".join(names[:_MAX_SHOWN])
    num_others = len(names) - _MAX_SHOWN
    return f"{shown} + {num_others} more" if num_others > 0 else shown


def read_samples(
    data: DataParams, wanted: Collection[str] | None = None, read_files: bool = True
) -> Iterator[RawSample]:
    """Yield every sample of `data.path`, or those whose `source` is in `wanted`.

    The order is by name in a folder and by row in a table. Without `read_files`, an image in a file
    of its own comes with its `path`, for `samples.loaded` in the process that needs it. Raises
    DataError if the data as a whole cannot be read.
    """
    found = _samples(data, wanted)
    return map(loaded, found) if read_files else found


def _samples(data: DataParams, wanted: Collection[str] | None) -> Iterator[RawSample]:
    layout = find_layout(data)
    sources = None if wanted is None else frozenset(wanted)
    if layout.joined:
        _check_folder_has_no_columns(data)
        return _joined_folders(layout.joined, sources, data)
    if not layout.tables:
        _check_folder_has_no_columns(data)
        return read_folder(layout.root, sources, data, layout.folders)
    rows = None
    if sources is not None:
        rows = frozenset(int(source.partition(":")[0]) for source in sources)
    return read_rows(layout.tables, data, rows)


def _joined_folders(
    layouts: Mapping[str, Layout], wanted: frozenset[str] | None, data: DataParams
) -> Iterator[RawSample]:
    for name, layout in layouts.items():
        begin, inside = f"{name}/", None
        if wanted is not None:
            inside = frozenset(
                source.removeprefix(begin) for source in wanted if source.startswith(begin)
            )
        for sample in read_folder(layout.root, inside, data, layout.folders):
            yield sample._replace(source=begin + sample.source)


def raw_images(
    data: DataParams, contract: ImageContract, wanted: set[str]
) -> Iterator[tuple[str, str | None, bytes]]:
    """Yield the source, id and bytes of each wanted image; the id is None if it is unreadable."""
    for sample in read_samples(data, wanted):
        yield sample.source, image_id(sample), sample.payload


def count_samples(data: DataParams) -> int | None:
    """Return the number of samples for a progress bar; None if that requires reading a CSV file."""
    layout = find_layout(data)
    if layout.tables:
        return count_rows(layout.tables)
    return sum(1 for root in layout.class_roots() for _ in walk_files(root))


def skipped_text(data: DataParams) -> str:
    """Return a line for the console with the number of hidden files in class folders; "" if 0."""
    layout = find_layout(data)
    roots = [] if layout.tables else layout.class_roots()
    names = [os.path.relpath(path, root) for root in roots for path in skipped_files(root)]
    if len(names) == 1:
        return f"\nskipped: 1 hidden file ({names[0]})"
    return f"\nskipped: {len(names)} hidden files ({names[0]}, ...)" if names else ""


def with_given_split(data: DataParams) -> tuple[DataParams, Layout]:
    """Return `data` with the split column that the layout gives, if any, and the layout."""
    layout = find_layout(data)
    return data.model_copy(update={"split_column": GIVEN_SPLIT}) if layout.given else data, layout


def find_layout(data: DataParams) -> Layout:
    """Return the layout of the data set at `data.path`. Raises DataError if there is none."""
    if data.sources is not None:
        return _join(data)
    root = existing_path(
        data,
        f"a folder with one sub-folder per class, {TABLE_ENDINGS}, "
        "or a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz of these",
    )
    if root.suffix.lower() in kind_of(data.task).input.endings:
        return Layout(root)
    if not root.is_dir():
        _check_ending(root, data)
        return Layout(root, (TablePart(root),))
    table = table_in(root, data)
    layout = _class_folders(root, data) if table is None else _tables(root, table, data)
    is_ignored = (
        data.split_folders != "auto"
        or data.split_column not in (None, GIVEN_SPLIT)
        or data.split_file is not None
    )
    return layout._replace(given={}) if is_ignored else layout


def each_source(data: DataParams) -> dict[str, DataParams]:
    """Return separate params for every entry of `data.sources`, by name.

    Archives among the entries must have been unpacked.
    """
    return {
        name: data.model_copy(
            update={"path": str(content_of(Path(data.path, name), data)), "sources": None}
        )
        for name in source_names(data)
    }


def _join(data: DataParams) -> Layout:
    layouts = {name: find_layout(source) for name, source in each_source(data).items()}
    tables = [name for name, layout in layouts.items() if layout.tables]
    if tables and len(tables) < len(layouts):
        folder = next(name for name in layouts if name not in tables)
        raise DataError(
            f"data.sources joins sources of different kinds: {tables[0]} is a table, {folder} a "
            "folder of classes. Expected one kind for all."
        )
    if split := [name for name, layout in layouts.items() if layout.given]:
        raise DataError(
            f"data.sources names {listed(split)}, which has folders or files of its own for train, "
            "val and test. Set data.split_folders to pool, and Slipway splits all rows; "
            "or name the split of each row in data.split_column."
        )
    if not tables:
        return Layout(Path(data.path), joined=layouts)
    parts = [
        part._replace(origin=name, split=None)
        for name, layout in layouts.items()
        for part in layout.tables
    ]
    return Layout(Path(data.path), tuple(parts))


def _class_folders(root: Path, data: DataParams) -> Layout:
    folders, note = split_folders(root, data)
    tables = {name: table_in(root / name, data) for name in sorted(folders)}
    parts = [
        TablePart(path, f"{name}/", folders[name])
        for name, table in tables.items()
        if table is not None
        for path in table_files(table)
    ]
    if not parts and not kind_of(data.task).target.has_classes:
        raise DataError(
            f"data.path {data.path!r} is a folder, whose sub-folders are classes, but data.task is "
            f"{data.task!r}. Point data.path at a .csv or .parquet file with a column of "
            "numbers, or at the one folder that holds it."
        )
    given = _by_split({f"{name}/": split for name, split in folders.items()})
    return Layout(root, tuple(parts), folders, given, note=note)


def _tables(root: Path, table: Path, data: DataParams) -> Layout:
    paths = table_files(table)
    splits = shard_splits(paths)
    if splits and data.split_folders == "auto":
        check_shard_splits(paths, splits)
    folders = _folders_of_images(root) if is_metadata(table) else {}
    parts = tuple(TablePart(path, split=splits.get(path), folders=folders) for path in paths)
    shards = {path.name: split for path, split in splits.items()}
    return Layout(
        root,
        parts,
        given=_by_split(shards or {f"{name}/": split for name, split in folders.items()}),
    )


def _by_split(splits: Mapping[str, str]) -> dict[str, list[str]]:
    names = {split: [name for name in splits if splits[name] == split] for split in SPLITS}
    return {split: found for split, found in names.items() if found}


def _folders_of_images(root: Path) -> dict[str, str]:
    """Return the split of each folder that holds a metadata file.

    The result is empty unless at least two splits are named.
    """
    names = [entry.name for entry in visible_entries(root) if entry.is_dir()]
    splits = {name: named_split(name) for name in names}
    named = {name: split for name, split in splits.items() if split}
    return named if len(set(named.values())) > 1 else {}


def _check_folder_has_no_columns(data: DataParams) -> None:
    if kind_of(data.task).target.several:
        raise DataError(
            f"data.path {data.path!r} is a folder of class folders, which gives each image one "
            f"label, but data.task is {data.task!r}. Point data.path at a table that names the "
            "images and their labels, or a folder with a metadata.csv or metadata.jsonl."
        )
    columns = {
        key: name
        for key, name in special_columns(data).items()
        if not key.startswith("target_column")
    }
    named = [f"data.{key} is {name!r}" for key, name in columns.items() if name != GIVEN_SPLIT]
    if named:
        raise DataError(
            f"data.path {data.path!r} is a folder of class folders, which has no columns, but "
            f"{', '.join(named)}. Set them to null, or point data.path at a .csv or .parquet file "
            "that names the images."
        )


def _check_ending(root: Path, data: DataParams) -> None:
    if not is_table_file(root.name):
        raise DataError(
            f"data.path {data.path!r} ends in {root.suffix!r}, expected a folder, "
            f"{TABLE_ENDINGS}, or a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz."
        )


def existing_path(data: DataParams, expected: str) -> Path:
    """Return `data.path`. Raises DataError if it does not exist or is a URL."""
    root = Path(data.path)
    if root.exists():
        return root
    if "://" in data.path:
        raise DataError(
            f"data.path {data.path!r} is an address, expected {expected} on this machine. "
            f"Fetch it with `dvc import-url {data.path} data/NAME`, and point data.path at that; "
            "see docs/how-to/remote_data.md."
        )
    several = ""
    if "*" in root.name:
        several = (
            f" For all files of that name, set data.path to {str(root.parent)!r} and data.sources "
            f"to [{root.name!r}]."
        )
    raise DataError(
        f"data.path {data.path!r} does not exist (looked in {Path.cwd()}). Point it at {expected}."
        f"{several}"
    )


def table_in(folder: Path, data: DataParams) -> Path | None:
    """Return the table at the top of a folder; None if there is none.

    The file `data.split_file` is ignored. Several Parquet or CSV files of the same columns are one
    table, for which the folder itself is returned. Without a table at the top, the only sub-folder
    is searched if it holds nothing but tables: a clone of a Hugging Face data set has its shards in
    `data/`, beside a README.md.
    """
    entries = [entry for entry in visible_entries(folder) if not is_about_samples(entry.path, data)]
    tables = [Path(entry.path) for entry in entries if _is_table(entry)]
    if not tables:
        inside = [Path(entry.path) for entry in entries if entry.is_dir()]
        return (
            table_in(inside[0], data) if len(inside) == 1 and _has_only_tables(inside[0]) else None
        )
    if len(tables) == 1:
        return tables[0]
    if all(map(is_parquet, tables)) or all(map(is_csv, tables)):
        if others := set(table_files(folder)) - set(tables):
            raise DataError(
                f"{str(min(others))!r} lies among the {len(tables)} files of the table, expected "
                "only these there. Move it out of the folder."
            )
        check_shards(tables, data.encoding)
        return folder
    names = ", ".join(table.name for table in tables)
    raise DataError(
        f"data.path {str(folder)!r} holds {len(tables)} tables ({names}), expected one, "
        "or several .parquet or .csv files of the same columns. Point data.path at the one that is "
        "meant, or list those to be joined in data.sources."
    )


def _has_only_tables(folder: Path) -> bool:
    entries = visible_entries(folder)
    return bool(entries) and all(map(_is_table, entries))


def _is_table(entry: DirEntry[str]) -> bool:
    return entry.is_file() and is_table_file(entry.name)
