"""Raw samples, one after another, from a folder of class folders, a Parquet file or a CSV: one record for all three.

A file is read by batches, so memory does not grow with the data. What is wrong with a single sample travels
with it as a fault; what is wrong with the whole (no such path, no such column) is a DataError. Hidden files are no samples.
"""

import csv
import difflib
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.contract import Task
from slipway.errors import DataError
from slipway.params import DataParams

_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20
_PARQUET = (".parquet", ".pq")


class Fault(NamedTuple):
    """Why a sample is refused: the name of the rule, and what was found."""

    rule: str
    detail: str


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in the data set.

    `source` is the path inside a folder ("cat/1.png"), or the row number of a table, counted from 0, with the
    path that the row names, if any ("17:images/1.png"). It is unique within the data set.
    """

    source: str
    payload: bytes  # the encoded image; empty when a fault kept it from being read
    label: str | None  # for classes
    target: float | None  # for a number
    group: str | None
    fault: Fault | None


class _Annotation(NamedTuple):
    label: str | None
    target: float | None
    group: str | None
    fault: Fault | None


def read_samples(data: DataParams, wanted: Collection[str] | None = None) -> Iterator[RawSample]:
    """Every sample of `data.path`, or those whose `source` is in `wanted`, in the order of the data set.

    The order is by name in a folder and by row in a table. Raises DataError when the data as a whole cannot be read.
    """
    root = _existing(data)
    sources = None if wanted is None else frozenset(wanted)
    if root.is_dir():
        return _read_folder(root, sources)
    rows = None if sources is None else frozenset(int(source.partition(":")[0]) for source in sources)
    return _read_parquet(root, data, rows) if root.suffix.lower() in _PARQUET else _read_csv(root, data, rows)


def count_samples(data: DataParams) -> int | None:
    """How many samples there are, for a progress bar; None where counting means reading (CSV)."""
    root = _existing(data)
    if root.is_dir():
        return sum(1 for _ in _walk(root))
    return int(_open_parquet(root).metadata.num_rows) if root.suffix.lower() in _PARQUET else None


def _existing(data: DataParams) -> Path:
    root = Path(data.path)
    if not root.exists():
        raise DataError(
            f"data.path {data.path!r} does not exist (looked in {Path.cwd()}). "
            "Point it at a folder with one sub-folder per class, or at a .csv or .parquet file."
        )
    if root.is_dir():
        if data.task == "image_regression":
            raise DataError(
                f"data.path {data.path!r} is a folder, whose sub-folders are classes, but data.task is 'image_regression'. "
                "Point data.path at a .csv or .parquet file with a column of numbers."
            )
        return root
    if root.suffix.lower() not in (*_PARQUET, ".csv"):
        raise DataError(f"data.path {data.path!r} ends in {root.suffix!r}, expected a folder, a .csv or a .parquet file.")
    return root


# --- a folder with one sub-folder per class


def _read_folder(root: Path, wanted: frozenset[str] | None) -> Iterator[RawSample]:
    _check_folder(root)
    for path in _walk(root):
        # A name that is not UTF-8 is written with escapes: tables hold text.
        source = os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace")
        if wanted is not None and source not in wanted:
            continue
        label, _, rest = source.partition("/")
        if not rest:
            beside = Fault("missing_label", f"{source} lies beside the class folders, expected inside one of them")
            yield RawSample(source, b"", None, None, None, beside)
            continue
        payload, fault = _read_file(path)
        yield RawSample(source, payload, label, None, None, fault)


def _check_folder(root: Path) -> None:
    entries = _visible(root)
    if not entries:
        raise DataError(f"data.path {str(root)!r} is an empty folder, expected one sub-folder per class with its images.")
    if not any(entry.is_dir() for entry in entries):
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(
            f"data.path {str(root)!r} has {len(entries)} files ({names}{', ...' * (len(entries) > 3)}) and no sub-folder, "
            "expected one sub-folder per class. Sort the images into folders, or point data.path at one .csv or .parquet file."
        )
    if next(_walk(root), None) is None:
        names = ", ".join(entry.name for entry in entries[:3])
        raise DataError(f"data.path {str(root)!r} has {len(entries)} sub-folders ({names}) without any file, expected images in them.")


def _visible(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"the folder {str(folder)!r} cannot be listed: {error.strerror}. Give this user the right to read it.") from error


def _walk(folder: Path | str) -> Iterator[Path]:
    for entry in _visible(folder):
        if entry.is_dir():
            if entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry.path).resolve()):
                raise DataError(f"the link {entry.path!r} leads back to a folder above it, expected every folder once. Remove the link.")
            yield from _walk(entry.path)
        else:
            yield Path(entry.path)


# --- tables


def _read_parquet(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    file = _open_parquet(path)
    names = _needed_columns(path, data, file.schema_arrow.names)
    _check_image_type(path, data.image_column, file.schema_arrow.field(data.image_column).type)
    row = 0
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            chosen = [index for index in range(batch.num_rows) if wanted is None or row + index in wanted]
            for index, cells in zip(chosen, batch.take(pa.array(chosen, pa.int64())).to_pylist(), strict=True):
                yield _table_sample(path.parent, row + index, cells, data)
            row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.path {str(path)!r} is damaged after row {row}: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)  # by pages, not by whole row groups
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data.path {str(path)!r} is not a readable Parquet file: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _check_image_type(path: Path, column: str, found: pa.DataType) -> None:
    is_bytes_and_path = pa.types.is_struct(found) and found.get_field_index("bytes") >= 0
    if is_bytes_and_path or any(test(found) for test in (pa.types.is_binary, pa.types.is_large_binary, *_STRING_TYPES)):
        return
    raise DataError(
        f"data.image_column {column!r} of {str(path)!r} has the type {found}, expected encoded image bytes "
        "(binary, or a struct with 'bytes' and 'path') or paths (string)."
    )


_STRING_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_dictionary)


def _read_csv(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            names = _needed_columns(path, data, header)
            positions = [header.index(name) for name in names]
            for row, cells in enumerate(line for line in reader if line):
                if wanted is None or row in wanted:
                    yield _csv_sample(path.parent, row, cells, len(header), dict(zip(names, positions, strict=True)), data)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"data.path {str(path)!r} is not a readable CSV near line {reader.line_num + 1}: {error}. "
                "Expected UTF-8 text, commas between the columns and quotes that close."
            ) from error


def _csv_sample(folder: Path, row: int, cells: list[str], num_columns: int, positions: dict[str, int], data: DataParams) -> RawSample:
    if len(cells) != num_columns:
        fault = Fault("malformed_row", f"{len(cells)} columns, the header has {num_columns}")
        return RawSample(str(row), b"", None, None, None, fault)
    return _table_sample(folder, row, {name: cells[position] for name, position in positions.items()}, data)


def _needed_columns(path: Path, data: DataParams, present: list[str]) -> list[str]:
    needed = {"image_column": data.image_column, "target_column": data.target_column}
    if data.group_column is not None:
        needed["group_column"] = data.group_column
    problems = [f"  data.{key} is {name!r}, {_hint(name, present)}" for key, name in needed.items() if name not in present]
    twice = [name for name in needed.values() if present.count(name) > 1]
    problems += [f"  the column {name!r} is there {present.count(name)} times" for name in sorted(set(twice))]
    if problems:
        columns = ", ".join(present) if present else "none"
        raise DataError(f"{str(path)!r} has the columns {columns}.\n" + "\n".join(problems))
    return list(dict.fromkeys(needed.values()))


def _hint(name: str, present: list[str]) -> str:
    if len(present) == 1 and any(mark in present[0] for mark in ";\t"):
        return "which is not there: the columns are not separated by commas"
    close = difflib.get_close_matches(name, present, n=1, cutoff=0.5)
    return f"which is not there; did you mean {close[0]!r}?" if close else "which is not there"


def _table_sample(folder: Path, row: int, cells: dict[str, Any], data: DataParams) -> RawSample:
    name, payload, fault = _image_cell(folder, cells[data.image_column])
    annotation = _annotate(cells, data)
    source = f"{row}:{name}" if name else str(row)
    return RawSample(source, payload, annotation.label, annotation.target, annotation.group, fault or annotation.fault)


def _image_cell(folder: Path, cell: Any) -> tuple[str | None, bytes, Fault | None]:
    """The path that a cell names, the image bytes, and what is wrong."""
    name = cell.get("path") if isinstance(cell, dict) else cell if isinstance(cell, str) else None
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(content, bytes):
        return name, content, None
    if not name:
        return None, b"", Fault("missing_image", "the image column is empty")
    path = PurePosixPath(os.path.normpath(name.replace("\\", "/")))
    # By the text of the path alone: a link inside the folder is the owner's own decision (DVC's cache makes such links).
    if path.is_absolute() or path.parts[:1] == ("..",):
        return name, b"", Fault("outside_folder", f"{name} leads out of {folder}, expected a path relative to the table's folder")
    return name, *_read_file(folder / path)


def _read_file(path: Path) -> tuple[bytes, Fault | None]:
    try:
        if path.exists() and not path.is_file():
            return b"", Fault("unreadable", f"{path} is not a regular file")
        return path.read_bytes(), None
    except FileNotFoundError:
        return b"", Fault("missing_file", f"{path} does not exist{_where_it_is(path)}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return b"", Fault("unreadable", f"{str(path)!r} cannot be read: {error}")


def _where_it_is(path: Path) -> str:
    """A hint when the file lies one folder deeper than the table says."""
    if not path.parent.is_dir():
        return ""
    deeper = next((entry.name for entry in _visible(path.parent) if entry.is_dir() and Path(entry.path, path.name).exists()), None)
    return f"; {deeper}/{path.name} does: write paths relative to the table's folder" if deeper else ""


def _annotate(cells: dict[str, Any], data: DataParams) -> _Annotation:
    group = _text(cells[data.group_column]) if data.group_column is not None else None
    label, target, fault = _read_target(cells[data.target_column], data.task)
    if fault is None and data.group_column is not None and group is None:
        fault = Fault("missing_group", f"the column {data.group_column!r} is empty, expected the name of a group")
    return _Annotation(label, target, group, fault)


def _read_target(cell: Any, task: Task) -> tuple[str | None, float | None, Fault | None]:
    text = _text(cell)
    if task == "image_classification":
        return text, None, None if text else Fault("missing_label", "the target column is empty, expected a class")
    if text is None and not isinstance(cell, float):
        return None, None, Fault("missing_target", "the target column is empty, expected a number")
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return None, None, Fault("not_a_number", f"the target is {text!r}, expected a number")
    if not math.isfinite(number):
        return None, None, Fault("non_finite_target", f"the target is {number}, expected a finite number")
    return None, number, None


def _text(cell: Any) -> str | None:
    """A cell as text without blanks around it; None when nothing is left. A whole float is written as an integer."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bytes):
        cell = cell.decode(errors="replace")
    return str(cell).strip() or None
