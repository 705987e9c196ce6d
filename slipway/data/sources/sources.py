"""Where the raw samples are: a folder of class folders, a Parquet file or a CSV; one record for all three.

A folder with one table at its top is read as that table, and its images are what the table names.
What is wrong with the whole (no such path, no such column) is a DataError.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from slipway.config.sections import DataParams
from slipway.data.sources.folders import read_folder, walk_files
from slipway.data.sources.image_tables import TABLES, count_rows, read_rows
from slipway.data.sources.samples import RawSample, loaded, visible_entries
from slipway.system.errors import DataError


def read_samples(data: DataParams, wanted: Collection[str] | None = None, read_files: bool = True) -> Iterator[RawSample]:
    """Every sample of `data.path`, or those whose `source` is in `wanted`, in the order of the data set.

    The order is by name in a folder and by row in a table. Without `read_files`, images that are files of their own come with their
    `path`, for `samples.loaded` in the process that needs them. Raises DataError when the data as a whole cannot be read.
    """
    found = _samples(data, wanted)
    return map(loaded, found) if read_files else found


def _samples(data: DataParams, wanted: Collection[str] | None) -> Iterator[RawSample]:
    root = _existing(data)
    sources = None if wanted is None else frozenset(wanted)
    if root.is_dir():
        _check_folder_has_no_columns(data)
        return read_folder(root, sources, data.label_map, Path(data.digests) if data.digests else None)
    rows = None if sources is None else frozenset(int(source.partition(":")[0]) for source in sources)
    return read_rows(root, data, rows)


def count_samples(data: DataParams) -> int | None:
    """How many samples there are, for a progress bar; None where counting means reading (CSV)."""
    root = _existing(data)
    if root.is_dir():
        return sum(1 for _ in walk_files(root))
    return count_rows(root)


def _check_folder_has_no_columns(data: DataParams) -> None:
    """A column that is asked for and that nothing can be read from would be without effect."""
    keys = ("group_column", "time_column", "weight_column", "split_column")
    asked = [f"data.{key} is {getattr(data, key)!r}" for key in keys if getattr(data, key) is not None]
    if asked:
        raise DataError(
            f"data.path {data.path!r} is a folder of class folders, which has no columns, but {', '.join(asked)}. "
            "Set them to null, or point data.path at a .csv or .parquet file that names the images."
        )


def _existing(data: DataParams) -> Path:
    root = existing_path(data, "a folder with one sub-folder per class, a .csv or .parquet file, or a .zip, .tar or .tar.gz of these")
    if root.is_dir():
        table = table_in(root)
        if table is not None:
            return table
        if data.task == "image_regression":
            raise DataError(
                f"data.path {data.path!r} is a folder, whose sub-folders are classes, but data.task is 'image_regression'. "
                "Point data.path at a .csv or .parquet file with a column of numbers, or at the one folder that holds it."
            )
        return root
    if root.suffix.lower() not in TABLES:
        raise DataError(
            f"data.path {data.path!r} ends in {root.suffix!r}, expected a folder, a .csv or .parquet file, or a .zip, .tar or .tar.gz."
        )
    return root


def existing_path(data: DataParams, expected: str) -> Path:
    """`data.path`; DataError where there is nothing, or where it is an address, with what was `expected`."""
    root = Path(data.path)
    if root.exists():
        return root
    if "://" in data.path:
        raise DataError(
            f"data.path {data.path!r} is an address, expected {expected} on this machine. "
            f"Fetch it with `dvc import-url {data.path} data/NAME`, and point data.path at that; docs/remote_data.md tells more."
        )
    raise DataError(f"data.path {data.path!r} does not exist (looked in {Path.cwd()}). Point it at {expected}.")


def table_in(folder: Path) -> Path | None:
    """The table at the top of a folder, if there is one: then DVC watches the images that it names, too."""
    tables = [Path(entry.path) for entry in visible_entries(folder) if entry.is_file() and Path(entry.name).suffix.lower() in TABLES]
    if len(tables) > 1:
        names = ", ".join(table.name for table in tables)
        raise DataError(
            f"data.path {str(folder)!r} holds {len(tables)} tables ({names}), expected one. Point data.path at the one that is meant."
        )
    return tables[0] if tables else None
